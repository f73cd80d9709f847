"""What runs in Triton's interpreter beside the kernels themselves: whole models, and the check that
a tuned configuration has to pass. ``test_kernels.py`` runs it with :mod:`kernel_checks`.
"""

from collections.abc import Iterable
from signal import SIGSEGV
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support import attention, interpreter, norm_recording, op_calls
from support.backend_checks import check_model
from support.compiled import needs_compiler
from support.guard_pages import status_of_child
from support.numeric import same_bits

from icl_patch import ops
from icl_patch.bench import tuning
from icl_patch.generation.step_program import StepProgram
from icl_patch.kernels.runtime.config import Config
from icl_patch.ops import dispatch

interpreter.prepare()


@triton.jit
def _copy_kernel(x_ptr, y_ptr, start, end):
    lanes = tl.arange(0, 64) - 32
    inside = (lanes >= start) & (lanes < end)
    x = tl.load(x_ptr + lanes, mask=inside)
    tl.store(y_ptr + lanes, tl.where(lanes < 0, 0.0, x), mask=inside)


def test_an_access_outside_of_a_tensor_ends_the_process() -> None:
    """And a store into the rest of its page is seen."""
    x, y = torch.ones(5), torch.zeros(5)
    assert status_of_child(lambda: _copy_kernel[(1,)](x, y, 0, 6)) == SIGSEGV
    with pytest.raises(AssertionError, match="_copy_kernel wrote outside of y_ptr"):
        _copy_kernel[(1,)](x, y, -1, 5)


def some_of(names: Iterable[str], *chosen: str) -> Any:
    """The others run with the stress tests."""
    marks = [pytest.mark.stress]
    return [pytest.param(name, marks=[] if name in chosen else marks) for name in names]


# "op, ...": another call of an op that is there
OPS = [op for op in op_calls.DIFFERENTIABLE if "," not in op]


@pytest.mark.parametrize("op", some_of(OPS, "patched_linear", "norm_pair"))
def test_an_op_is_derived_and_mapped(op: str) -> None:
    op_calls.check_derivatives(op)
    op_calls.check_mapped(op)


@pytest.mark.parametrize("op", some_of(op_calls.CALLS, "patched_linear, a pool", "record_linears"))
def test_an_op_is_traced(op: str) -> None:
    op_calls.check_traced(op)


def test_results_without_derivatives() -> None:
    op_calls.check_without_derivatives()


def test_compiled_graphs_have_the_kernels() -> None:
    op_calls.check_compiled()


def test_a_program_writes_the_token_in_the_attentions_launches() -> None:
    query, key, value, mask = attention.problem((1, 2, 1, 5, 4, 4), torch.float32)
    x, slot = torch.cat([query.flatten(), key[0, 0, 0], value[0, 0, 0]])[None], torch.tensor([2])

    def step() -> torch.Tensor:
        parts = (x * 2).split([8, 4, 4], -1)
        for cache, part in zip((key, value), parts[1:], strict=True):
            cache.index_copy_(2, slot, part[None, None])
        return ops.attention_pair(parts[0].view(1, 2, 4), key, value, slot, mask)

    with torch.no_grad():
        program = StepProgram(lambda: [step()], {}, ())
        assert program.source.count("write_and_attend(") == 1 and "copy" not in program.source
        x.mul_(-1)
        expected, held = step(), (key.clone(), value.clone())
        key[:, :, 2], value[:, :, 2] = torch.nan, torch.nan
        assert same_bits(program.leaf(program.function(), 0), expected)
        assert all(map(same_bits, (key, value), held))


def test_readers_share_a_launch() -> None:
    """A step's program records gate and up together, with the bits that they have alone."""
    x, weights = torch.randn(2, 5), [torch.randn(3, 5), torch.randn(3, 5)]

    def step() -> torch.Tensor:
        z = x * 2
        direction = ops.read_direction(z[1:])
        pairs = [ops.record_linear(z, weight, direction=direction)[:2] for weight in weights]
        return torch.cat([part for pair in pairs for part in pair])

    with torch.no_grad():
        program = StepProgram(lambda: [step()], {}, ())
        assert program.source.count("record_linears(") == 1
        x.mul_(-3)
        assert torch.equal(program.leaf(program.function(), 0), step())


MORE_MODELS = [
    pytest.param(*of, marks=pytest.mark.stress) for of in (("gemma3", "stable"), ("gpt2", "exact"))
]


@pytest.mark.parametrize(("name", "update"), [("gemma3", "exact"), *MORE_MODELS])
def test_whole_models(name: str, update: str) -> None:
    assert dispatch.backend == "triton"
    check_model(name, update)


WRONG = {
    "off": (lambda rows, call: 0.1, "fp64"),
    "nan": (lambda rows, call: float("nan"), "fp64"),
    "not repeatable": (lambda rows, call: 0.002 * (call - 1), "twice"),
    "sees its batch": (lambda rows, call: 0.002 * (rows == 1), "alone"),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_a_tuned_configuration_is_checked(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, said: str
) -> None:
    weight = torch.randn(17, 70).bfloat16() / 8
    config = Config(True, 16, 32, 128, 4, 2)
    operands = tuning.random_operands((17, 70), 2, 1, weight.dtype, weight.device)
    tuning.check(weight, operands, config)
    right, calls = tuning.launch_linear, []

    def launch(z: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return right(z, *given, **options) + wrong(len(z), len(calls))

    monkeypatch.setattr(tuning, "launch_linear", launch)
    with pytest.raises(AssertionError, match=said):
        tuning.check(weight, operands, config)


@needs_compiler
@pytest.mark.parametrize("form", norm_recording.FORMS)
def test_a_recorded_norm_has_the_bits_of_its_replay(form: str) -> None:
    """The CUDA kernel adds up as the kernels here do, which a replay runs. In bf16 the interpreter
    cuts off.
    """
    sizes = ((1, 1, 1), (3, 48, 72), (3, 129, 2049), (1, 1152, 6912), (1, 2560, 100), (1, 4097, 9))
    for rows, d, k in sizes:
        for dtype in (torch.float32, torch.float16) if rows == 3 else (torch.float32,):
            given = norm_recording.random_rows(rows, d, k, dtype)
            found = norm_recording.on_fibers(given, form)
            assert same_bits(found.y_pair, norm_recording.replayed(given, found, form))
            v, inverse_norm2, _ = ops.read_direction(given[1])
            assert same_bits(v, found.direction.v)
            assert same_bits(inverse_norm2, found.direction.inverse_norm2)
