"""A decode step as a compiled graph of operators.

Tracing records the operators of one step as it runs; hooks, contexts and the model's Python code
leave nothing else. A model cannot be traced if its code reads a tensor's numbers on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves

from icl_patch import metrics
from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.decode_step import DecodeStep, StepDetails, StepOutput
from icl_patch.generation.operator_recorder import NoHostReads
from icl_patch.generation.region_compiler import in_regions


class TracedStep:
    """A step as a compiled graph of operators, which the first call makes.

    The first call checks the graph. In the batch-invariant arithmetic it must have all bits of the
    step, because the replay of its patch has them. In the model's own arithmetic its logits must be
    those of a step without ``for_inductor``, up to rounding: such steps were compared with their
    replays.

    Raises:
        UnsupportedModelError: the model's pass cannot be traced, or the graph gives something else.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._graph: Callable[[], list[Tensor]] | None = None
        # The leaves of a step's output: those that are no tensors, and None in a tensor's place.
        self._leaves: list[Any] = []
        self._tree: Any = None

    def __call__(self) -> StepOutput:
        """Run the current token."""
        try:
            tensors = iter(self._first_run() if self._graph is None else self._graph())
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # also an error of the model's own code
            name = type(self._step.plan.attached.model).__name__
            reason = str(cause).partition("\n")[0]
            raise UnsupportedModelError(f"compile does not cover {name}: {reason}") from cause
        leaves = [next(tensors) if leaf is None else leaf for leaf in self._leaves]
        return StepOutput.of_leaves(leaves.__getitem__, self._tree)

    def _first_run(self) -> list[Tensor]:
        """Trace the step, and run the compiled graph on the same token."""
        outputs: list[tuple[Tensor, Tensor, StepDetails]] = []
        expected: list[Tensor] = []

        def run() -> list[Tensor]:
            outputs.append(self._step().parts)
            leaves, self._tree = tree_flatten(outputs[0])
            self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            expected[:] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            return expected

        # One fake mode for all tensors: make_fx would make one for each, in half of its time.
        one_mode = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
        with one_mode, NoHostReads():
            traced = make_fx(run)()
        plan, free = self._step.plan, _free_tensors(outputs[0], expected)
        attached, keeps_bits = plan.attached, plan.keeps_bits
        if not keeps_bits:
            eager = DecodeStep(plan, self._step.inputs, self._step.batch)().logits
        blocks = [block.module for block in attached.blocks]
        graph = in_regions(traced, blocks, eager_rounding=keeps_bits, free=free)
        tensors: list[Tensor] = graph()
        for number, (got, wanted) in enumerate(zip(tensors, expected, strict=True)):
            compared = keeps_bits and number not in free
            if compared and not torch.allclose(got, wanted, 0, 0, equal_nan=True):
                raise RuntimeError(
                    "the compiled step has other bits than the replay of its patch would have"
                )
        if not keeps_bits and metrics.all_finite(eager):  # other logits are refused behind the step
            error = metrics.linf(tensors[0], eager).max()
            if error > attached.replay_limit:
                raise RuntimeError(f"the compiled step is off by {error:.1g} of the largest logit")
        self._graph = graph
        return tensors


def _free_tensors(
    output: tuple[Tensor, Tensor, StepDetails], tensors: Sequence[Tensor]
) -> frozenset[int]:
    """The numbers of the output's tensors whose bits no replay depends on: the diagnostics."""
    logits, _, details = output
    compared = tree_leaves((logits, details.factors, details.misses, details.activations))
    addresses = {id(tensor) for tensor in compared}
    return frozenset(n for n, tensor in enumerate(tensors) if id(tensor) not in addresses)
