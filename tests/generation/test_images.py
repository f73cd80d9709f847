"""Generation and `verify` with images in the context, of models with positions of three numbers."""

from typing import Any

import pytest
import sweep
import torch
from support import image_models
from support.numeric import noise_limit, replay_error

from icl_patch import ContextPatcher, metrics, verify
from icl_patch.evaluation import embedded, tiny_models
from icl_patch.generation import graph_partition

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
BATCHES = {"one": image_models.one_image, "ragged": image_models.ragged_images}


def generated(model: Any, inputs: dict[str, Any]) -> Any:
    """The model's own tokens and logits."""
    return model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)


MODES = {
    "stable": ("two_pass", "two_stream", "shared_cache"),
    "direct": ("two_stream",),
    "exact": ("two_pass", "shared_cache"),
}


@pytest.mark.parametrize(
    ("kind", "batch"),
    [*((kind, "ragged") for kind in image_models.KINDS), (image_models.KINDS[0], "one")],
)
def test_generates_as_the_model_with_its_images(kind: str, batch: str) -> None:
    model, inputs = image_models.build(kind), BATCHES[batch]()
    own = generated(model, inputs)
    other = generated(model, inputs | {"pixel_values": -inputs["pixel_values"]})
    assert metrics.linf(other.logits[0], own.logits[0]).max() > 0.01  # the image matters
    limit = noise_limit(model, inputs["input_ids"])
    for update, modes in MODES.items():
        with ContextPatcher(model, update) as patcher:
            for mode in modes:
                steps = list(patcher.generate(**inputs, **GREEDY, mode=mode))
                for step, expected in zip(steps, own.logits, strict=True):
                    assert metrics.linf(step.logits, expected).max() <= limit, (update, mode)
                    assert replay_error(patcher, step).max() <= limit, (update, mode)
                    assert step.mode == mode
                tokens = torch.stack([step.token_ids for step in steps], 1)
                assert torch.equal(tokens, own.sequences[:, inputs["input_ids"].shape[1] :]), mode


@pytest.mark.parametrize("mode", ["two_stream", "shared_cache"])
def test_a_compiled_step_goes_on_from_the_positions_of_images(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traced graphs run as they are, which shows their positions."""
    monkeypatch.setattr(graph_partition, "BACKEND", "eager")
    model, inputs = image_models.build("Qwen2VL"), image_models.ragged_images()
    own = generated(model, inputs)
    with ContextPatcher(model, "stable") as patcher:
        steps = patcher.generate(**inputs, **GREEDY, mode=mode, compile=True)
        tokens = torch.stack([step.token_ids for step in steps], 1)
    assert torch.equal(tokens, own.sequences[:, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("kind", image_models.KINDS)
@pytest.mark.parametrize("keep_last", [0, 1])
def test_verify_replays_behind_images(kind: str, keep_last: int) -> None:
    model, inputs = image_models.build(kind), image_models.ragged_images()
    report = verify(
        model, embedded.load()[1], context=inputs, max_new_tokens=4, keep_last=keep_last
    )
    own = generated(model, inputs).sequences[:, inputs["input_ids"].shape[1] :][:, :4]
    assert report.passed and report.bit_identical == 1
    assert [step.token_id for step in report.steps] == own.flatten().tolist()


def test_images_without_the_types_of_their_tokens_are_refused() -> None:
    model, inputs = image_models.build("Qwen2VL"), image_models.one_image()
    with ContextPatcher(model, "stable") as patcher:
        types = inputs.pop("mm_token_type_ids")
        with pytest.raises(ValueError, match="expected mm_token_type_ids beside pixel_values"):
            patcher.generate(**inputs, **GREEDY)
        with pytest.raises(ValueError, match=r"mm_token_type_ids \(1, 8\), .* got \(1, 7\)"):
            patcher.generate(**inputs, **GREEDY, mm_token_type_ids=types[:, :-1])
        inputs |= {name: inputs[name][:, :6] for name in ("input_ids", "attention_mask")}
        with pytest.raises(ValueError, match=r"for the context's last token.* got \[1\]"):
            patcher.generate(**inputs, **GREEDY, mm_token_type_ids=types[:, :6])


def test_types_of_text_that_later_tokens_would_not_have_are_refused() -> None:
    """BERT's type 0 is that of a token without types; GPT-2 adds the vector of its token 0."""
    ids = torch.arange(1, 9).expand(1, -1)
    with (
        ContextPatcher(tiny_models.build("gpt2"), "stable") as patcher,
        pytest.raises(ValueError, match="expected no token_type_ids for GPT2LMHeadModel"),
    ):
        patcher.generate(ids, token_type_ids=torch.zeros_like(ids), **GREEDY)
    model = sweep.build("bert", {})
    own = generated(model, {"input_ids": ids}).sequences[:, ids.shape[1] :]
    with ContextPatcher(model, "stable") as patcher:
        steps = patcher.generate(ids, token_type_ids=torch.zeros_like(ids), **GREEDY)
        assert torch.equal(torch.stack([step.token_ids for step in steps], 1), own)
        with pytest.raises(ValueError, match=r"type 0 in token_type_ids .* got \[1\]"):
            patcher.generate(ids, token_type_ids=torch.ones_like(ids), **GREEDY)
