"""The measurements of attaching: the numbers by which blocks multiply their MLP's output, and
whether the blocks behave as their specs say.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from icl_patch import metrics
from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import Visibility
from icl_patch.models.block_detection import blocks_of
from icl_patch.models.block_spec import Block
from icl_patch.models.forward import counts_slots
from icl_patch.models.language_model import text_config
from icl_patch.models.model_checks import above_range
from icl_patch.models.pipeline import stage_of
from icl_patch.models.positions import first_position
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations, HasBlocks
from icl_patch.recording.passes import (
    empty_slots,
    observe,
    prefix_cache,
    replay_logits,
    run_closing_pass,
)
from icl_patch.recording.sequences import assemble, without_padding
from icl_patch.tolerances import SIXTEEN_BITS, rounding_limit

# The probe is a power of two, far above the residual stream and far below the limits of fp64.
_PROBE = 2.0**40
# In fp64 a number times a power of two has no rounding error; the sum with the stream has one.
_LIMIT = 2.0**-30


@torch.no_grad()
def measure_multipliers(attached: HasBlocks, ids: Tensor) -> None:
    """Replace each ``residual_multiplier`` by the number that the block applies to its writer's
    output in fp64, where exact factors are added.

    A pass over two equal rows of a few tokens gives every writer's output one value in fp64, 0 in
    the first row and 2⁴⁰ in the second; the difference of the block's sums is the multiplier.
    Detection found it in the outputs of the model, which have few digits: in bf16 0.999 can give
    the bits of 1.

    ids: (2, T) int64, the rows.

    Raises:
        UnsupportedModelError: a block does not multiply all elements by one number.
    """
    blocks = [block for block in attached.blocks if block.spec.residual_multiplier != 0]
    for block, (low, high) in zip(blocks, _sums(attached, blocks, ids), strict=True):
        factors = (high - low).flatten() / _PROBE
        multiplier = float(factors.median())
        if not bool(((factors - multiplier).abs() <= _LIMIT * abs(multiplier)).all()):
            raise UnsupportedModelError(
                f"{block.path} does not multiply its MLP's output by one number, but by"
                f" {float(factors.min()):.6g} to {float(factors.max()):.6g}"
            )
        block.spec = replace(block.spec, residual_multiplier=multiplier)
        block.block = replace(block.block, spec=block.spec)


def _sums(attached: HasBlocks, blocks: list[AttachedBlock], ids: Tensor) -> list[Tensor]:
    """The sums (2, T, d) of the blocks in fp64. Behind its sum a block goes on with ones, so that
    the blocks after it read the same in both rows.
    """
    sums: list[Tensor] = []

    def write(out: Tensor) -> Tensor:
        written = torch.zeros_like(out, dtype=torch.float64)
        # (2, T, d), or these rows one after the other for each expert
        written.view(-1, ids.numel(), out.shape[-1])[:, ids.shape[1] :] = _PROBE
        return written

    def end(block: AttachedBlock, total: Tensor) -> Tensor:
        sums.append(total.as_subclass(Tensor).double().reshape(2, -1))
        return torch.ones_like(total, dtype=block.dtype)

    with ExitStack() as hooks:
        for block in blocks:
            block.hook_output(hooks, block.writer, write)
            block.keep_unrounded(hooks)
            block.hook_end(hooks, partial(end, block), first=True)
        cache = kv_cache.new_cache(attached.model)
        forward_passes.run_tail(attached.model, without_padding(ids), cache)
    return sums


class SelfCheck:
    """Four forwards on trial tokens: of the model before attaching, and of the attached model with
    its modules off, recording, and replaying.

    Two rows are a prefix, a context and kept tokens, all in one call. Each is there twice, the
    second time with the context hidden from the kept tokens by the mask; a recurrent model has no
    mask for its states and gets no such rows. Checked is that

    - the model numbers its tokens as they are numbered here (the first call leaves this to it), and
      swapped modules that are off change no bit,
    - kept tokens alone, after a cache of the prefix, attend to the same tokens as behind that mask,
    - the correction of an exact patch is no larger than rounding explains: a missed reader, a
      misread residual stream or a misread scale makes it larger,
    - its replay gives the logits of the unmodified model: a block that reads its context again
      after its sum fails here.

    Multipliers are measured first, in a fifth forward, unless they are 1 in a dtype with digits
    enough to tell. If the replay is wrong, they are measured at any rate, and the context is read
    before the kept tokens, as `compute` does: then all its rows are multiplied as in a replay.
    """

    def __init__(
        self, model: PreTrainedModel, recurrent: bool, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._model, self._recurrent, self._name = model, recurrent, type(model).__name__
        # recurrent classes continue from a state with one token per call
        self._kept = 1 if recurrent else 2
        ids = trial_tokens(model, 3 + self._kept, 0, tokenizer)
        ids = ids.repeat(1 if recurrent else 2, 1)
        self._sequences = assemble(ids[:, :3], ids[:, 3:], keep_first=1)
        self._live = torch.arange(len(ids), device=ids.device).unsqueeze(1) < 2
        self._windows: set[int | None] = set()  # the sizes of windows in the masks
        self._expected: Tensor | None = None  # the logits of the unmodified model

    def blocks(self) -> list[Block]:
        """The model's blocks, from the first of the forwards; see
        :func:`icl_patch.models.block_detection.blocks_of`.
        """

        def forward() -> None:
            self._expected, _ = self._forward(None)

        return blocks_of(self._model, forward)

    def _forward(self, positions: Tensor | None, *, split: bool = False) -> tuple[Tensor, Cache]:
        """All tokens in one call, or ``split`` before the kept ones: the logits of these (B, T, V),
        and the cache.
        """
        tokens, cache, kept = self._sequences, kv_cache.new_cache(self._model), self._kept
        visible = self._live | ~tokens.absorbed
        for part in (slice(0, -kept), slice(-kept, None)) if split else (slice(0, None),):
            logits = forward_passes.run(
                self._model,
                tokens.ids[:, part],
                tokens.mask[:, : part.stop],
                None if positions is None else positions[:, part],
                cache,
                Visibility(visible[:, : part.stop], windows=self._windows),
                longest=tokens.longest,
                last_logits=kept,
            )
        return logits, cache

    @torch.no_grad()
    def run(self, attached: HasBlocks) -> None:
        """Raises UnsupportedModelError if the model does not behave as its block specs say."""
        blocks, ranks, positions = attached.blocks, attached.ranks, self._sequences.positions
        if self._expected is None:  # attached already
            self._expected, _ = self._forward(None)
        if reason := above_range(self._model, "the head", self._expected):
            raise UnsupportedModelError(reason)
        with observe(blocks) as activations:
            logits, cache = self._forward(positions)
        if not torch.equal(logits, self._expected):
            raise UnsupportedModelError(
                f"expected {self._name} to number its tokens one by one from"
                f" {first_position(self._model)}, but without position_ids its logits are others:"
                " it numbers them in another way, or changes when its modules are swapped"
            )
        ranks.shared(lambda: self._check_blocks(blocks, activations))
        sliding = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
        if sliding and not self._recurrent and self._windows <= {None}:
            raise UnsupportedModelError(
                f"{self._name} keeps its window by dropping tokens from its cache, not by its mask"
            )
        patch = replace(attached.empty_patch(self._sequences, passes=2), logits=logits)
        prefix = self._prefix(patch, cache)
        probe = self._sequences.ids[:1].repeat(2, 1)
        measure = partial(ranks.shared, partial(measure_multipliers, attached, probe))
        numbers = {block.spec.residual_multiplier for block in blocks}
        if ranks.any(self._model.dtype in SIXTEEN_BITS or not numbers <= {0, 1}):
            measure()
        if self._reason(attached, activations, patch, prefix) is None:
            return
        measure()
        with observe(blocks) as activations:
            logits, _ = self._forward(positions, split=True)
        patch = replace(patch, logits=logits)
        if reason := self._reason(attached, activations[-len(blocks) :], patch, prefix):
            raise UnsupportedModelError(reason)

    def _check_blocks(
        self, blocks: Sequence[AttachedBlock], all_activations: list[BlockActivations]
    ) -> None:
        if len(all_activations) != len(blocks):
            raise UnsupportedModelError(f"{self._name} does not run each of its blocks once a pass")
        for block, activations in zip(blocks, all_activations, strict=True):
            _check_readers(block, activations.readers)
            if activations.output is None or activations.hidden is None:
                raise UnsupportedModelError(
                    f"{block.path} does not have its residual stream where it was found"
                )

    def _prefix(self, patch: ContextPatch, cache: Cache) -> Cache:
        """A cache of the prefix, from that of all tokens if it can be cut."""
        width = patch.prefix_ids.shape[1]
        if type(cache) is not DynamicCache or not all(map(_can_be_cut, cache.layers)):
            return prefix_cache(self._model, patch)
        cache.crop(width - self._sequences.ids.shape[1])
        if count := empty_slots(self._model, patch):
            kv_cache.append_empty(cache, width, count)
        return cache

    def _reason(
        self,
        attached: HasBlocks,
        activations: list[BlockActivations],
        patch: ContextPatch,
        prefix: Cache,
    ) -> str | None:
        """Why a patch of the rows that see their context is wrong; None if it is right."""
        rows, dtype = self._live.squeeze(1), self._model.dtype
        of_kept = [block.part(slice(-self._kept, None)) for block in activations]
        try:
            computation = run_closing_pass(
                attached, of_kept, patch, "exact", self._live, deepcopy(prefix)
            )
        except ControllabilityError:
            return None  # weights of zero have no patch; the user's tokens raise this again
        patch, report = computation.patch, computation.patch.report
        assert report is not None and patch.logits is not None
        for place, block in zip(attached.places, attached.blocks, strict=True):
            _check_readers(block, {name.removesuffix(".u") for name in patch.layers[place]})
        small = report.correction.amax((1, 2)) <= rounding_limit(dtype)
        if not small.all():
            path = attached.block_specs[int((~small).nonzero()[0])].path
            return (
                f"{path} has inputs or parameters that its form does not know, or outputs that are"
                f" too small for {dtype}: torch.bfloat16 and torch.float32 have a wider range"
            )
        if not rows.all() and (
            reason := self._hidden_reason(computation.reduced_logits, patch.logits)
        ):
            return reason
        replayed = replay_logits(attached, patch, deepcopy(prefix))[rows]
        # sums of several ranks may be taken in another order
        split_sums = attached.ranks.size > 1 and stage_of(self._model) is None
        rounded, expected = bool(report.misses.any()) or split_sums, patch.logits[rows]
        same = _near(replayed, expected).all() if rounded else torch.equal(replayed, expected)
        if attached.ranks.any(not same):
            return f"{self._name} has blocks that hand on more of their context than their sum"
        return None

    def _hidden_reason(self, alone: Tensor, logits: Tensor) -> str | None:
        """Why kept tokens alone are others than with the context hidden, None if they are not."""
        hidden = ~self._live.squeeze(1)
        near = _near(alone[hidden], logits[hidden])
        # in half precision rounding may choose other experts for some tokens, or change them more
        # in another way; a wrong mask changes all of them
        if near.all() or (self._model.dtype in SIXTEEN_BITS and 2 * near.sum() >= near.numel()):
            return None
        return (
            f"{self._name} does not give the kept tokens alone the logits that they have with"
            " the context masked: its attention does not take the mask, or it has positions"
            " that the tokens alone cannot be given"
        )


def _check_readers(block: AttachedBlock, called: Iterable[str]) -> None:
    """Raises UnsupportedModelError if some readers of a block were not called."""
    if missing := sorted(block.readers.keys() - called):
        raise UnsupportedModelError(f"{block.path} does not call its readers {', '.join(missing)}")


def takes_padding(
    model: PreTrainedModel, recurrent: bool, tokenizer: PreTrainedTokenizerBase | None
) -> bool:
    """Whether a row with padding on its left has the logits that it has alone.

    Its last token runs on a cache of the others, with which GIT shifts its mask. A recurrent model
    may let the padding into its states: then its logits depend on the padding's token. A model that
    counts its positions in the cache must have the same bits in bf16 and fp16, where wrong
    positions may change as little as rounding does. Nothing is compared where rounding may choose
    other experts.
    """
    row = without_padding(trial_tokens(model, 6, 0, tokenizer))

    def logits(*padding: int) -> Tensor:
        """The last token's logits (B, 1, V), behind ids that the mask hides."""
        ids, mask = (F.pad(x, (len(padding), 0)) for x in (row.ids, row.mask))
        ids[:, : len(padding)] = ids.new_tensor(padding)
        padded = replace(row, ids=ids, mask=mask, head=ids.shape[1] - 1)
        cache = kv_cache.new_cache(model)
        forward_passes.run_head(model, padded, cache)
        return forward_passes.run_tail(model, padded, cache)

    padded, alone = logits(0), logits()
    few_bits, settings = model.dtype in SIXTEEN_BITS, vars(text_config(model)).items()
    if any("expert" in name and type(value) is int and value for name, value in settings):
        return few_bits or bool(_near(padded, alone).all())
    if recurrent and not torch.equal(padded, logits(1)):
        return False
    if counts_slots(model) and few_bits:
        return torch.equal(padded, alone)
    return bool(_near(padded, alone).all())


def _can_be_cut(layer: object) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.is_initialized and layer.cumulative_length < layer.sliding_window
    return type(layer) is DynamicLayer and layer.is_initialized


def _near(logits: Tensor, expected: Tensor) -> Tensor:
    """Which tokens' logits are the same up to rounding."""
    return metrics.linf(logits, expected) <= min(1.0, rounding_limit(expected.dtype))
