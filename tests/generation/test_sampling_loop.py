"""The loop around the decode step: transformers' choice and end of tokens, streaming, checks,
interruption, caches.
"""

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.generation import tokens_of
from support.numeric import noise_limit, replay_error
from support.patchers import IDS, works
from support.random_models import build, ragged, tokens
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from icl_patch import ContextPatcher, ControllabilityError, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.generation import region_compiler
from icl_patch.models import kv_cache
from icl_patch.models.forward import cache_name

MASK = ragged(3, 9, side="left")


def stock(model: nn.Module, ids: Tensor, mask: Tensor, **arguments: Any) -> Tensor:
    """What ``model.generate`` gives to the same arguments."""
    return model.generate(ids, attention_mask=mask.long(), **arguments)[:, ids.shape[1] :]


CASES = [("gemma3", "stable", "auto"), ("gemma3", "direct", "two_pass")]
CASES += [("llama", "direct", "auto"), ("llama", "stable", "two_stream")]
CASES += [("llama", "exact", "two_pass")]


@pytest.mark.parametrize(("family", "update", "mode"), CASES)
def test_rows_end_like_those_of_the_model(family: str, update: str, mode: str) -> None:
    """One row after another says an end; it is padded from there, the others say what they said.
    Every step is what its patch replays.
    """
    model, ids = build(family), tokens(8, 3, 9)
    arguments: dict = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    free = stock(model, ids, MASK, eos_token_id=96, **arguments)
    arguments["eos_token_id"] = ends = sorted({int(free[i, j]) for i, j in enumerate((2, 5, 7))})
    expected = stock(model, ids, MASK, **arguments)
    limit, current, positions = noise_limit(model), ids[:, -1], MASK.sum(1) - 1
    with ContextPatcher(model, update) as patcher:
        steps = list(patcher.generate(ids, context_mask=MASK, mode=mode, **arguments))
        for number, step in enumerate(steps):
            live, patch = step.live, step.patch
            assert step.token_ids.dtype == torch.int64
            assert step.logits.shape == (3, model.config.vocab_size)
            assert torch.equal(step.token_ids[live], step.logits[live].argmax(-1))
            assert torch.equal(patch.kept_ids, current.unsqueeze(1))
            assert torch.equal(patch.position_ids[live, 0], positions[live] + number)
            assert patch.prefix_ids.shape == (3, 0)
            assert all(layer["readers.v"].shape[:2] == (3, 1) for layer in patch.layers)
            # patches of two passes are recorded in the replay's shapes
            assert replay_error(patcher, step).max() <= (0 if patch.passes == 2 else limit)
            current = step.token_ids
    assert torch.equal(tokens_of(steps), expected)
    said = [row.tolist() for row in expected]
    assert len({next((i for i, token in enumerate(row) if token in ends), 9) for row in said}) > 1
    for before, step in pairwise(steps):
        assert torch.equal(step.live, ~before.ended)
        assert (step.token_ids[before.ended] == 0).all()
    assert steps[-1].ended.all()


