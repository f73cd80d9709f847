"""A decode step that runs as the program of its first run."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from icl_patch.errors import SlowerStepsWarning
from icl_patch.generation.one_pass import DecodeStep, RunStep, StepOutput
from icl_patch.generation.step_program import StepProgram
from icl_patch.layers.patched_module import with_base


class RecordedStep:
    """A step that is recorded at its first call, and runs as the program at later ones.

    The second call runs both ways, on another token at another place, and compares all bits. A step
    that cannot be recorded, or whose program gives other bits, runs the model's own code, with a
    :class:`~icl_patch.errors.SlowerStepsWarning`; so does each step under autocast, or with other
    weights, modules or forwards than those that were recorded.

    Attributes:
        program: the program; None before the first call, and where there is none.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.program: StepProgram | None = None
        self._step = step
        self._tree: Any = None
        self._run: RunStep = self._record
        model: nn.Module = step.plan.attached.model
        parts = [part for module in model.modules() for part in with_base(module)]
        # every place of a weight, with the weight and its memory
        self._weights = [
            (places, name, weight, weight.data_ptr())
            for part in parts
            for places in (part._parameters, part._buffers)
            for name, weight in places.items()
            if weight is not None
        ]
        self._code = [
            (part, vars(part).get("forward"), [*part._modules.values()]) for part in parts
        ]

    def __call__(self) -> StepOutput:
        """Run the current token."""
        device = self._step.inputs.current.device.type
        if torch.is_autocast_enabled(device) or not self._is_the_same_model():
            return self._step()
        return self._run()

    def _is_the_same_model(self) -> bool:
        for places, name, weight, address in self._weights:
            if places.get(name) is not weight or weight.data_ptr() != address:
                return False
        for part, forward, children in self._code:
            if vars(part).get("forward") is not forward or [*part._modules.values()] != children:
                return False
        return True

    def _record(self) -> StepOutput:
        blocks = [block.block.path for block in self._step.plan.attached.blocks]
        leaves: list[Any] = []

        def run() -> list[Any]:
            leaves[:] = self._leaves()
            return leaves

        try:
            self.program = StepProgram(run, dict(self._names()), blocks)
        except Exception as error:
            output = self._step()  # an error of the model's own code comes again
            self._give_up(str(error).partition("\n")[0])
            return output
        self._run = self._compare
        return self._output(leaves.__getitem__)

    def _compare(self) -> StepOutput:
        """Run the step and its program."""
        assert self.program is not None
        program, expected = self.program, self._leaves()
        self._run = self._run_program
        try:
            made = program()
        except Exception as error:  # of an operator that depends on more than what was recorded
            self._give_up(str(error).partition("\n")[0])
            return self._output(expected.__getitem__)
        for number, leaf in enumerate(expected):
            if isinstance(leaf, Tensor) and not _same_bits(leaf, program.leaf(made, number)):
                self._give_up("its program gives other bits than the step")
                break
        return self._output(expected.__getitem__)

    def _run_program(self) -> StepOutput:
        assert self.program is not None
        made, leaf = self.program(), self.program.leaf
        return self._output(lambda number: leaf(made, number))

    def _give_up(self, reason: str) -> None:
        """Run the model's own code from now on."""
        self.program, self._run = None, self._step
        warn_slower(self._step.plan.attached.model, reason)

    def _leaves(self) -> list[Any]:
        """The step's output, flattened."""
        leaves, self._tree = tree_flatten(self._step().parts)
        return leaves

    def _output(self, leaf: Any) -> StepOutput:
        """The output of which ``leaf`` gives the leaves by number."""
        tree: Any = self._tree

        def details() -> Any:
            return tree_unflatten(map(leaf, range(tree.num_leaves)), tree)[2]

        return StepOutput(leaf(0), leaf(1), details)

    def _names(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a step finds, with their names in the program's source."""
        model, inputs = self._step.plan.attached.model, self._step.inputs
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


def warn_slower(model: nn.Module, reason: str) -> None:
    """Warn that a step is no program."""
    warnings.warn(
        f"steps of {type(model).__name__} run the model's own code, which takes the host 2"
        f" to 4 times as long as a program of them: {reason}. Ask for compile=False to have it"
        " without this warning",
        SlowerStepsWarning,
        stacklevel=2,
    )


def _same_bits(a: Tensor, b: Any) -> bool:
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))
