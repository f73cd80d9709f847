"""How a model runs both streams of one token in one pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.fused_modules import fused_modules
from icl_patch.generation.rotary import rotary_overrides
from icl_patch.generation.shared_cache import SharedCacheStreams
from icl_patch.generation.two_streams import TwoStreams
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, InvariantModules
from icl_patch.recording.attached_model import AttachedModel


class OnePassPlan:
    """How an attached model runs both streams of one token in one pass, for as long as nothing in
    the model changes.

    Args:
        attached: the model.
        mode: of one pass.
        arithmetic: of the steps, and of the replays of their patches.
        writer_first: whether a parallel block adds its writer's output to one of its other terms
            before it adds these to each other, which rounds their sum; of exact steps.

    Attributes:
        layout: where the rows of both streams are, and which of the model's forwards change.
        keeps_bits: whether a row has the same bits in a step and in the replay of its patch.
        fused, rotary: the norms and gated MLPs, and the rotary functions of the blocks' source
            files, that run as single operations.
        rounding: the context in which a step runs in the arithmetic.

    Raises:
        UnsupportedModelError: the blocks do not allow the mode.
    """

    def __init__(
        self,
        attached: AttachedModel,
        mode: DecodeMode,
        arithmetic: str,
        *,
        writer_first: bool = False,
    ) -> None:
        self.attached, self.mode, self.exact = attached, mode, attached.update == "exact"
        self.arithmetic, self.writer_first = arithmetic, writer_first
        model, blocks = attached.model, attached.blocks
        self.layout = (
            SharedCacheStreams(model, blocks, exact=self.exact)
            if mode is DecodeMode.SHARED_CACHE
            else TwoStreams(model, blocks, exact=self.exact)
        )
        self.keeps_bits = arithmetic == BATCH_INVARIANT
        self.fused = fused_modules(model, blocks, keeps_bits=self.keeps_bits)
        self.rotary = rotary_overrides(blocks)
        # of a block that is its own mixture, the block
        mixtures = [block.mixture or block.module for block in blocks if block.experts is not None]
        self.rounding: Callable[[], AbstractContextManager[None]] = (
            InvariantModules(model, mixtures).active if self.keeps_bits else nullcontext
        )
