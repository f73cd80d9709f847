"""Positions and rotary frequencies that a model does not take from each position alone: LongRoPE,
dynamic NTK, RoBERTa.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.numeric import replay_error
from support.patchers import refuses, updates
from support.random_models import VOCABULARY, longrope, ragged, randomised, tokens
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from icl_patch import ContextPatcher, batch_invariant, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.evaluation.baseline import baseline
from icl_patch.generation import region_compiler
from icl_patch.models.forward import call
from icl_patch.models.kv_cache import new_cache
from icl_patch.recording.sequences import Sequences, absorb_all_but_last, assemble
from tools import model_types

OLD = Version(transformers.__version__) < Version("5.21")
SWITCH = 16  # tokens beyond which the models here take LongRoPE's long factors
LONGROPE = longrope(SWITCH)
TWO_LAYERS = {"num_hidden_layers": 2}
LENGTH = {"original_max_position_embeddings": SWITCH}


def phi3(**changes: Any) -> PreTrainedModel:
    return tiny_models.build("phi3", rope_parameters=LONGROPE, **LENGTH, **TWO_LAYERS | changes)


def gemma3() -> PreTrainedModel:
    """LongRoPE in every other layer."""
    if OLD:
        pytest.skip("transformers before 5.21 fails with LongRoPE in some layers")
    kinds = {
        "full_attention": LONGROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    return tiny_models.build("gemma3", rope_parameters=kinds, **TWO_LAYERS, **types)


def phimoe() -> PreTrainedModel:
    """A scale of queries and keys that switches with the factors."""
    rope = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.7}
    return model_types.build("phimoe", {"rope_parameters": rope} | LENGTH | TWO_LAYERS)


longropes = pytest.mark.parametrize("make", [phi3, gemma3, phimoe])


@torch.no_grad()
def one_call(model: nn.Module, sequences: Sequences) -> Tensor:
    """The untouched model over all tokens in one call: logits of the tail (B, S, V)."""
    ids, mask, positions = sequences.ids, sequences.mask.long(), sequences.positions
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits[:, sequences.head :]


def off(logits: Tensor, expected: Tensor) -> float:
    return float(metrics.linf(logits, expected).max())


def of_lengths(prefix: int, context: int, kept: int) -> dict:
    """Two rows, the second shorter by 3 tokens of the context."""
    mask = torch.ones(2, prefix + context, dtype=torch.bool)
    mask[1, :3] = False
    ids = torch.cat([tokens(0, 2, prefix), tokens(1, 2, context)], 1)
    inputs = {"context_ids": ids, "context_mask": mask, "keep_first": prefix}
    return inputs | {"kept_ids": tokens(2, 2, kept)}


# prefix, context, kept tokens: the switch lies in the context, in the kept tokens, behind all
LENGTHS = [(4, 20, 3), (0, 20, 1), (0, 12, 8), (2, 8, 3)]
ON_BOTH_SIDES = (4, 8, 5)


# -- LongRoPE


@longropes
@updates
def test_longrope_is_that_of_one_call(make: Callable[[], PreTrainedModel], update: str) -> None:
    """Whether prefix, context and kept tokens are on one side of the switch or not; of a part of a
    batch too.
    """
    model = make()
    with ContextPatcher(model, update) as patcher:
        for lengths in LENGTHS:
            inputs = of_lengths(*lengths)
            patch = patcher.compute(**inputs)
            logits = patcher.forward(patch.kept_ids, patch)
            expected = one_call(model, assemble(**inputs))
            assert off(patch.logits, expected) <= 1e-5, lengths
            assert off(logits, expected) <= 1e-5, lengths
            if update == "exact":
                assert torch.equal(logits, patch.logits)
            if patch.info.divisible:
                part = patch.select(rows=slice(1, 2), tokens=slice(0, 1))
                assert off(patcher.forward(part.kept_ids, part), expected[1:, :1]) <= 1e-5, lengths


IDS, MASK, NEW = tokens(5, 3, 13), ragged(3, 13, side="left"), 7
GENERATE: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
EQUAL = torch.ones_like(MASK)  # rows on both sides of a switch are refused


def grown(ids: Tensor, mask: Tensor, made: Tensor, step: int) -> Sequences:
    """A context after ``step`` of the generated tokens (B, n), the last token kept."""
    ids = torch.cat([ids, made[:, :step]], 1)
    mask = torch.cat([mask, torch.ones_like(made[:, :step], dtype=torch.bool)], 1)
    return absorb_all_but_last(ids, mask)


WAYS: dict[str, dict] = {
    "two streams": {"update": "stable"},
    "two passes": {"update": "exact", "mode": "two_pass"},
    "exact, one pass": {"update": "exact", "mode": "shared_cache"},
    "fast": {"update": "stable", "mode": "shared_cache"},
    "compiled": {"update": "stable", "compile": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_longrope_switches_while_tokens_are_generated(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys in the cache are rotated again, as transformers does it for these classes;
    windows.
    """
    if OLD and way == "compiled":
        pytest.skip("LongRoPE in transformers before 5.21 cannot be traced")
    monkeypatch.setattr(region_compiler, "BACKEND", "eager")
    model, options = phi3(sliding_window=6, num_hidden_layers=2), dict(WAYS[way])
    expected = model.generate(IDS, attention_mask=EQUAL.long(), **GENERATE)[:, IDS.shape[1] :]
    with ContextPatcher(model, options.pop("update")) as patcher:
        steps = list(patcher.generate(IDS, context_mask=EQUAL, **options, **GENERATE))
        errors = [float(replay_error(patcher, step).max()) for step in steps]
    made = torch.stack([step.token_ids for step in steps], 1)
    if not OLD:  # which leaves the keys in the cache as they are
        assert torch.equal(made, expected)
    for number, step in enumerate(steps):
        assert off(step.logits, one_call(model, grown(IDS, EQUAL, made, number))[:, -1]) <= 1e-5
        assert errors[number] <= (1e-5 if WAYS[way]["update"] == "stable" else 0)


