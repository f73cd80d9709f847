"""What a patched model must do in whichever implementation runs its products:
``test_dispatch.py`` calls it in plain torch, ``interpreter_checks.py`` in Triton's interpreter.
"""

from typing import Any
from unittest.mock import patch

import torch
from support import expert_products, op_calls, row_ops
from support.numeric import noise_limit
from support.random_models import build, shallow
from torch.utils._python_dispatch import TorchDispatchMode

from icl_patch import ContextPatcher, metrics, ops
from icl_patch.ops import dispatch

MODELS = {
    "gemma3": lambda: build(
        "gemma3", num_hidden_layers=1, layer_types=["full_attention"], hidden_size=40
    ),
    "llama": lambda: build("llama", num_hidden_layers=1),
    "gpt2": lambda: shallow("gpt2"),  # its matrices are Conv1D's, (K, N), and it ends in a bias
}


class NoKernels(TorchDispatchMode):
    """Refuses the operators of the native library and of Triton."""

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function.namespace != "icl_patch", function
        return function(*args, **kwargs or {})


def check_plain_torch() -> None:
    """No op runs a kernel of ours, with gradients recorded or without."""
    for name in op_calls.CALLS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            given = [x.to(dtype) if x.is_floating_point() else x for x in op_calls.arguments(0)]
            for grad in (True, False):
                with NoKernels(), torch.set_grad_enabled(grad):
                    op_calls.call(name, given)


def check_readers_share_a_launch() -> None:
    """Gate and up are recorded together, and the patch has the bits that it has without."""
    from icl_patch import kernels

    ids = torch.randint(1, 90, (1, 4))
    with ContextPatcher(MODELS["llama"](), "stable") as patcher:

        def factors() -> dict[str, torch.Tensor]:
            (step,) = patcher.generate(ids, max_new_tokens=1, mode="two_stream")
            return dict(step.patch.layers[0])

        patcher.plans.choose("two_stream")  # which is tried now
        with patch.object(kernels, "record_linears", wraps=kernels.record_linears) as grouped:
            together = factors()
        with patch.object(ops, "has_triton", lambda _: False):
            apart = factors()
    assert [len(call.args[1]) for call in grouped.call_args_list] == [2]
    assert together.keys() == apart.keys()
    assert all(torch.equal(factor, apart[name]) for name, factor in together.items())


def check_without_kernels() -> None:
    """What is to be done by plain torch, where it is chosen."""
    assert dispatch.backend == "torch"
    check_plain_torch()
    row_ops.check_every_dtype(widths=(1, 70))
    for dtype in (torch.float64, torch.float32):
        expert_products.check_products(ops.expert_linear, dtype, expert_products.SMALL, bits=False)
    for op in op_calls.DIFFERENTIABLE:
        op_calls.check_derivatives(op)
        op_calls.check_mapped(op)
    for name, update in (("gemma3", "stable"), *((name, "exact") for name in MODELS)):
        check_model(name, update)


def check_model(name: str, update: str) -> None:
    """A patch of a context, beside the pass that was recorded."""
    kept, model = torch.randint(1, 90, (2, 2)), MODELS[name]()
    with ContextPatcher(model, update) as patcher:
        computed = patcher.compute(torch.randint(1, 90, (2, 5)), kept)
        logits = patcher.forward(kept, computed)
    error = float(metrics.linf(logits, computed.logits).max())
    print(name, update, error)
    assert error <= noise_limit(model)
    assert update != "exact" or torch.equal(logits, computed.logits)
