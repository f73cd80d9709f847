"""Trials of a model run on tokens as texts have them, behind the one that stands before each."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from support.numeric import seeded
from support.random_models import build, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from icl_patch import ContextPatcher, batch_invariant, metrics
from icl_patch.analysis.norm_folding import fold
from icl_patch.errors import SlowerStepsWarning
from icl_patch.models.trial_tokens import first_token, trial_tokens
from icl_patch.static.matrices import find_matrices
from icl_patch.tolerances import rounding_limit
from tools import model_types

BOS, WORDS = 5, 40


def tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Of 40 words, of which numbers 5 and 9 are special."""
    inner = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w9"))
    if adds_bos:
        inner.post_processor = TemplateProcessing(single="w5 $A", special_tokens=[("w5", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="w5", unk_token="w9")


def with_bos(model: PreTrainedModel, token: int | None = BOS) -> PreTrainedModel:
    """The model, whose configurations name its first token."""
    for config in (model.config, model.generation_config):
        config.bos_token_id = token
    return model


def test_trial_tokens_are_those_of_texts() -> None:
    model = with_bos(build("gemma3"))
    model.config.image_token_id, model.config.eos_token_id = 90, [2, 3]
    model.generation_config.eos_token_id = 4
    drawn = trial_tokens(model, 2000, 0, starts=[0, 3, 1999])
    assert [drawn[row, start] for row, start in enumerate((0, 3, 1999))] == [BOS] * 3
    assert (drawn == BOS).sum() == 3
    everything = set(range(model.config.vocab_size))
    assert set(drawn.flatten().tolist()) - {BOS} == everything - {0, 2, 3, 4, BOS, 90}
    drawn = trial_tokens(model, 2000, 0, tokenizer(adds_bos=True))
    assert set(drawn[:, 1:].flatten().tolist()) == set(range(WORDS)) - {0, 2, 3, 4, BOS, 9}


@pytest.mark.parametrize(
    ("of_config", "of_generation", "given", "expected"),
    [
        (BOS, 6, None, BOS),
        (None, 6, None, 6),
        (50256, 6, None, 6),  # the default of a class with another vocabulary
        (None, None, None, None),
        (6, 6, tokenizer(adds_bos=True), BOS),
        (6, 6, tokenizer(adds_bos=False), None),
    ],
)
def test_the_first_token_is_the_one_that_texts_get(
    of_config: int | None, of_generation: int | None, given: Any, expected: int | None
) -> None:
    model = build("llama")
    model.config.bos_token_id, model.generation_config.bos_token_id = of_config, of_generation
    assert first_token(model, given) == expected


def test_no_token_without_a_position() -> None:
    """RoBERTa gives none to its padding, which its sequences cannot begin with."""
    model = with_bos(model_types.build("roberta", {"pad_token_id": BOS}))
    assert first_token(model) is None
    assert not (trial_tokens(model, 2000, 0) == BOS).any()


@torch.no_grad()
def test_every_trial_begins_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls of several tokens a row; kept tokens alone have none of their own."""
    model, own = with_bos(build("llama")), LlamaForCausalLM.forward
    first: list[torch.Tensor] = []

    def watched(self: Any, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Any:
        cache = others.get("cache", others.get("past_key_values"))
        if input_ids.shape[1] > 1 and (cache is None or not cache.get_seq_length()):
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            starts = mask.int().argmax(1, keepdim=True)
            first.append(input_ids.gather(1, starts).flatten())
        return own(self, input_ids, attention_mask, **others)

    watched.__signature__ = inspect.signature(own)
    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    with ContextPatcher(model) as patcher:
        assert patcher.attached_model.takes_padding
        for update, mode in itertools.product(("exact", "stable"), ("shared_cache", "two_stream")):
            patcher.attached_model.update = update
            patcher.plans.clear()
            patcher.plans.choose(mode)
    of_patcher = len(first)
    find_matrices(model, ["mlp"])
    with fold(model):
        of_matrices = len(first)
    with batch_invariant(model):
        pass
    assert 0 < of_patcher < of_matrices < len(first)
    assert (torch.cat(first) == BOS).all()


def drowned() -> PreTrainedModel:
    """A model in bf16 whose first token alone has a value that drowns the residual stream of all
    tokens behind it, in a direction that its head does not read.
    """
    model: Any = with_bos(build("llama", tie_word_embeddings=False))
    embeddings, attention = model.model.embed_tokens, model.model.layers[0].self_attn
    with torch.no_grad():
        embeddings.weight[:, 0] = 0.0
        embeddings.weight[BOS, 0] = 30.0
        attention.v_proj.weight[0] = 0.0
        attention.v_proj.weight[0, 0] = 1.0
        loud = torch.randn(model.config.hidden_size, generator=seeded(1)).sign()
        attention.o_proj.weight[:, 0] = 100 * loud
        unread = loud * model.model.norm.weight
        head = model.lm_head.weight
        head -= torch.outer(head @ unread, unread) / (unread @ unread)
    return model.to(torch.bfloat16)


def test_a_mode_whose_replays_the_first_token_spoils_is_not_chosen() -> None:
    """Rounding of the large numbers is other logits in a shared cache; its steps are right for
    texts without that token.
    """
    model, ids = drowned(), tokens(3, 2, 9)
    ids[:, 0] = BOS
    settings: dict = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": False}

    def error(patcher: ContextPatcher, mode: str) -> float:
        """The largest error of a replay."""
        steps = list(patcher.generate(ids, mode=mode, **settings))
        replays = [patcher.forward(step.patch.kept_ids, step.patch)[:, -1] for step in steps]
        return max(
            float(metrics.linf(replay, step.logits).max())
            for step, replay in zip(steps, replays, strict=True)
        )

    limit = rounding_limit(model.dtype)
    with ContextPatcher(model, "stable") as patcher:
        with pytest.warns(SlowerStepsWarning, match="replays of its steps are off by"):
            assert error(patcher, "auto") <= limit
        with pytest.raises(ValueError, match="replays of its steps are off by"):
            error(patcher, "shared_cache")
    with ContextPatcher(with_bos(model, None), "stable") as patcher:
        assert error(patcher, "shared_cache") > 2 * limit