def test_longrope_switches_in_the_baseline_of_verify() -> None:
    model = phi3()
    run = baseline(model, IDS, EQUAL, NEW)
    logits, made = run.logits, run.tokens
    grew = (grown(IDS, EQUAL, made, step) for step in range(NEW))
    expected = torch.stack([one_call(model, tokens_so_far)[:, -1] for tokens_so_far in grew], 1)
    assert off(logits, expected) <= 1e-5


def test_rows_on_both_sides_of_the_switch_are_refused() -> None:
    """The longest row would decide for all; rows on one side, and each by itself, are served."""
    model, inputs = phi3(), of_lengths(*ON_BOTH_SIDES)
    with ContextPatcher(model, "stable") as patcher:
        with pytest.raises(
            ValueError, match=r"got rows of 14 to 17 tokens: run rows of one length"
        ):
            patcher.compute(**inputs)
        for row in range(2):
            alone = {k: x[row : row + 1] if k != "keep_first" else x for k, x in inputs.items()}
            patch, expected = patcher.compute(**alone), one_call(model, assemble(**alone))
            assert off(patcher.forward(patch.kept_ids, patch), expected) <= 1e-5
        with pytest.raises(ValueError, match="rows of 9 to 13 tokens and 4 new ones"):
            patcher.generate(IDS, context_mask=MASK, **GENERATE | {"max_new_tokens": 5})
        fewer = GENERATE | {"max_new_tokens": 4}  # the last of them is not run
        steps = list(patcher.generate(IDS, context_mask=MASK, **fewer))
    made = torch.stack([step.token_ids for step in steps], 1)
    assert off(steps[-1].logits, one_call(model, grown(IDS, MASK, made, 3))[:, -1]) <= 1e-5


