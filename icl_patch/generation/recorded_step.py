"""A decode step that runs as the program of its first run."""

import warnings
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from icl_patch.errors import SlowerStepsWarning
from icl_patch.generation.captured_step import CapturedStep
from icl_patch.generation.decode_step import DecodeStep, RunStep, StepOutput
from icl_patch.generation.step_program import StepProgram
from icl_patch.layers.patched_module import with_base


class RecordedStep:
    """A step that is recorded at its first call, and runs as the program at later ones.

    The second call runs both ways, on another token at another place, and compares all bits. On
    CUDA the third captures the program as a CUDA graph, which later ones replay. A step that cannot
    be recorded, or whose program gives other bits, runs the model's own code, and a program that
    cannot be captured runs as it is, both with a :class:`~icl_patch.errors.SlowerStepsWarning`. A
    step under autocast, or with other weights, modules or forwards than those that were recorded,
    runs the model's own code. Other settings of a module count from the next context on.

    Args:
        step: the step.
        on_source: gets the source of the program when it is recorded, and None if it is given up.

    Attributes:
        program: the program; None before the first call, and where there is none.
        own_code: the step in the model's own code.
    """

    def __init__(self, step: DecodeStep, on_source: Callable[[str | None], None]) -> None:
        self._on_source = on_source
        self.program: StepProgram | None = None
        self.own_code = step
        self._tree: Any = None
        self._run: RunStep = self._record
        self._device = step.inputs.current.device
        self._model = _Parts(step.plan.attached.model)

    def __call__(self) -> StepOutput:
        """Run the current token."""
        if torch.is_autocast_enabled(self._device.type) or not self._model.are_the_same:
            return self.own_code()
        return self._run()

    def _record(self) -> StepOutput:
        blocks = [block.path for block in self.own_code.plan.attached.blocks]
        leaves: list[Any] = []

        def run() -> list[Any]:
            leaves[:] = self._leaves()
            return leaves

        try:
            self.program = StepProgram(run, dict(self._names()), blocks)
        except Exception as error:
            output = self.own_code()  # an error of the model's own code comes again
            self._give_up(error)
            return output
        self._on_source(self.program.source)
        self._run = self._compare
        return StepOutput.of_leaves(leaves.__getitem__, self._tree)

    def _compare(self) -> StepOutput:
        """Run the program, then the step: what the step writes into the cache stays."""
        assert self.program is not None
        program, made = self.program, None
        reason: Exception | str = "its program gives other bits than the step"
        try:
            made = program()
        except Exception as error:  # of an operator that depends on more than what was recorded
            reason = error
        expected = self._leaves()
        self._run = self._run_program if self._device.type == "cpu" else self._capture
        if made is None or not all(
            same_bits(leaf, program.leaf(made, number))
            for number, leaf in enumerate(expected)
            if isinstance(leaf, Tensor)
        ):
            self._give_up(reason)
        return StepOutput.of_leaves(expected.__getitem__, self._tree)

    def _run_program(self) -> StepOutput:
        assert self.program is not None
        made, leaf = self.program(), self.program.leaf
        return StepOutput.of_leaves(lambda number: leaf(made, number), self._tree)

    def _capture(self) -> StepOutput:
        """Run the program as a CUDA graph, or as it is if it cannot be captured."""
        captured = CapturedStep(self._run_program, self._device)
        try:
            output = captured()
        except Exception as error:
            self._run = self._run_program
            self._warn(error)
            return self._run()
        self._run = captured
        return output

    def _give_up(self, reason: Exception | str) -> None:
        """Run the model's own code from now on."""
        self.program, self._run = None, self.own_code
        self._on_source(None)
        self._warn(reason)

    def _warn(self, reason: Exception | str) -> None:
        warn_slower(self.own_code.plan.attached.model, self._device, reason)

    def _leaves(self) -> list[Any]:
        """The step's output, flattened."""
        leaves, self._tree = tree_flatten(self.own_code().parts)
        return leaves

    def _names(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a step finds, with their names in the program's source."""
        model, inputs = self.own_code.plan.attached.model, self.own_code.inputs
        yield from model.named_parameters()
        yield from model.named_buffers()
        yield from (("current", inputs.current), ("positions", inputs.positions))
        yield "mask", inputs.mask
        if inputs.slot is not None:
            yield "slot", inputs.slot
        for number, layer in enumerate(inputs.cache.layers):
            for name in ("keys", "values"):
                if isinstance(states := getattr(layer, name, None), Tensor):
                    yield f"{name}_{number}", states


class _Parts:
    """The modules of a model as they are now: their weights and children, and the forwards that
    somebody has replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [part for module in model.modules() for part in with_base(module)]
        places = [x for part in parts for x in (part._parameters, part._buffers, part._modules)]
        # a patched module shares them with its base
        self._places: list[dict[str, Any]] = [*{id(x): x for x in places}.values()]
        self._attributes = [vars(part) for part in parts]
        self._objects = self._current()
        self._weights = [x for x in self._objects if isinstance(x, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._weights)]

    def _current(self) -> list[Any]:
        # in few calls of the interpreter: this runs before every step
        forwards = map(dict.get, self._attributes, repeat("forward"))
        return [*chain.from_iterable(map(dict.values, self._places)), *forwards]

    @property
    def are_the_same(self) -> bool:
        """Whether all of these are what and where they were."""
        current = self._current()
        return (
            len(current) == len(self._objects)
            and all(map(is_, current, self._objects))
            and [*map(Tensor.data_ptr, self._weights)] == self._addresses
        )


def warn_slower(model: nn.Module, device: torch.device, reason: Exception | str) -> None:
    """Warn that steps are no program, or no CUDA graph."""
    name, why = type(model).__name__, str(reason).partition("\n")[0]
    slower = (
        "run the model's own code, which takes the host 2 to 4 times as long as a program of them"
        if device.type == "cpu"
        else "are no CUDA graph, so the GPU waits for the host in each of them"
    )
    warnings.warn(
        f"steps of {name} {slower}: {why}. Ask for compile=False to have it without this warning",
        SlowerStepsWarning,
        stacklevel=2,
    )


def same_bits(a: Tensor, b: Any) -> bool:
    """Whether ``b`` is a tensor of the same shape, dtype and bits."""
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))
