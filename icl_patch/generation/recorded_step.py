"""A decode step that runs as the program of its first run, as it is or compiled."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from icl_patch import metrics
from icl_patch.errors import SlowerStepsWarning, UnsupportedModelError
from icl_patch.generation.captured_step import CapturedStep
from icl_patch.generation.decode_step import DecodeStep, RunStep, StepOutput
from icl_patch.generation.region_compiler import in_regions
from icl_patch.generation.step_program import StepProgram


class RecordedStep:
    """A step that is recorded at its first call, and runs as the program at later ones.

    The second call runs both ways, on another token at another place, and compares all bits. On
    CUDA the third captures the program as a CUDA graph, which later ones replay. A step that cannot
    be recorded, or whose program gives other bits, runs the model's own code, and a program that
    cannot be captured runs as it is, both with a :class:`~icl_patch.errors.SlowerStepsWarning`. A
    step under autocast, or with other weights than those that were recorded, runs the model's own
    code.

    A compiled program must have the step's bits too in the batch-invariant arithmetic, because the
    replay of its patch has them. In the model's own arithmetic its logits must be those of the step
    up to rounding. There is no way back from a step that cannot be compiled.

    Args:
        step: the step.
        on_source: gets the source of the program when it is recorded, and None if it is given up.
        compiled: whether the program is compiled.

    Attributes:
        program: the program; None before the first call, and where there is none.
        own_code: the step in the model's own code.

    Raises:
        UnsupportedModelError: by a call, the step cannot be compiled.
    """

    def __init__(
        self, step: DecodeStep, on_source: Callable[[str | None], None], *, compiled: bool
    ) -> None:
        self._on_source, self._compiled = on_source, compiled
        self.program: StepProgram | None = None
        self.own_code = step
        self._tree: Any = None
        self._run: RunStep = self._record
        self._run_proven: RunStep  # of the calls after a comparison
        self._run_values: Callable[[], Sequence[Tensor]]  # the program as it runs
        self._device = step.inputs.current.device
        self._watch = step.plan.attached.watch
        self._recorded_with: int | None = None  # the count of its weights then
        self._warned = False  # of steps without the program
        self._was_right = False  # whether the program was, when it was last compared

    def __call__(self) -> StepOutput:
        """Run the current token."""
        autocast = torch.is_autocast_enabled(self._device.type)
        if autocast or not self.is_current:
            if not self._warned:
                self._warned = True
                reason = "autocast is on" if autocast else "its weights have changed since"
                warn_slower(self.own_code.plan.attached.model, self._device, reason)
            return self.own_code()
        return self._run()

    @property
    def is_current(self) -> bool:
        """Whether the model's weights are those that were recorded, if there are any."""
        return self._recorded_with in (None, self._watch.weights)

    def compare_again(self) -> None:
        """Let the next call run both the program and the model's code, which may read things that
        are not watched, such as a function of its source file.
        """
        if self.program is not None:
            self._run = self._compare

    def _record(self) -> StepOutput:
        plan, leaves = self.own_code.plan, list[Any]()
        blocks = plan.attached.blocks

        def run() -> list[Any]:
            leaves[:] = self._leaves()
            return leaves

        try:
            self.program = StepProgram(run, dict(self._names()), [block.path for block in blocks])
            self._run_values = self.program.function
            if self._compiled:
                modules = [block.module for block in blocks]
                self._run_values = in_regions(
                    self._run_values, modules, eager_rounding=plan.keeps_bits
                )
        except Exception as error:
            output = self.own_code()  # an error of the model's own code comes again
            self._give_up(error)
            return output
        self._on_source(self.program.source)
        self._recorded_with = self._watch.weights
        self._run = self._compare
        self._run_proven = self._run_program if self._device.type == "cpu" else self._capture
        return self._output(leaves.__getitem__)

    def _compare(self) -> StepOutput:
        """Run the program, then the step: what the step writes into the cache stays."""
        assert self.program is not None
        reason: Exception | str | None
        try:
            values = self._run_values()
        except Exception as error:  # of an operator that depends on more than what was recorded
            expected, reason = self._leaves(), error
        else:
            expected = self._leaves()
            reason = self._difference(values, expected)
        if reason is None:
            self._run = self._run_proven
        elif self._was_right:  # the model's code reads something else now
            self.program, self._run = None, self._record
        else:
            self._give_up(reason)
        self._was_right = reason is None
        return self._output(expected.__getitem__)

    def _difference(self, values: Sequence[Tensor], expected: Sequence[Any]) -> str | None:
        """What is wrong with a program's outputs, if anything is."""
        assert self.program is not None
        plan, program = self.own_code.plan, self.program
        found = [program.leaf(values, number) for number in range(len(expected))]
        if self._compiled and not plan.keeps_bits:
            error = metrics.linf(found[0], expected[0]).max()
            # logits that are not finite are refused behind the step
            if error <= plan.attached.replay_limit or not metrics.all_finite(expected[0]):
                return None
            return f"the compiled step is off by {error:.1g} of the largest logit"
        pairs = zip(expected, found, strict=True)
        same = all(same_bits(*pair) for pair in pairs if isinstance(pair[0], Tensor))
        return None if same else "its program gives other bits than the step"

    def _run_program(self) -> StepOutput:
        assert self.program is not None
        values, leaf = self._run_values(), self.program.leaf
        return self._output(lambda number: leaf(values, number))

    def _capture(self) -> StepOutput:
        """Run the program as a CUDA graph, or as it is if it cannot be captured."""
        program, self._run = self._run_values, self._run_program
        self._run_proven = self._run_program
        self._run_values = CapturedStep(program, self._device)
        try:
            return self._run()
        except Exception as error:
            self._run_values = program
            warn_slower(self.own_code.plan.attached.model, self._device, error)
            return self._run()

    def _give_up(self, reason: Exception | str) -> None:
        """Run the model's own code from now on; a compiled step is refused."""
        self.program = None
        self._on_source(None)
        model = self.own_code.plan.attached.model
        if not self._compiled:
            self._run = self.own_code
            warn_slower(model, self._device, reason)
            return
        self._run = self._record
        if isinstance(reason, MemoryError | torch.OutOfMemoryError):
            raise reason
        name, why = type(model).__name__, str(reason).partition("\n")[0]
        cause = reason if isinstance(reason, Exception) else None
        raise UnsupportedModelError(f"compile does not cover {name}: {why}") from cause

    def _leaves(self) -> list[Any]:
        """The step's output, flattened."""
        output = self.own_code()
        leaves, self._tree = tree_flatten(output.details())
        return [output.logits, output.maybe_infeasible, *leaves]

    def _output(self, leaf: Callable[[int], Any]) -> StepOutput:
        """The output with these leaves; its details are put together if they are used."""
        numbers = range(2, 2 + self._tree.num_leaves)
        return StepOutput(leaf(0), leaf(1), lambda: tree_unflatten(map(leaf, numbers), self._tree))

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
