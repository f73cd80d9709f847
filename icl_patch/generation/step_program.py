"""A decode step as a program: a flat list of operators, written out as Python source.

A step is recorded once, as it runs: the model's own code, and the recorders that compute the
update in it, leave nothing but the operators that they called. What a later step would compute
again, or for nobody, is left out, and the rest becomes one Python function. It gives every bit of
the step that was recorded, for less than half of its time on the host, and its source shows what
happens to a token in each block.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from icl_patch.generation.operator_recorder import NoHostReads, OperatorRecorder, View
from icl_patch.generation.program_source import Source
from icl_patch.generation.simplified_calls import Simplified


class StepProgram:
    """A step as one Python function.

    Args:
        run: the step; what it returns is flattened, and its tensors are the program's outputs.
        names: tensors that a step finds: parameters and buffers by their paths, and its inputs.
        sections: paths of modules, whose parts of the source get a heading.

    Attributes:
        source: of the function.
        function: runs a step; returns the values that :meth:`leaf` takes.

    Raises:
        RuntimeError: the step depends on numbers that it read on the host, or on random ones.
    """

    def __init__(
        self, run: Callable[[], list[Any]], names: Mapping[str, Tensor], sections: Iterable[str]
    ) -> None:
        recorder = OperatorRecorder()
        with ExitStack() as stack:
            stack.enter_context(NoHostReads())
            stack.enter_context(recorder)
            results = run()
        simplified = Simplified(recorder, recorder.known(results))
        self._leaves = simplified.outputs
        writing = Source(simplified.whole, names, tuple(sections))
        returned = sorted({x.value for x in self._leaves if isinstance(x, View)})
        self._place = {value: place for place, value in enumerate(returned)}
        self._whole = simplified.whole
        self.source = writing.function(simplified.calls, returned)
        self.function = writing.compiled(self.source)

    def leaf(self, values: Sequence[Tensor], number: int) -> Any:
        """An output of a step, by its number."""
        leaf = self._leaves[number]
        if not isinstance(leaf, View):
            return leaf
        whole, place = values[self._place[leaf.value]], self._whole[leaf.value]
        if leaf == place:
            return whole
        # the values may have been copied, to another place in their memory
        offset = whole.storage_offset() + leaf.offset - place.offset
        return whole.as_strided(leaf.shape, leaf.stride, offset)
