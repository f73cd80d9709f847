"""Settings of a generation, as arguments and in generation configurations: each has its effect in
``model.generate``, or is refused with a cure.
"""

import copy
from typing import Any

import pytest
import torch
from support.generation import tokens_of
from support.numeric import noise_limit
from support.patchers import IDS
from support.random_models import build
from torch import Tensor
from transformers import (
    CompileConfig,
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
    WatermarkingConfig,
)
from transformers.generation.configuration_utils import GenerationMode

from icl_patch import ContextPatcher, embedded, metrics

ENDS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": 5, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 0}
SERVED: dict[str, dict[str, Any]] = {
    "max_length": {"max_new_tokens": None, "max_length": 8},
    "min_length": {"min_length": 9, "eos_token_id": list(range(30))},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": list(range(60))},
    "penalty": {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2},
    "max_time": {"max_time": 1e-9},
    "use_cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "hybrid cache": {"cache_implementation": "hybrid"},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "guidance_scale": {"guidance_scale": 3.0},
    "bias": {"sequence_bias": [[[7], 9.0], [[7, 8], 20.0]]},
    "bad words": {"bad_words_ids": [[id_] for id_ in range(40)], "renormalize_logits": True},
    "suppressed": {"suppress_tokens": list(range(9, 60)), "begin_suppress_tokens": [61, 62]},
    "forced": {"forced_bos_token_id": 11, "forced_eos_token_id": 12},
    "encoder": {"encoder_repetition_penalty": 50.0},
    "decay": {"exponential_decay_length_penalty": (1, 3.0), "remove_invalid_values": True},
    "beams' own": {"early_stopping": True, "length_penalty": 2.0, "num_beams": 1},
    "sampled": {"min_p": 0.1, **SAMPLED},
    "several": {"num_return_sequences": 3, "typical_p": 0.8, **SAMPLED},
    "cut off": {"epsilon_cutoff": 3e-2, "eta_cutoff": 2e-2, "top_h": 0.6, **SAMPLED},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0), **SAMPLED},
}


@pytest.fixture(scope="module")
def both() -> Any:
    """A patcher, and a model like its own that is not attached."""
    model = build("llama")
    twin = copy.deepcopy(model)
    with ContextPatcher(model) as patcher:
        yield patcher, twin


@pytest.fixture(scope="module")
def plain(both: Any) -> Tensor:
    """What the model says without settings."""
    return generated(both[1], GenerationConfig(**ENDS))


def generated(model: Any, config: GenerationConfig) -> Tensor:
    model.generation_config = config
    return model.generate(IDS, attention_mask=torch.ones_like(IDS))[:, IDS.shape[1] :]


@pytest.mark.parametrize("name", SERVED)
def test_what_stands_in_the_models_configuration_holds(name: str, both: Any, plain: Tensor) -> None:
    patcher, twin = both
    torch.manual_seed(3)
    expected = generated(twin, GenerationConfig(**ENDS | SERVED[name]))
    patcher.model.generation_config = GenerationConfig(**ENDS | SERVED[name])
    torch.manual_seed(3)
    steps = list(patcher.generate(IDS, mode="two_pass"))
    assert torch.equal(tokens_of(steps), expected)
    none = ("use_cache", "static cache", "hybrid cache", "prefill_chunk_size", "beams' own")
    assert torch.equal(plain, expected) is (name in none)