@longropes
def test_batch_invariance_on_both_sides_of_the_switch(make: Callable[[], PreTrainedModel]) -> None:
    """A prompt, and steps on top of it; padding before, and behind."""
    model, lengths = make(), (19, 10, 15)
    rows = [tokens(seed, 1, length + 2) for seed, length in enumerate(lengths)]

    def run(ids: Tensor, mask: Tensor, *steps: Tensor) -> Tensor:
        """The logits of a prompt and of steps of one token, (B, T + steps, V)."""
        cache, logits = new_cache(model), []
        for number, part in enumerate((ids, *steps)):
            seen = torch.cat([mask, mask.new_ones(len(mask), number)], 1)
            positions = (seen.long().cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
            logits.append(call(model, part, seen, positions, cache))
        return torch.cat(logits, 1)

    with torch.no_grad(), batch_invariant(model):
        alone = [run(x[:, :-2], torch.ones_like(x[:, 2:]), x[:, -2:-1], x[:, -1:]) for x in rows]
        last = torch.cat([row[:, -2:] for row in rows]).split(1, 1)
        for steps, start in ((last, lambda length: 19 - length), ((), lambda _: 0)):
            ids, mask = torch.zeros(2, 3, 19, dtype=torch.long)
            for number, length in enumerate(lengths):
                columns = slice(start(length), start(length) + length)
                ids[number, columns], mask[number, columns] = rows[number][0, :-2], 1
            together = run(ids, mask, *steps)
            for number, own in enumerate(mask.bool()):
                shown = torch.cat([own, own.new_ones(len(steps))])
                expected = alone[number][0, : lengths[number] + len(steps)]
                assert torch.equal(together[number, shown], expected)
        numbered = model(ids, attention_mask=mask.long()).logits  # by itself, padding behind too
        assert torch.equal(numbered[1, :10], model(rows[1][:, :10]).logits[0])


# -- dynamic NTK


def test_dynamic_ntk_is_refused_where_its_frequencies_depend_on_other_calls() -> None:
    """With as many tokens as it was trained for, the untouched model keeps the frequencies of a
    longer call before.
    """
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_models.build("llama", max_position_embeddings=16, rope_parameters=rope)
    inputs = of_lengths(3, 7, 5)
    context, kept = inputs["context_ids"], inputs["kept_ids"]
    ids, longer = torch.cat([context, kept], 1), tokens(6, 2, 40)
    with torch.no_grad():
        expected, of_16 = model(ids).logits[:, -5:], model(torch.cat([ids, kept[:, :1]], 1)).logits
        model(longer)
        assert off(model(torch.cat([ids, kept[:, :1]], 1)).logits, of_16) > 0.1
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(context, kept, keep_first=3)
        with torch.no_grad():
            model(longer)
        assert off(patcher.forward(kept, patch), expected) <= 1e-5
        message = (
            "expected at most 15 tokens, beyond which dynamic NTK changes the rotary frequencies"
            " from call to call, got"
        )
        with pytest.raises(ValueError, match=f"{message} 16"):
            patcher.compute(context, tokens(2, 2, 6), keep_first=3)
        with pytest.raises(ValueError, match=f"{message} 13 and 3 new ones before the last"):
            patcher.generate(tokens(1, 2, 13), max_new_tokens=4)
    with torch.no_grad(), batch_invariant(model):
        with pytest.raises(ValueError, match=f"{message} 16"):
            model(tokens(6, 2, 16))
        assert torch.equal(model(longer[:, :15]).logits[:1], model(longer[:1, :15]).logits)


# -- positions from the padding id on

PADDING = 1


def roberta() -> PreTrainedModel:
    return model_types.build("roberta", {"max_position_embeddings": 30, "pad_token_id": PADDING})


@pytest.mark.parametrize("mode", ["two_stream", "shared_cache"])
def test_generation_with_positions_from_the_padding_id_on(mode: str) -> None:
    model, ids = roberta(), IDS.where(IDS != PADDING, 2)
    with ContextPatcher(model, "stable") as patcher:
        steps = list(patcher.generate(ids, context_mask=MASK, mode=mode, **GENERATE))
    made = torch.stack([step.token_ids for step in steps], 1)
    assert (made != PADDING).all()
    for number, step in enumerate(steps):
        sequences = grown(ids, MASK, made, number)
        padded = sequences.ids.masked_fill(~sequences.mask, PADDING)
        with torch.no_grad():  # the untouched model numbers them itself
            expected = model(padded, attention_mask=sequences.mask.long()).logits[:, -1]
        assert off(step.logits, expected) <= 1e-5


def test_what_positions_from_the_padding_id_on_leave_no_room_for() -> None:
    """Two rows of the position embeddings are before the first token's; the padding id as a token
    has none.
    """
    with ContextPatcher(roberta(), "stable") as patcher:
        patcher.compute(tokens(0, 1, 25) + 2, torch.tensor([[4, 5, 6]]))
        message = "expected at most 28 tokens, as many as the model has positions for, got 29"
        with pytest.raises(ValueError, match=message):
            patcher.compute(tokens(0, 1, 26) + 2, torch.tensor([[4, 5, 6]]))
        message = (
            "expected no token with the padding id 1, RobertaForCausalLM gives it no position, got"
            " one in row 1: mask it"
        )
        padded = torch.tensor([[4, 5, 6], [PADDING, 5, 6]])
        mask = padded != PADDING
        every = torch.ones_like(mask)
        for call in (
            lambda: patcher.compute(padded, padded + 2),
            lambda: patcher.generate(padded, context_mask=every),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        patcher.compute(padded, padded + 2, context_mask=mask)
        with_mask, without = (
            torch.stack([step.token_ids for step in patcher.generate(padded, **given, **GENERATE)])
            for given in ({"context_mask": mask}, {"pad_token_id": PADDING})
        )
        assert torch.equal(with_mask, without)


class Odd(GPT2LMHeadModel):
    """A model that skips every other position, unless it is told."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if position_ids is None:
            position_ids = 2 * torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return super().forward(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )


@pytest.mark.parametrize("scale", [1.0, 1e-4])  # of the positions' part: 1e-4 is near rounding
def test_other_positions_are_refused(scale: float) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = randomised(Odd, config)
    with torch.no_grad():
        model.transformer.wpe.weight *= scale
    message = "expected Odd to number its tokens one by one from 0, but without position_ids its"
    refuses(model, f"{message} logits are others")
