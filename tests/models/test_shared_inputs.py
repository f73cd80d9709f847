"""Linear maps of one input, computed together in a decode step."""

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from icl_patch import ops
from icl_patch.models.forward_override import Overrides
from icl_patch.models.shared_inputs import SharedInputs


class Attention(nn.Module):
    """q, k and v of the input, then o of their sum; ``between`` runs before v."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 4), nn.Linear(6, 4, bias=False), nn.Linear(6, 4)
        self.o = nn.Linear(4, 6)
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        read = self.q(x) + self.k(x)
        return self.o(read + self.v(self.between(x)))


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many maps each call of the op has had."""
    seen: list[int] = []
    run = ops.patched_linears

    def counting(z: Tensor, weights: Sequence[Tensor], **others: Sequence) -> list[Tensor]:
        seen.append(len(weights))
        return run(z, weights, **others)

    monkeypatch.setattr(ops, "patched_linears", counting)
    return seen


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def step(shared: SharedInputs, model: nn.Module, x: Tensor) -> Tensor:
    forwards = [(module, shared.forward_of(module)) for module in linears(model)]
    with Overrides(forwards), shared.one_pass():
        return model(x)


def test_later_passes_compute_maps_of_one_input_together(grouped: list[int]) -> None:
    torch.manual_seed(0)
    model = Attention()
    others: dict[nn.Module, list[nn.Linear]] = {}
    shared = SharedInputs(linears(model), others)
    for calls in ([], [3], [3]):
        x = torch.randn(2, 1, 6)
        assert torch.allclose(step(shared, model, x), model(x), atol=1e-6)
        assert grouped == calls
        grouped.clear()
    assert others == {model.q: [model.k, model.v]}
    step(SharedInputs(linears(model), others), model, x)  # of a later generation
    step(SharedInputs([model.q, model.v], others), model, x)  # somebody has put a hook on k
    assert grouped == [3, 2]


@pytest.mark.parametrize("change", ["another tensor", "in place", "inference", "autocast"])
def test_what_is_not_the_same_input_is_computed_alone(change: str, grouped: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 1, 6)
    shared = SharedInputs(linears(model), {})
    step(shared, model, x)
    if change == "another tensor":
        model.between = lambda x: 2 * x
    elif change == "in place":
        model.between = lambda x: x.mul_(2)
    with (
        torch.inference_mode(change == "inference"),
        torch.autocast("cpu", enabled=change == "autocast"),
    ):
        x = torch.randn(2, 1, 6)
        expected = model(x.clone())
        assert torch.allclose(step(shared, model, x), expected, atol=1e-6)
    assert grouped == ([3] if change in ("another tensor", "in place") else [])


def test_nothing_is_kept_after_a_pass(grouped: list[int]) -> None:
    torch.manual_seed(0)
    model = Attention()
    shared = SharedInputs(linears(model), {})
    kept: list[weakref.ref] = []

    def fail(x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))
        raise RuntimeError("between")

    for _ in range(2):  # a pass that fails finds nothing
        step(shared, model, torch.randn(2, 1, 6))
        model.between = fail
        with pytest.raises(RuntimeError, match="between"):
            step(shared, model, torch.randn(2, 1, 6))
        gc.collect()
        assert kept[-1]() is None
        model.between = Attention().between
    assert grouped == [3, 3, 3]


def test_one_that_is_called_before_the_first(grouped: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 1, 6)
    shared = SharedInputs(linears(model), {})
    step(shared, model, x)
    model.forward = lambda x: model.v(x) + model.q(x) + model.k(x) + model.k(x)
    assert torch.allclose(step(shared, model, x), model(x), atol=1e-6)
    assert grouped == [3]