class Never(LogitsProcessor):
    """No token twice in a row, after the first row's last one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, input_ids[0, -1:], -torch.inf)


OWN = {"logits_processor": LogitsProcessorList([Never()]), "do_sample": False}
SAMPLING = {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize("chosen", [SAMPLING, OWN], ids=["sampling", "own"])
def test_choice_is_transformers_own(chosen: dict) -> None:
    """And a processor of the user's: the same random numbers give the same tokens. Further
    settings: ``test_settings``.
    """
    arguments: dict = {"max_new_tokens": 8, "pad_token_id": 0} | chosen
    model, ids = build("gemma3"), tokens(4, 3, 9)
    model.generation_config.eos_token_id = None
    torch.manual_seed(7)
    expected = stock(model, ids, MASK, **arguments)
    with ContextPatcher(model, "stable") as patcher:
        for mode in ("two_stream", "shared_cache"):
            torch.manual_seed(7)
            steps = list(patcher.generate(ids, context_mask=MASK, mode=mode, **arguments))
            assert torch.equal(tokens_of(steps), expected)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value)

    def end(self) -> None:
        self.ended += 1


def test_streamers() -> None:
    """They get what transformers gives them, and are ended whatever happens: nobody takes the rest,
    or the first token, or there is an error before it. Who waits for the text is told.
    """
    model, theirs, ours = build("llama", max_position_embeddings=12), Collector(), Collector()
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    model.generate(IDS, attention_mask=torch.ones_like(IDS), streamer=theirs, **arguments)
    with ContextPatcher(model, "exact") as patcher:
        for number, _ in enumerate(patcher.generate(IDS, streamer=ours, **arguments)):
            assert len(ours.got) == number + 2  # the prompt, then every token as it is chosen
        begun, dropped, too_long, refused = others = [Collector() for _ in range(4)]
        steps = patcher.generate(IDS, streamer=begun, **arguments)
        next(steps)
        steps.close()
        patcher.generate(IDS, streamer=dropped, **arguments)
        with pytest.raises(ValueError, match="expected at most 12 tokens"):
            patcher.generate(IDS, max_new_tokens=20, streamer=too_long)
        with pytest.raises(ValueError, match="for steps of one pass"):
            patcher.generate(IDS, streamer=refused, mode="two_pass", compile=True, **arguments)
    assert all(map(torch.equal, ours.got, theirs.got)) and len(ours.got) == len(theirs.got)
    assert [collector.ended for collector in (ours, *others)] == [1] * 5
    assert [len(collector.got) for collector in others] == [2, 1, 1, 1]


class Third(StoppingCriteria):
    """Ends the first row at its third token."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        scores = scores if scores is None else [x.clone() for x in scores]
        self.seen.append((input_ids.clone(), scores))
        return torch.tensor([input_ids.shape[1] >= IDS.shape[1] + 3, False])


@pytest.mark.parametrize(
    "wanted",
    [{}, {"output_scores": True, "return_dict_in_generate": True}],
    ids=["without", "with"],
)
def test_criteria_see_tokens_and_the_scores_that_were_asked_for_and_end_rows(wanted: dict) -> None:
    model, theirs, ours = build("llama"), Third(), Third()
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 96, "pad_token_id": 0}
    arguments |= wanted
    model.generate(IDS, stopping_criteria=StoppingCriteriaList([theirs]), **arguments)
    criteria = StoppingCriteriaList([ours])
    with ContextPatcher(model, "exact") as patcher:
        steps = list(patcher.generate(IDS, stopping_criteria=criteria, **arguments))
    limit = noise_limit(model)
    for (ids, scores), (expected_ids, expected) in zip(ours.seen, theirs.seen, strict=True):
        assert torch.equal(ids, expected_ids)
        if not wanted:
            assert scores is expected is None
        else:
            pairs = zip(scores, expected, strict=True)
            assert all(metrics.linf(x, y).max() <= limit for x, y in pairs)
    ended = [[False, False]] * 2 + [[True, False]] * 2 + [[True, True]]
    assert [step.ended.tolist() for step in steps] == ended


def test_more_tokens_than_the_model_has_positions_for() -> None:
    """The last new token is not run, and needs none: GPT-2 looks positions up in a matrix."""
    model = tiny_models.build("gpt2", max_position_embeddings=12)
    ids, mask = tokens(0, 2, 14), ragged(2, 14, side="left")
    mask[0, :4] = False  # padding takes no position: rows of 10 and 12 tokens
    free: dict[str, Any] = {"eos_token_id": None, "pad_token_id": None}
    own = stock(model, ids[:1], mask[:1], max_new_tokens=3, do_sample=False, **free)
    with ContextPatcher(model, "stable") as patcher:
        for given in (3, None):  # None: what there is room for
            arguments = {"max_new_tokens": given, **free}
            steps = patcher.generate(ids[:1], context_mask=mask[:1], **arguments)
            assert torch.equal(tokens_of(steps), own)
        message = r"at most 12 tokens, as many as the model has positions for, got 10 and 3 new"
        with pytest.raises(ValueError, match=message):
            patcher.generate(ids[:1], context_mask=mask[:1], max_new_tokens=4)
        assert len(list(patcher.generate(ids[:, 2:], **free))) == 1
        with pytest.raises(ValueError, match=r"at most 12 tokens.* got 14$"):
            patcher.generate(ids)


