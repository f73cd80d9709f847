"""Which implementation runs the products, and that whole models are patched the same in plain
torch; in Triton's interpreter: ``support/interpreter_checks.py``.
"""

import itertools
import logging
import runpy

import pytest
import torch
from support import expert_products, op_calls, row_ops
from support.backend_checks import MODELS, check_model
from support.numeric import FLOATS

from icl_patch import ops
from icl_patch.ops import dispatch


def test_whole_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ICL_PATCH_OPS", "torch")
    monkeypatch.setattr(dispatch, "backend", runpy.run_path(dispatch.__file__)["backend"])
    monkeypatch.setattr(dispatch, "_kernels", lambda: pytest.fail("Triton's kernels are loaded"))
    assert dispatch.backend == "torch"
    for name, dtype, grad in itertools.product(op_calls.CALLS, FLOATS.values(), (True, False)):
        given = [x.to(dtype) if x.is_floating_point() else x for x in op_calls.arguments(0)]
        with op_calls.Operators() as found, torch.set_grad_enabled(grad):
            op_calls.call(name, given)
        assert not found.seen
    for dtype in FLOATS.values():
        row_ops.check_all(dtype, widths=(1, 70))
    for dtype in (torch.float64, torch.float32):
        expert_products.check_products(ops.expert_linear, dtype, expert_products.SMALL, bits=False)
    for op in op_calls.DIFFERENTIABLE:
        op_calls.check_derivatives(op)
        op_calls.check_mapped(op)
    op_calls.check_without_derivatives()
    for name, update in (("gemma3", "stable"), *((name, "exact") for name in MODELS)):
        check_model(name, update)
    assert capsys.readouterr().out.count("exact 0.0") == 3


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICL_PATCH_OPS", "cuda")
    message = "expected ICL_PATCH_OPS=auto, torch or triton, got 'cuda'"
    with pytest.raises(ValueError, match=message):
        runpy.run_path(dispatch.__file__)


def test_without_triton_plain_torch_runs_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(dispatch, "backend", "triton")
    monkeypatch.setattr(dispatch, "import_module", missing)
    dispatch._load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            z, weight, u, v = (torch.randn(size) for size in ((3, 5), (7, 5), (3, 7), (3, 5)))
            out = [ops.patched_linear(z, weight, u, v) for _ in range(2)]
    finally:
        dispatch._load_kernels.cache_clear()
    change = weight + u.unsqueeze(2) * v.unsqueeze(1)
    torch.testing.assert_close(out[1], (change @ z.unsqueeze(2)).squeeze(2))
    assert [record.getMessage() for record in caplog.records] == [
        "icl_patch runs on plain torch: its kernels need triton (pip install 'icl-patch[gpu]'), No"
        " module named 'icl_patch.kernels'"
    ]


def test_product_paths_of_the_cpu() -> None:
    """A row has the same bits alone and among others of its path; the number of rows and the dtype
    choose the path.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        z, weight = torch.randn(20, 33, dtype=dtype), torch.randn(50, 33, dtype=dtype)
        most = max(rows for rows in range(1, 21) if ops.product_path(z, rows) == "gemv")
        assert most in ((16,) if dtype is torch.float32 else (4, 16, 20))
        together = ops.patched_linear(z[:most], weight)
        alone = [ops.patched_linear(z[i : i + 1], weight) for i in range(most)]
        assert torch.equal(torch.cat(alone), together)
        forced = ops.patched_linear(z, weight, path="gemv")
        assert torch.equal(forced[:most], together)
        if most < 20:
            assert torch.equal(ops.patched_linear(z, weight), torch.nn.functional.linear(z, weight))
