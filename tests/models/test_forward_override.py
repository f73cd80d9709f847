"""Forwards that are replaced within a context: in one thread, entered again and again, and gone
afterwards.
"""

import copy
import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType

import pytest
import torch
from support.copies import COPIES, check_plain
from torch import nn

from icl_patch.models.forward_override import ForwardOverrides

X = torch.ones(2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Scale(nn.Module):
    """Its output changes with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Negated(Scale):
    """With a forward of somebody else, which copies bind to the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = partial(negated, self)  # type: ignore[method-assign]


def negated(scale: Scale, x: torch.Tensor) -> torch.Tensor:
    return -scale.weight * x


def test_a_copy_has_the_forward_before_with_weights_of_its_own() -> None:
    model = nn.Sequential(Scale(), Negated())
    inner, outer = (
        ForwardOverrides([(model, doubled), *((part, doubled) for part in model)]) for _ in range(2)
    )
    with inner, outer:
        copies = [copied(model) for copied in COPIES]
        shallow = copy.copy(model[0])
    vars(shallow)["_parameters"] = {"weight": nn.Parameter(torch.tensor(5.0))}
    assert torch.equal(shallow(X), 5 * X)
    for twin in copies:
        twin[0].weight.data.fill_(3)
        twin(X).sum().backward()
        assert torch.equal(twin(X), -3 * X)
        assert twin[1].weight.grad == -3 * X.sum() and model[1].weight.grad is None
        del twin[1].forward
        check_plain(twin)
    assert torch.equal(model(X), -X)
    del model[1].forward
    check_plain(model)


def test_other_threads_run_the_forward_that_was_there_when_it_was_entered() -> None:
    module = nn.Identity()
    inner = ForwardOverrides([(module, doubled)])
    outer = ForwardOverrides([(module, lambda x: 3 * x)])
    with ThreadPoolExecutor(1) as other:
        with outer, inner:
            assert torch.equal(module(X), 2 * X)
            assert torch.equal(other.submit(module, X).result(), X)
        with inner:
            assert torch.equal(other.submit(module, X).result(), X)

        def in_the_other_thread() -> torch.Tensor:
            with inner:
                return module(X)

        assert torch.equal(other.submit(in_the_other_thread).result(), 2 * X)
    assert torch.equal(module(X), X)


def test_contexts_of_two_threads_end_in_any_order() -> None:
    plain, replaced = nn.Identity(), nn.Identity()
    somebody_elses = MethodType(lambda _module, x: -x, replaced)
    replaced.forward = somebody_elses  # type: ignore[method-assign]
    ours, others = (ForwardOverrides([(x, doubled) for x in (plain, replaced)]) for _ in range(2))

    def outputs() -> list[float]:
        return [float(module(X)[0]) for module in (plain, replaced)]

    for _ in range(2):
        with ThreadPoolExecutor(1) as other:
            with ours:
                other.submit(others.__enter__).result()
                assert outputs() == other.submit(outputs).result() == [2, 2]
                assert inspect.signature(plain.forward) == inspect.signature(nn.Identity().forward)
            assert outputs() == [1, -1]
            assert other.submit(outputs).result() == [2, 2]
            other.submit(others.__exit__).result()
        assert "forward" not in vars(plain) and replaced.forward is somebody_elses


def test_an_interrupt_while_entering_leaves_nothing() -> None:
    class Late(nn.Identity):
        interrupted = False

        def __getattribute__(self, name: str) -> object:
            if name == "forward" and type(self).interrupted:
                raise KeyboardInterrupt
            return super().__getattribute__(name)

    first, late = nn.Identity(), Late()
    overrides = ForwardOverrides([(first, doubled), (late, doubled)])
    Late.interrupted = True
    with pytest.raises(KeyboardInterrupt), overrides:
        pass
    Late.interrupted = False
    assert "forward" not in vars(first) and "forward" not in vars(late)
    with overrides:
        assert torch.equal(first(X), 2 * X) and torch.equal(late(X), 2 * X)
