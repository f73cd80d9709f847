"""Forwards that are replaced within a context: in one thread, entered again and again, and gone
afterwards.
"""

import inspect
from concurrent.futures import ThreadPoolExecutor
from types import MethodType

import pytest
import torch
from torch import nn

from icl_patch.models.forward_override import ForwardOverrides

X = torch.ones(2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_each_time_the_forward_before_comes_back() -> None:
    plain, replaced = nn.Identity(), nn.Identity()
    somebody_elses = replaced.forward = lambda x: -x  # type: ignore[method-assign]
    overrides = ForwardOverrides([(plain, doubled), (replaced, doubled)])
    for _ in range(3):
        with overrides:
            assert torch.equal(plain(X), 2 * X) and torch.equal(replaced(X), 2 * X)
            assert inspect.signature(plain.forward) == inspect.signature(nn.Identity().forward)
        assert "forward" not in vars(plain) and replaced.forward is somebody_elses


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

    def in_the_other_thread() -> list[torch.Tensor]:
        others.__enter__()
        return [plain(X), replaced(X)]

    def outputs() -> list[torch.Tensor]:
        return [plain(X), replaced(X)]

    def end() -> list[torch.Tensor]:
        found = outputs()
        others.__exit__()
        return found

    for _ in range(2):
        with ThreadPoolExecutor(1) as other:
            with ours:
                assert all(
                    torch.equal(x, 2 * X) for x in other.submit(in_the_other_thread).result()
                )
                assert all(torch.equal(x, 2 * X) for x in outputs())
            assert torch.equal(plain(X), X) and torch.equal(replaced(X), -X)
            assert all(torch.equal(x, 2 * X) for x in other.submit(end).result())
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
