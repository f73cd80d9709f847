"""What attaching measures: the numbers by which blocks multiply their MLP's output, and whether the
blocks behave as their specs say.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.layers.experts import experts_class
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import Visibility
from icl_patch.models.forward import call, counts_slots, takes_positions
from icl_patch.models.language_model import random_tokens, text_config
from icl_patch.models.model_checks import above_range, below_range
from icl_patch.models.pipeline import stage_of
from icl_patch.models.positions import first_position
from icl_patch.models.ranks import ranks_of
from icl_patch.models.trace import first_tensor
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations, HasBlocks
from icl_patch.recording.passes import close_on, observe, replay_logits
from icl_patch.recording.sequences import assemble
from icl_patch.tolerances import rounding_limit

# The probe is a power of two, far above the residual stream and far below the limits of fp64.
_PROBE = 2.0**40
# In fp64 a number times a power of two has no rounding error; the sum with the stream has one.
_LIMIT = 2.0**-30
_TOKENS = 3


@torch.no_grad()
def measure_multipliers(attached: HasBlocks) -> None:
    """Replace each ``residual_multiplier`` by the number that the block applies to its writer's
    output in fp64, where exact factors are added.

    A pass over two equal rows of a few tokens gives every writer's output one value in fp64, 0 in
    the first row and 2⁴⁰ in the second; the difference of the block's sums is the multiplier.
    Detection found it in the outputs of the model, which have few digits: in bf16 0.999 can give
    the bits of 1.

    Raises:
        UnsupportedModelError: a block does not multiply all elements by one number.
    """
    blocks = [block for block in attached.blocks if block.spec.residual_multiplier != 0]
    for block, (low, high) in zip(blocks, _sums(attached, blocks), strict=True):
        factors = (high - low).flatten() / _PROBE
        multiplier = float(factors.median())
        if not bool(((factors - multiplier).abs() <= _LIMIT * abs(multiplier)).all()):
            raise UnsupportedModelError(
                f"{block.block.path} does not multiply its MLP's output by one number, but by"
                f" {float(factors.min()):.6g} to {float(factors.max()):.6g}"
            )
        block.spec = replace(block.spec, residual_multiplier=multiplier)
        block.block = replace(block.block, spec=block.spec)


def _sums(attached: HasBlocks, blocks: list[AttachedBlock]) -> list[Tensor]:
    """The sums (2, T, d) of the blocks in fp64. Behind its sum a block goes on with ones, so that
    the blocks after it read the same in both rows.
    """
    sums: dict[str, Tensor] = {}

    def write(_module: Any, _args: Any, out: Tensor) -> Tensor:
        written = torch.zeros_like(out, dtype=torch.float64)
        # (2, T, d), or these rows one after the other for each expert
        written.view(-1, 2 * _TOKENS, out.shape[-1])[:, _TOKENS:] = _PROBE
        return written

    def end(block: AttachedBlock) -> Any:
        def hook(total: Tensor) -> Tensor:
            sums[block.block.path] = total.as_subclass(Tensor).double().reshape(2, -1)
            return torch.ones_like(total, dtype=block.dtype)

        return hook

    with ExitStack() as hooks:
        for block in blocks:
            block.hook(hooks, block.writer.register_forward_hook, write)
            block.keep_unrounded(hooks)
            block.on_end(hooks, end(block), first=True)
        ids = random_tokens(attached.model, _TOKENS, seed=1)[:1].repeat(2, 1)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        call(
            attached.model, ids, torch.ones_like(ids), positions, kv_cache.new_cache(attached.model)
        )
    return [sums[block.block.path] for block in blocks]


class SelfCheck:
    """A small forward on random tokens, made before attaching and compared with after it.

    The model must number its tokens as they are numbered here. Swapped modules that are off must
    not change a bit. The kept tokens alone must attend to the same tokens as in a pass whose mask
    hides the context. The correction of an exact patch must be no larger than rounding explains: a
    missed reader, a misread residual stream or a misread scale makes it larger. Its replay must
    give the logits of the unmodified model: a block that reads its context again after its sum
    fails here.
    """

    def __init__(self, model: PreTrainedModel, recurrent: bool) -> None:
        ids = random_tokens(model, 9, seed=0)
        self._model, self._recurrent, self._name = model, recurrent, type(model).__name__
        self._has_experts = ranks_of(model).any(
            any(weight.dim() == 3 for weight in model.parameters())
            or any(experts_class(module) for module in model.modules())
        )
        prefix, context, kept = ids[:, :2], ids[:, 2:7], ids[:, 7:]
        if recurrent:
            kept = kept[:, :1]  # their classes continue from a state with one token per call
        self._sequences = assemble(context, kept, prefix_ids=prefix)
        with torch.no_grad():
            self._head, self._expected = self._logits()

    @torch.no_grad()
    def takes_padding(self) -> bool:
        """Whether a row with padding on its left has the logits that it has alone.

        A recurrent model may let the padding into its states: then its logits depend on the
        padding's token. A model that counts its positions in the cache must have the same bits in
        bf16 and fp16, where wrong positions may change as little as rounding does. Nothing is
        compared where rounding may choose other experts.
        """
        few_bits, padded, alone = self._epsilon > 1e-4, self._padded(0), self._head
        settings = vars(text_config(self._model)).items()
        if any("expert" in name and type(value) is int and value for name, value in settings):
            return few_bits or self._near(padded, alone)
        if self._recurrent and not _same(padded, self._padded(1)):
            return False
        if counts_slots(self._model) and few_bits:
            return _same(padded, alone)
        return self._near(padded, alone)

    def _padded(self, token: int) -> Tensor:
        """The logits of the head's last token behind one more column, a ``token`` that the mask
        hides.
        """
        alone = self._sequences
        padded = replace(
            alone,
            head_ids=F.pad(alone.head_ids, (1, 0), value=token),
            head_mask=F.pad(alone.head_mask, (1, 0)),
            head_absorbed=F.pad(alone.head_absorbed, (1, 0)),
        )
        return forward_passes.run_head(self._model, padded, kv_cache.new_cache(self._model))

    @torch.no_grad()
    def check_positions(self) -> None:
        """Raises UnsupportedModelError unless the model itself takes the positions given here."""
        ids, cache = self._sequences.head_ids, kv_cache.new_cache(self._model)
        own = call(self._model, ids, torch.ones_like(ids), None, cache, last_logits=1)
        if not self._alike(self._head, own):
            first = first_position(self._model)
            raise UnsupportedModelError(
                f"expected {self._name} to number its tokens one by one from {first}, "
                "but without position_ids its logits are others: it numbers them in another way"
            )

    def _logits(self) -> tuple[Tensor, Tensor]:
        """Of the head's last token (B, 1, V), and of the kept tokens (B, T, V)."""
        cache = kv_cache.new_cache(self._model)
        head = forward_passes.run_head(self._model, self._sequences, cache)
        return head, forward_passes.run_tail(self._model, self._sequences, cache)

    @torch.no_grad()
    def run(self, attached: HasBlocks) -> None:
        """Raises UnsupportedModelError if the model does not behave as its block specs say."""
        blocks = attached.blocks
        with observe(blocks) as all_activations:
            _, logits = self._logits()
        if not _same(logits, self._expected):
            raise UnsupportedModelError(
                f"{self._name} does not compute the same with its modules swapped and off"
            )
        attached.ranks.shared(lambda: self._check_blocks(blocks, all_activations))
        if not self._recurrent:
            self._check_alone()
        # weights of zero have no patch for these tokens; the user's tokens raise this again
        with suppress(ControllabilityError):
            patch = replace(attached.empty_patch(self._sequences, passes=2), logits=logits)
            patch = close_on(attached, all_activations[len(blocks) :], patch, "exact").patch
            assert patch.report is not None
            small = patch.report.correction.amax((1, 2)) <= rounding_limit(self._model.dtype)
            if not small.all():
                place = int((~small).nonzero()[0])
                path = attached.block_specs[place].path
                below = self._below_range(blocks[place]) if attached.ranks.size == 1 else None
                raise UnsupportedModelError(
                    below or f"{path} has inputs or parameters that its form does not know"
                )
            replayed, missed = replay_logits(attached, patch), bool(patch.report.misses.any())
            # sums of several ranks may be taken in another order
            near = missed or (attached.ranks.size > 1 and stage_of(self._model) is None)
            if not (self._near if near else _same)(replayed, self._expected):
                raise UnsupportedModelError(
                    f"{self._name} has blocks that hand on more of their context than their sum"
                )

    def _check_blocks(
        self, blocks: Sequence[AttachedBlock], all_activations: list[BlockActivations]
    ) -> None:
        self._check_calls(blocks, all_activations)
        self._check_range(blocks, all_activations)

    def _check_range(
        self, blocks: Sequence[AttachedBlock], all_activations: list[BlockActivations]
    ) -> None:
        for block, activations in zip([*blocks, *blocks], all_activations, strict=True):
            assert activations.output is not None
            reason = above_range(block.block.path, activations.output, self._model.dtype)
            if reason is not None:
                raise UnsupportedModelError(reason)

    def _below_range(self, block: AttachedBlock) -> str | None:
        """The refusal of a block whose MLP writes numbers that are too small for its dtype."""
        name = block.spec.down or block.spec.experts or ""
        outputs: list[Tensor] = []

        def keep(_module: Any, _args: Any, out: Any) -> None:
            tensor = first_tensor(out)
            assert tensor is not None
            outputs.append(tensor.flatten(0, -2))

        with block.module.get_submodule(name).register_forward_hook(keep):
            self._logits()
        return below_range(block.block.path_of(name), torch.cat(outputs), self._model.dtype)

    def _check_alone(self) -> None:
        everything = torch.ones_like(self._sequences.absorbed)
        masked, limit = self._in_one_call(~self._sequences.absorbed), 1.0
        if not takes_positions(self._model):
            # it may count its cache instead; the error can be as small as that of bf16
            noise = self._error(self._in_one_call(everything), self._expected)
            limit = max(4 * noise, 8 * self._epsilon)
        if not self._near(self._alone(), masked, limit):
            raise UnsupportedModelError(
                f"{self._name} does not give the kept tokens alone the logits that they have with"
                " the context masked: its attention does not take the mask, or it has positions"
                " that the tokens alone cannot be given"
            )

    def _in_one_call(self, visible: Tensor) -> Tensor:
        """The logits of the kept tokens in one call over all tokens, (B, T, V); ``visible`` (B, S)
        bool.
        """
        tokens, cache = self._sequences, kv_cache.new_cache(self._model)
        inputs = (tokens.ids, tokens.mask, tokens.positions, cache, Visibility(visible))
        kept = tokens.tail_ids.shape[1]
        return forward_passes.run(self._model, *inputs, longest=tokens.longest, last_logits=kept)

    def _alike(self, logits: Tensor, expected: Tensor) -> bool:
        """Whether the logits are equal to the last bit, or near if the model has experts.

        The rows that an expert gets, and so the rounding of its products, depend on all rows.
        """
        return self._near(logits, expected) if self._has_experts else _same(logits, expected)

    @property
    def _epsilon(self) -> float:
        return torch.finfo(self._model.dtype).eps

    def _near(self, logits: Tensor, expected: Tensor, limit: float = 1.0) -> bool:
        return self._error(logits, expected) <= min(limit, rounding_limit(self._model.dtype))

    @staticmethod
    def _error(logits: Tensor, expected: Tensor) -> float:
        """The largest difference, relative to the largest logit."""
        off = torch.where(logits.isnan() & expected.isnan(), 0, logits - expected)
        return float(
            off.abs().max()
            / expected.nan_to_num().abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
        )

    def _alone(self) -> Tensor:
        """The kept tokens over a cache of the prefix, with the modules off."""
        sequences, cache = self._sequences, kv_cache.new_cache(self._model)
        width = sequences.head_ids.shape[1]
        first = torch.arange(2, device=self._sequences.head_ids.device)
        empty = first.new_zeros(width - 2 if counts_slots(self._model) else 0)
        slots = torch.cat([first, empty, sequences.kept_slots])
        mask = torch.cat([first >= 0, empty > 0, sequences.kept_slots > 0])
        slots, mask = (x.expand(len(sequences.head_ids), -1) for x in (slots, mask))
        longest = sequences.longest
        prefix = (sequences.head_ids[:, :2], mask[:, :2], slots[:, :2])
        forward_passes.run(self._model, *prefix, cache, longest=longest, last_logits=1)
        if len(empty):
            kv_cache.append_empty(cache, 2, len(empty))
        visibility = Visibility(mask, slots, slots)
        kept = (sequences.tail_ids, mask, slots[:, 2 + len(empty) :])
        logits = forward_passes.run(self._model, *kept, cache, visibility, longest=longest)
        if any(
            getattr(layer, "is_sliding", False) for layer in cache.layers
        ) and visibility.windows <= {None}:
            raise UnsupportedModelError(
                f"{self._name} keeps its window by dropping tokens from its cache, not by its mask"
            )
        return logits

    def _check_calls(
        self, blocks: Sequence[AttachedBlock], all_activations: list[BlockActivations]
    ) -> None:
        if len(all_activations) != 2 * len(blocks):  # the head, then the tail
            raise UnsupportedModelError(f"{self._name} does not run each of its blocks once a pass")
        for block, activations in zip([*blocks, *blocks], all_activations, strict=True):
            if activations.readers.keys() != block.readers.keys():
                raise UnsupportedModelError(
                    f"{block.block.path} does not call its readers {', '.join(block.readers)}"
                )
            if activations.output is None or activations.hidden is None:
                raise UnsupportedModelError(
                    f"{block.block.path} does not have its residual stream where it was found"
                )


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal, a NaN to a NaN too."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())
