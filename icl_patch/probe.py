"""The check that attaching makes of itself: is the model what its family says?"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import streams
from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.recording import AttachedBlock, observe
from icl_patch.streams import Sequences

# fp64 as fp32: the norms of an fp64 model compute in that.
# Of the context rows against the untouched model, relative to max |logit|: a wrong mask is off by far more than rounding.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Of the exact update's correction: some ten times what rounding was seen to need, a tenth of what a missing reader does.
_CORRECTION = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


class Probe:
    """A small forward on random tokens, made before attaching and compared with after it.

    Swapped modules that are off must not change a bit; the context rows must match the untouched model; the absorbed tokens must not
    reach the reduced rows; every block's output must be its residual stream plus its writer's output; and an exact patch must need no
    more correction than rounding does, which a reader that was missed or a scale that was misread would.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, int(model.config.vocab_size), (2, 7), generator=generator).to(model.device)
        self._model = model
        self._sequences = streams.assemble(ids[:, :5], ids[:, 5:])
        self._other = streams.assemble(ids[:, :5].flip(1), ids[:, 5:])
        with torch.no_grad():
            self._expected = self._logits()

    def _logits(self) -> Tensor:
        cache = streams.new_cache(self._model)
        streams.run_head(self._model, self._sequences, cache)
        return streams.run_tail(self._model, self._sequences, cache)

    def _two_streams(self, sequences: Sequences) -> Tensor:
        """Logits of both streams with the modules off: what they attend to, without any patch."""
        cache = streams.new_cache(self._model)
        streams.run_head(self._model, sequences, cache)
        streams.stack_cache(cache, len(sequences.head_ids))
        return streams.run_two_streams(self._model, sequences, cache)

    @torch.no_grad()
    def check(self, blocks: Sequence[AttachedBlock], correction: Callable[[Sequences], Tensor]) -> None:
        """Raises UnsupportedModelError if the attached model is not what its family says.

        ``correction`` computes an exact patch for sequences and returns its corrections, (L, B, T).
        """
        name, batch = type(self._model).__name__, len(self._expected)
        if not _same(self._logits(), self._expected):
            raise UnsupportedModelError(f"{name} does not compute the same with its modules swapped and off")
        first, second = self._two_streams(self._sequences), self._two_streams(self._other)
        limit = _TOLERANCE[self._model.dtype] * self._expected.nan_to_num().abs().max()
        off = torch.where(first[:batch].isnan() & self._expected.isnan(), 0, first[:batch] - self._expected)
        if not off.abs().max() <= limit:
            raise UnsupportedModelError(f"the context rows of {name} do not match the untouched model")
        if not _same(first[batch:], second[batch:]):
            raise UnsupportedModelError(f"{name} lets the reduced rows see absorbed tokens: its attention does not take the mask")
        self._check_blocks(blocks)
        with suppress(ControllabilityError):  # weights of zero have no patch for these tokens, and will say so for the user's
            found = correction(self._sequences).amax((1, 2))
            if not found.max() <= _CORRECTION[self._model.dtype]:
                path = blocks[int((~(found <= _CORRECTION[self._model.dtype])).nonzero()[0])].block.path
                raise UnsupportedModelError(f"{path} has inputs or parameters that family {blocks[0].family.name!r} does not know")

    def _check_blocks(self, blocks: Sequence[AttachedBlock]) -> None:
        written: list[Tensor] = []
        handles = [block.writer.register_forward_hook(lambda _module, _args, out: written.append(out)) for block in blocks]
        try:
            with observe(blocks) as tapes:
                self._logits()
        finally:
            for handle in handles:
                handle.remove()
        passes = 2  # the head, then the tail
        if not len(tapes) == len(written) == passes * len(blocks):
            raise UnsupportedModelError(f"{type(self._model).__name__} does not run each of its blocks once a pass")
        for block, tape, out in zip([*blocks] * passes, tapes, written, strict=True):
            if tape.readers.keys() != block.readers.keys():
                raise UnsupportedModelError(f"{block.block.path} does not call its readers {', '.join(block.readers)}")
            if tape.output is None or not _same(tape.hidden + out, tape.output):
                raise UnsupportedModelError(f"{block.block.path} is not its residual stream plus its {block.family.writer.value} writer")


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal, a NaN to a NaN too."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())