def test_without_a_mask_the_padding_id_is_padding() -> None:
    """As in ``model.generate``, wherever the ids stand that pad and end."""
    model, ids = build("llama"), tokens(8, 3, 9)
    ids = torch.where(MASK, torch.where(ids == 7, 8, ids), 7)
    arguments: dict = {"max_new_tokens": 4, "do_sample": False}
    model.generation_config = GenerationConfig(pad_token_id=7)
    config, twin = GenerationConfig(pad_token_id=torch.tensor(7)), copy.deepcopy(model)
    whole: dict = {"pad_token_id": 7, "eos_token_id": [96, 7]}  # what ends a row is no padding
    with ContextPatcher(model, "exact") as patcher:
        for given in ({}, {"generation_config": config}, whole, {"pad_token_id": None}):
            own = twin.generate(ids, **arguments, **given)[:, ids.shape[1] :]
            assert torch.equal(tokens_of(patcher.generate(ids, **arguments, **given)), own)
        hole, ended = ids.clone(), ids.clone()
        hole[:, -3] = ended[:, -1] = 7
        for bad in (hole, ended, torch.full_like(ids, 7)):
            message = r"Without context_mask the id 7 is padding.*give the mask, or pass pad_token"
            with pytest.raises(ValueError, match=message):
                patcher.generate(bad, **arguments)
            mask = torch.ones_like(bad)
            own = twin.generate(bad, attention_mask=mask, **arguments)
            steps = patcher.generate(bad, context_mask=mask.bool(), **arguments)
            assert torch.equal(tokens_of(steps), own[:, ids.shape[1] :])


def test_an_ended_row_is_nobodys_error() -> None:
    """Its padding embeds as zeros, of which no matrix can be made to give anything; a live row's
    zeros are an error, and named.
    """
    model = build("llama")
    # without context a token's zeros stay zeros; with context attention moves them
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(2)
    arguments: dict = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with ContextPatcher(model, "stable") as patcher:
        model.model.embed_tokens.weight.data[0] = 0
        says = [int(token) for token in next(patcher.generate(IDS, **arguments)).token_ids]
        steps = list(patcher.generate(IDS, eos_token_id=says[0], **arguments))
        assert steps[0].ended.tolist() == [True, False]
        assert all(step.logits[1].isfinite().all() for step in steps)
        factors = [item for step in steps[1:] for item in step.patch.layers[0].items()]
        assert all((u[0] == 0).all() for name, u in factors if name.endswith(".u"))
        zeros = IDS.clone()
        zeros[1, -1] = 0
        message = r"model\.layers\.0, row 1, kept token 0: the input z of mlp\.gate_proj is 0"
        with pytest.raises(ControllabilityError, match=message):
            every = torch.ones_like(zeros)  # the padding id is a token
            list(patcher.generate(zeros, context_mask=every, **arguments))


def test_a_patch_is_assembled_when_asked_for() -> None:
    """Later steps, replays and detaching do not change it; other weights are noticed."""
    model = build("gemma3", 2)
    limit = noise_limit(model)
    with ContextPatcher(model, "stable") as patcher:
        kept = list(patcher.generate(IDS, max_new_tokens=3, eos_token_id=None))
        first, second = tokens_of(kept)[:, :2].split(1, 1)
        fresh = patcher.compute(torch.cat([IDS, first], 1), second)
    patch = kept[2].patch
    assert patch is kept[2].patch
    assert replace(patch.info, passes=2) == fresh.info
    assert torch.equal(patch.position_ids, fresh.position_ids)
    assert torch.equal(patch.kept_slots, fresh.kept_slots)
    for layer, other in zip(patch.layers, fresh.layers, strict=True):
        assert layer.keys() == other.keys()
        assert all(metrics.linf(layer[name], other[name]).max() <= limit for name in layer)
    with ContextPatcher(model, "stable") as patcher:
        replayed = patcher.forward(patch.kept_ids, patch)[:, -1]
        assert metrics.linf(replayed, kept[2].logits).max() <= limit
    for _ in range(3):  # some fingerprints are above the old one, some below
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.add_(1)
        with pytest.raises(ValueError, match="they have changed since"):
            _ = kept[1].patch


