"""Both streams over the cache of one: which models, what is refused, what it costs, and that a
wrong stream would be noticed.
"""

import gc
import re
import warnings
from typing import Any

import pytest
import torch
from support.generation import prefilled
from support.numeric import noise_limit, replay_error, replay_limit
from support.patchers import IDS, Snapshot, works
from support.random_models import build, of_the_zoo, ragged, shallow, tokens
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from icl_patch import ContextPatcher, UnsupportedModelError, metrics
from icl_patch.errors import SlowerStepsWarning
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decoding import decode_one_token
from icl_patch.generation.shared_cache import SharedCacheStreams
from icl_patch.generation.streams import AttentionCall
from icl_patch.generation.two_streams import TwoStreams

COVERED = ("gemma3", "glm4", "olmo3", "mistral", "qwen3", "phi3", "granite", "gpt2", "llama-bias")
COVERED += ("gpt_neox-sequential", "opt-post-norm")
COVERED += ("mixtral", "qwen3_moe", "deepseek_v3", "llama4")
REFUSED = {
    "cohere": "its MLP stands beside the attention",
    "gemma4": "it goes on from its sum",
    "gemma2": "call 0 attentions of transformers' 'sdpa', not one each, as "
    # the class of transformers 5.17 knows 'sdpa' too
    + ("it has 'eager'" if Gemma2PreTrainedModel._supports_sdpa else "its class knows 'eager'"),
    "falcon-rw": "'sdpa', not one each, as its class has attention code of its own",
    "gpt_bigcode": "does not cover GPTBigCodeForCausalLM: shape",
}
TWO_PASSES = [("gemma3", "direct"), ("recurrent_gemma", "stable"), ("recurrent_gemma", "exact")]


@pytest.mark.parametrize("family", of_the_zoo(COVERED))
def test_a_fast_step_is_what_its_patch_replays(family: str) -> None:
    """Against the replay without context, rows of both streams and the untouched model."""
    model, ids, mask = shallow(family, 1), tokens(3, 3, 11), ragged(3, 11, side="left")
    with torch.no_grad():
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        untouched = model(ids, attention_mask=mask.long(), position_ids=positions).logits[:, -1]
    before, floor = Snapshot(model), noise_limit(model)
    with ContextPatcher(model, "stable") as patcher:
        arguments: dict = {"context_mask": mask, "max_new_tokens": 4, "eos_token_id": None}
        fast = list(patcher.generate(ids, mode="shared_cache", **arguments))
        two = list(patcher.generate(ids, mode="two_stream", **arguments))
        limits = [replay_limit(patcher, step.patch) for step in fast]
        errors = [replay_error(patcher, step).max() for step in fast]
        works(patcher)
    before.check(model)
    assert {step.mode for step in fast} == {"shared_cache"}
    assert metrics.linf(fast[0].logits, untouched).max() <= floor
    for step, other, limit, error in zip(fast, two, limits, errors, strict=True):
        assert torch.equal(step.token_ids, other.token_ids)
        assert error <= limit
        assert metrics.linf(step.logits, other.logits).max() <= limit
        assert step.patch.layers[0].keys() == other.patch.layers[0].keys()
        for name, size in step.patch.norms().items():
            assert (size - other.patch.norms()[name]).abs().max() <= limit * size.max(), name


@pytest.mark.parametrize(
    ("family", "update"), [*((family, "stable") for family in REFUSED), *TWO_PASSES]
)
def test_what_it_does_not_cover_is_refused_by_name(family: str, update: str) -> None:
    """The default takes another mode, and says that two passes are slower."""
    mode, message = "two_pass", f"'two_pass' for steps of the update '{update}'"
    if family in REFUSED:
        mode, message = "two_stream", f"mode=.shared_cache.*{re.escape(REFUSED[family])}"
    model, arguments = shallow(family, 1), {"max_new_tokens": 2}
    before = Snapshot(model)
    with ContextPatcher(model, update) as patcher:
        with pytest.raises(ValueError, match=message) as refusal:
            patcher.generate(IDS, mode="shared_cache", **arguments)
        assert isinstance(refusal.value, UnsupportedModelError) == (family in REFUSED)
        slower = "rows of both streams" if family in REFUSED else "in two passes"
        with pytest.warns(SlowerStepsWarning, match=f"{update} steps run .*{slower}"):
            assert next(patcher.generate(IDS, **arguments)).mode == mode
        if family != "recurrent_gemma":  # whose context has no padding
            works(patcher)
    before.check(model)


FAULTS = ("sees the context", "sees nothing", "one stream twice", "later")
WRONG = [("mixtral", "stable", "later"), *(("llama", "stable", fault) for fault in FAULTS)]
WRONG += [("cohere", update, "rows twice") for update in ("stable", "exact")]


