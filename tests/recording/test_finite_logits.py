"""Logits that are not finite are refused wherever they arise, with the block in which they do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.patchers import IDS, KEPT, refuses
from support.random_models import build, shallow
from support.realistic_weights import OVERFLOWING
from support.realistic_weights import build as realistic
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher, NonFiniteError, batch_invariant
from icl_patch.errors import ExactnessWarning

REFUSED = r"in row 1: model\.layers\.1 has outputs that float16 cannot hold.*torch\.bfloat16"
GREEDY: dict = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
UPDATES_AND_MODES = [("exact", "two_pass"), ("exact", "shared_cache"), ("stable", "two_stream")]


def overflowing(dtype: torch.dtype) -> tuple[PreTrainedModel, int]:
    """A model whose second block overflows fp16 on one token; texts do not begin with it."""
    model, features = realistic("llama", 0, dtype, OVERFLOWING)
    [token] = features.triggers
    model.config.bos_token_id, model.config.sep_token_id = 2, token
    model.generation_config.bos_token_id = 2
    return model, token


def marked(ids: Tensor, token: int, column: int) -> Tensor:
    """The ids with the token in row 1."""
    ids = torch.where(ids == token, 3, ids)
    ids[1, column] = token
    return ids


def test_a_token_that_overflows_is_refused_with_its_row_and_block() -> None:
    """The cure that the error names, another dtype, is one."""
    model, token = overflowing(torch.float16)
    context, kept = marked(IDS, token, -1), marked(KEPT, token, 1)
    with ContextPatcher(model) as patcher:
        with pytest.raises(NonFiniteError, match=REFUSED):
            patcher.compute(IDS, kept)
        patcher.compute(IDS[:1], kept[:1])  # the other row
        for update, mode in UPDATES_AND_MODES:
            patcher.attached_model.update = update
            steps = patcher.generate(context, mode=mode, **GREEDY)
            with pytest.raises(NonFiniteError, match=REFUSED):
                next(steps)
    model, token = overflowing(torch.bfloat16)
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(IDS, kept)
        assert patcher.forward(kept, patch).isfinite().all()


def test_a_row_that_has_ended_may_overflow() -> None:
    model, token = overflowing(torch.float16)
    with ContextPatcher(model, "stable") as patcher:
        steps = patcher.generate(
            marked(IDS, token, 0)[:, :3], max_new_tokens=3, eos_token_id=token, pad_token_id=token
        )
        for step in steps:
            step.ended[0] = True  # its next token is the padding, which overflows
    assert not step.live[0]


def test_batch_invariance_is_refused_behind_a_first_token_that_overflows() -> None:
    model, token = overflowing(torch.float16)
    with batch_invariant(model, attention=False):
        pass
    model.config.bos_token_id = token
    message = r"model\.layers\.1 has outputs that float16 cannot"
    with pytest.raises(NonFiniteError, match=message), batch_invariant(model, attention=False):
        pass


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_that_are_no_numbers(family: str) -> None:
    """Also for a token that no trial saw, in a replay, and in the head."""
    model: Any = build(family, tie_word_embeddings=False)
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(IDS, KEPT)
        spoilt = [{name: 1e30 * x for name, x in layer.items()} for layer in patch.layers]
        with pytest.raises(
            NonFiniteError, match=r"row 0: model\.layers\.\d has outputs that float32"
        ):
            patcher.forward(KEPT, replace(patch, layers=tuple(spoilt)))
        model.get_input_embeddings().weight.data[96] = torch.nan
        message = r"row 1: model\.embed_tokens\.weight holds NaN or infinity, in torch\.float32"
        with pytest.raises(NonFiniteError, match=message):
            patcher.compute(marked(IDS, 96, 0), KEPT)
    model = build(family, dtype=torch.float16, tie_word_embeddings=False)
    model.lm_head.weight.data[3] = torch.inf  # no dtype of a wider range would hold it
    refuses(model, r"^lm_head\.weight holds NaN or infinity, in torch\.float16")


def test_two_replays_that_are_no_numbers_are_not_the_same() -> None:
    logits, valid = torch.full((2, 3, 97), torch.nan), torch.ones(2, 3, dtype=torch.bool)
    with (
        ContextPatcher(shallow("llama")) as patcher,
        pytest.warns(ExactnessWarning, match="at 6 of 6 tokens"),
    ):
        patcher.attached_model.warn_unless_exact("this patch", logits, logits, valid)