def test_positions_and_caches_that_are_not_ours_are_refused() -> None:
    ids, mask = tokens(6, 3, 9), MASK
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    with ContextPatcher(build("llama"), "stable") as patcher:
        arguments: dict = {"context_mask": mask, "max_new_tokens": 3, "eos_token_id": None}
        expected = tokens_of(list(patcher.generate(ids, **arguments)))
        for same in (positions, positions.expand(3, 3, 9)):
            steps = list(patcher.generate(ids, position_ids=same, **arguments))
            assert torch.equal(tokens_of(steps), expected)
        for others in (positions + 4, positions[:, 1:], torch.stack([positions, positions * 2])):
            message = r"expected no position_ids, or those that count the tokens from 0, got"
            with pytest.raises(ValueError, match=message):
                patcher.generate(ids, position_ids=others, **arguments)
        config = patcher.model.config
        for cache in (StaticCache(config=config, max_cache_len=20), DynamicCache(config=config)):
            with pytest.raises(ValueError, match=f"got {type(cache).__name__}: leave it out"):
                patcher.generate(ids, **{cache_name(patcher.model): cache}, **arguments)
        with pytest.raises(TypeError, match="expected context_mask or attention_mask"):
            patcher.generate(ids, context_mask=mask, attention_mask=mask.long())
        works(patcher)


@pytest.mark.parametrize(
    ("update", "options"),
    [
        ("stable", {"mode": "two_stream"}),
        ("stable", {"mode": "shared_cache"}),
        ("stable", {"mode": "shared_cache", "compile": True}),
        ("exact", {"mode": "two_pass"}),
    ],
    ids=str,
)
def test_inside_and_outside_of_inference_mode(
    update: str, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_compiler, "BACKEND", "eager")
    arguments: dict = {"max_new_tokens": 4, "eos_token_id": None} | options
    with ContextPatcher(build("llama"), update) as patcher:
        with torch.inference_mode():
            first = patcher.generate(IDS, **arguments)
            begun = [next(first)]
        steps = begun + list(first)
        second = patcher.generate(IDS, **arguments)
        expected = [next(second)]
        with torch.inference_mode():
            expected += list(second)
    assert torch.equal(tokens_of(steps), tokens_of(expected))
    for step, other in zip(steps, expected, strict=True):
        assert torch.equal(step.logits, other.logits)


def test_a_reserved_layer_is_a_dynamic_one_that_does_not_move() -> None:
    """Through appending, cropping, choosing rows, and past its room."""
    dynamic = DynamicLayer()
    dynamic.update(*torch.randn(2, 3, 2, 5, 4).unbind())
    reserved = kv_cache.ReservedLayer(dynamic, 9)
    place = None
    for tokens_, cropped in ((1, None), (2, -2), (1, None), (1, None), (4, -1)):
        new = torch.randn(2, 3, 2, tokens_, 4).unbind()
        before = reserved.keys.shape[-2]
        made, expected = reserved.update(*new), dynamic.update(*new)
        assert all(map(torch.equal, made, expected))
        place = made[0].data_ptr() if place is None else place
        assert (reserved.keys.data_ptr() == place) == (before + tokens_ <= 9)
        for layer in (reserved, dynamic) if cropped else ():
            layer.crop(cropped)
    for layer in (reserved, dynamic):
        layer.batch_select_indices(torch.tensor([2, 0]))
    new = torch.randn(2, 2, 2, 1, 4).unbind()
    assert all(map(torch.equal, reserved.update(*new), dynamic.update(*new)))
    assert reserved.get_seq_length() == dynamic.get_seq_length() == 12
