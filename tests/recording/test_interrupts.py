"""An interrupt at any place of a step, and hooks that call the patcher inside its own pass."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from support.patchers import Snapshot
from support.random_models import build, shallow, tokens

from icl_patch import ContextPatcher
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, running_in

IDS = tokens(5, 1, 6)
# Functions that take away what a pass has put into the model.
LEAVING = ("off", "__exit__", "_restore", "exclusive", "turn", "__setattr__", "_exit_wrapper")


class Interrupt:
    """Counts the lines that are run in some functions, and interrupts at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Callable | None:
        """Not in torch, whose own state an interrupt can spoil, nor in what torch enters."""
        file, caller = frame.f_code.co_filename, frame.f_back
        ours = "/icl_patch/" in file or (
            file.endswith("/contextlib.py")
            and caller is not None
            and "/icl_patch/" in caller.f_code.co_filename
        )
        return self._line if ours and frame.f_code.co_name in LEAVING else None

    def _line(self, _frame: FrameType, event: str, _argument: object) -> Callable:
        self.lines += event == "line"
        if self.lines == self.at and event == "line":
            raise KeyboardInterrupt
        return self._line


def interrupting(model: Any, run: Callable[[], object], most: int) -> Iterator[None]:
    """Interrupt ``run`` at one place after the other, at most so many; the model is itself at
    once.
    """
    plain = model(IDS).logits
    with Interrupt() as counted:
        run()
    every = max(1, counted.lines // most)
    for at in range(1, counted.lines - every + 1, every):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            run()
        assert torch.equal(model(IDS).logits, plain), at
        yield


@pytest.mark.parametrize("update", [pytest.param("stable", marks=pytest.mark.stress), "exact"])
def test_an_interrupt_while_a_step_leaves_leaves_nothing(update: str) -> None:
    """And the patcher goes on: at twenty places, one patcher."""
    model = build("llama", num_hidden_layers=2)
    with Snapshot(model), ContextPatcher(model, update) as patcher:

        def steps() -> torch.Tensor:
            return torch.stack([step.logits for step in patcher.generate(IDS, max_new_tokens=2)])

        steps()
        expected = steps()
        places = list[bool](torch.equal(steps(), expected) for _ in interrupting(model, steps, 20))
    assert len(places) >= 19 and all(places)


def test_an_interrupt_while_an_arithmetic_leaves_leaves_nothing() -> None:
    model = shallow("llama")

    def run() -> None:
        with running_in(BATCH_INVARIANT, model, attention=True):
            pass

    run()
    assert len(list(interrupting(model, run, 1000))) >= 50


@pytest.mark.parametrize("call", ["compute", "forward", "generate"])
def test_a_hook_that_calls_the_patcher_in_its_own_pass_is_told(call: str) -> None:
    model = shallow("llama")
    context, kept = tokens(0, 1, 5), tokens(1, 1, 2)
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(context, kept)
        calls: dict[str, Callable[[], Any]] = {
            "compute": lambda: patcher.compute(context, kept),
            "forward": lambda: patcher.forward(kept, patch),
            "generate": lambda: list(patcher.generate(context, max_new_tokens=1)),
        }
        expected = patcher.forward(kept, patch)

        def hook(*_: object) -> None:
            calls[call]()

        refusal = pytest.raises(ValueError, match="outside of the patcher's own passes")
        with model.model.layers[0].register_forward_hook(hook), refusal:
            patcher.forward(kept, patch)
        assert torch.equal(patcher.forward(kept, patch), expected)