@pytest.mark.parametrize(("family", "update", "fault"), WRONG)
def test_the_trial_notices_a_wrong_stream(
    family: str, update: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reduced logits are the context's whatever the reduced rows see: the writers absorb it.
    The replay tells. One fault begins in three of the trial's nine replays, of the longest context.
    """
    attend = SharedCacheStreams._attend

    def wrong(self: Any, call: AttentionCall) -> torch.Tensor:
        made, value = attend(self, call), call.value
        groups = call.query.shape[1] // value.shape[1]
        context = value.mean(2, keepdim=True).repeat_interleave(groups, 1).reshape(made.shape)
        reduced = self._both[len(made) :]
        reduced.copy_(
            {
                "sees the context": context,
                "sees nothing": torch.zeros_like(made),
                "one stream twice": made,
                "later": reduced * (3 if value.shape[2] >= 8 else 1),
            }[fault]
        )
        return made

    def twice(*inputs: Any) -> torch.Tensor:
        context, _ = own(*inputs).chunk(2)
        return torch.cat([context, context])

    own = TwoStreams._attend
    monkeypatch.setattr(SharedCacheStreams, "_attend", wrong)
    monkeypatch.setattr(TwoStreams, "_attend", twice)
    model = shallow(family)
    mode = DecodeMode.TWO_STREAM if fault == "rows twice" else DecodeMode.SHARED_CACHE
    before = Snapshot(model)
    with ContextPatcher(model, update) as patcher:
        for _ in range(2):  # the second time it is remembered
            with pytest.raises(UnsupportedModelError, match="replays of its steps are off by"):
                patcher.plans.for_mode(mode)
    before.check(model)


def test_another_attention_is_named_with_its_cure() -> None:
    model, arguments = shallow("llama"), {"max_new_tokens": 1, "eos_token_id": None}
    model.set_attn_implementation("eager")
    with ContextPatcher(model, "stable") as patcher:
        cure = r"as it has 'eager': call model\.set_attn_implementation\('sdpa'\)\."
        with pytest.warns(SlowerStepsWarning, match=cure):
            list(patcher.generate(IDS, **arguments))
        model.set_attn_implementation("sdpa")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            [step] = patcher.generate(IDS, **arguments)
        assert step.mode == "shared_cache"


@pytest.mark.parametrize("mode", ["shared_cache", "two_stream"])
def test_an_attention_that_changes_between_steps_is_noticed(mode: str) -> None:
    """Of one row, whose queries another attention would take for rows of one batch."""
    model, arguments = shallow("llama"), {"max_new_tokens": 3, "eos_token_id": None, "mode": mode}
    with ContextPatcher(model, "stable") as patcher:
        steps = patcher.generate(IDS[:1], **arguments)
        next(steps)
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedModelError, match="settings that it had at the first step"):
            next(steps)
        if mode == "two_stream":
            step = next(patcher.generate(IDS[:1], **arguments))
            assert replay_error(patcher, step).max() <= replay_limit(patcher, step.patch)


def test_something_between_attention_and_its_projection_is_refused() -> None:
    model = build("llama")
    attention = model.model.layers[2].self_attn
    attention.o_proj = torch.nn.Sequential(torch.nn.Tanh(), attention.o_proj)
    refusal = pytest.raises(UnsupportedModelError, match=r"layers\.2: it does something to the")
    with ContextPatcher(model, "stable") as patcher, refusal:
        patcher.plans.for_mode(DecodeMode.SHARED_CACHE)


def held() -> int:
    """Bytes of all tensors that anything holds."""
    gc.collect()
    # other tests' fake tensors hold nothing
    found = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))
    storages = [x.untyped_storage() for x in found]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def test_memory_beyond_the_model_and_one_cache() -> None:
    """Between steps, with the last step's factors alive: at most 1 % of the model, and a cache of B
    rows.
    """
    batch, sizes = 4, {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4000}
    model, ids = build("llama", 0, num_hidden_layers=2, **sizes), tokens(0, batch, 40)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    with ContextPatcher(model, "stable") as patcher:
        patcher.plans.for_mode(DecodeMode.SHARED_CACHE)
        before, mask = held(), torch.ones_like(ids).bool()
        state = prefilled(patcher, ids, mask, 43, DecodeMode.SHARED_CACHE)
        for column in (-1, -2, -3):
            decoded = decode_one_token(state, ids[:, column])
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.inputs.cache.layers)
        # rows, tokens, k and v, heads, their width, layers, bytes
        assert cache == batch * 42 * 2 * 2 * 128 * 2 * 4
        beyond = held() - before - cache - decoded.logits.untyped_storage().nbytes()
    assert beyond <= 0.01 * parameters, (beyond, parameters)