OTHER_WAYS: dict[str, tuple[Any, Any]] = {
    "num_beams": (3, 1),
    "penalty_alpha": (0.6, None),
    "force_words_ids": ([[3]], None),
    "constraints": ([3], None),
    "dola_layers": ("high", None),
    "prompt_lookup_num_tokens": (2, None),
    "assistant_early_exit": (1, None),
    "use_mtp": (True, False),
    "is_assistant": (True, False),
    "token_healing": (True, False),
    "compile_config": (CompileConfig(), None),
    "cache_implementation": ("static", None),
    "cache_implementation, offloaded": ("offloaded", None),
    "cache_implementation, quantized": ("quantized", None),
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_other_ways_are_refused_with_a_cure(name: str, both: Any) -> None:
    """The loop has a cache of its own: another one in the model's configuration is not needed, one
    that is asked for is refused.
    """
    (patcher, _), (value, off), setting = both, OTHER_WAYS[name], name.split(",")[0]
    ends = ENDS | {"max_new_tokens": 2}
    config = GenerationConfig(**ends)
    setattr(config, setting, value)
    refusal = pytest.raises(ValueError, match=rf"{setting}(=|, got ).*Pass {setting}={off}$")
    patcher.model.generation_config = GenerationConfig(**ends)
    expected = tokens_of(patcher.generate(IDS))
    arguments: Any
    for arguments in ({setting: value}, {"generation_config": config}):
        with refusal:
            patcher.generate(IDS, **arguments)
        cured = tokens_of(patcher.generate(IDS, **arguments | {setting: off}))
        assert torch.equal(cured, expected)
    patcher.model.generation_config = config
    if setting in ("cache_implementation", "compile_config"):
        assert torch.equal(tokens_of(patcher.generate(IDS)), expected)
    else:
        with refusal:
            patcher.generate(IDS)
    assert torch.equal(tokens_of(patcher.generate(IDS, **{setting: off})), expected)


def test_loops_that_are_not_ours(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of others, and a way of decoding that is not known."""
    patcher, twin = both
    patcher.model.generation_config = GenerationConfig(**ENDS)
    for name in ("assistant_model", "custom_generate"):
        with pytest.raises(ValueError, match=f"expected no {name}, got LlamaForCausalLM"):
            patcher.generate(IDS, **{name: twin})
    monkeypatch.setattr(
        GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH
    )
    with pytest.raises(ValueError, match="got those of beam_search"):
        patcher.generate(IDS, max_new_tokens=1)


def test_steps_hold_the_logits_and_scores_of_a_dictionary(both: Any) -> None:
    patcher, twin = both
    wanted = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    for model in (patcher.model, twin):
        model.generation_config = GenerationConfig(**ENDS, **wanted, repetition_penalty=2.0)
    theirs = twin.generate(IDS, attention_mask=torch.ones_like(IDS))
    limit = noise_limit(twin)
    steps = patcher.generate(IDS)
    for step, logits, scores in zip(steps, theirs.logits, theirs.scores, strict=True):
        assert metrics.linf(step.logits, logits).max() <= limit
        assert metrics.linf(step.scores, scores).max() <= limit
        assert not torch.equal(step.scores, step.logits)


def test_stop_strings_end_rows_as_in_transformers(both: Any) -> None:
    """As an argument, in a configuration among the arguments, and in the model's own."""
    model, tokenizer = embedded.load()
    prompt = embedded.held_out_prompts(embedded.KINDS[0], 1)[0]
    inputs = tokenizer(prompt.context + prompt.question, return_tensors="pt")
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    model.generation_config = GenerationConfig(**greedy)
    count = inputs["input_ids"].shape[1]
    free = model.generate(**inputs)[0, count:]
    stop = {"stop_strings": [tokenizer.decode(free)[2]]}
    expected = model.generate(**inputs, **stop, tokenizer=tokenizer)[0, count:]
    assert len(expected) < 8
    config = GenerationConfig(**greedy, **stop)

    def generated(patcher: ContextPatcher, **arguments: Any) -> list[int]:
        return tokens_of(patcher.generate(**inputs, **arguments))[0].tolist()

    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        for arguments in (stop, {"generation_config": config}):
            assert generated(patcher, **arguments) == expected.tolist()
        model.generation_config = config
        assert generated(patcher) == expected.tolist()
        answer = patcher.ask(prompt.context, prompt.question)
        assert answer.token_ids[0].tolist() == expected.tolist()
        assert generated(patcher, stop_strings=None) == free.tolist()
        own = StopStringCriteria(tokenizer, [tokenizer.decode(free)[4]])
        criteria = StoppingCriteriaList([own])
        twin = embedded.load()[0]
        expected = twin.generate(
            **inputs, **greedy, **stop, stopping_criteria=criteria, tokenizer=tokenizer
        )[0, count:]
        with pytest.warns(UserWarning, match="the criterion takes precedence"):
            assert generated(patcher, stopping_criteria=criteria) == expected.tolist()
    patcher, _ = both
    patcher.model.generation_config = GenerationConfig(**ENDS, stop_strings="zz")
    with pytest.raises(ValueError, match=r"pass tokenizer=\.\.\., or stop_strings=None"):
        patcher.generate(IDS)
    for cure in ({"tokenizer": tokenizer}, {"stop_strings": None}):
        assert len(list(patcher.generate(IDS, **cure))) == 6


@pytest.mark.parametrize("mode", ["auto", "two_pass"])
def test_rows_end_without_an_end_of_sequence_token(both: Any, mode: str) -> None:
    """transformers goes on with them."""
    patcher, twin = both
    patcher.model.generation_config = twin.generation_config = GenerationConfig()
    ends: Any = StoppingCriteriaList([lambda ids, _scores, **_: ids[:, -1] % 3 == 0])
    arguments: dict[str, Any] = {"max_new_tokens": 9, "stopping_criteria": ends}
    expected = twin.generate(IDS, attention_mask=torch.ones_like(IDS), **arguments)
    steps = [*patcher.generate(IDS, mode=mode, **arguments)]
    assert torch.equal(tokens_of(steps), expected[:, IDS.shape[1] :])
    assert any(0 < int(step.live.sum()) < len(IDS) for step in steps)


OUTPUTS = ["output_hidden_states", "output_attentions", "output_router_logits"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_the_model_itself_gives(name: str, both: Any) -> None:
    patcher, twin = both
    message = rf"got {name}, which is unsupported: leave it out, or pass {name}=False"
    patcher.model.generation_config = GenerationConfig(**ENDS)
    patch = patcher.compute(IDS[:, :3], IDS[:, 3:])
    for refused in (
        lambda: patcher.generate(IDS, **{name: True}),
        lambda: patcher.compute(IDS[:, :3], IDS[:, 3:], **{name: True}),
        lambda: patcher.forward(IDS[:, 3:], patch, **{name: True}),
    ):
        with pytest.raises(TypeError, match=message):
            refused()
    setattr(patcher.model.generation_config, name, True)
    with pytest.raises(TypeError, match=message):
        patcher.generate(IDS)
    [step] = patcher.generate(IDS, **{name: False}, max_new_tokens=1)
    assert torch.equal(step.token_ids, twin(IDS).logits[:, -1].argmax(-1))


def test_embeddings_and_inputs_without_a_name(both: Any) -> None:
    patcher, _ = both
    patcher.model.generation_config = GenerationConfig(**ENDS)
    message = r"inputs_embeds, which is unsupported: a patch names its tokens, so give input_ids\."
    for arguments in ({}, {"input_ids": IDS}):
        with pytest.raises(TypeError, match=message):
            patcher.generate(inputs_embeds=torch.ones(2, 5, 48), **arguments)
    with pytest.raises(TypeError, match=r"inputs, which is unsupported: give .* as context_ids"):
        patcher.generate(inputs=IDS)  # as transformers calls them
