"""Generation and `verify` with images in the context, of models with positions of three numbers."""

from typing import Any

import pytest
import torch
import transformers
from support.generation import tokens_of
from support.numeric import noise_limit, replay_error, seeded
from torch import Tensor

from icl_patch import ContextPatcher, metrics, verify
from icl_patch.evaluation import embedded, tiny_models
from icl_patch.generation import region_compiler
from tools import model_types

IMAGE, START, END = 96, 94, 95
KINDS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")


def image_model(kind: str) -> Any:
    """A model of one of KINDS, whose images come as patches of 96 numbers, four for each token."""
    vision = {"num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "depth": 2}
    own = {
        "Qwen2VL": {"hidden_size": 32, "embed_dim": 16, "mlp_ratio": 2, "in_channels": 3},
        "Qwen2_5_VL": {"hidden_size": 16, "out_hidden_size": 32},
        "Qwen3VL": {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    }[kind]
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**tiny_models._COMMON, "num_hidden_layers": 2, "rope_parameters": rope}
    ids = {"image": IMAGE, "video": 93, "vision_start": START, "vision_end": END}
    settings = {f"{name}_token_id": number for name, number in ids.items()}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision | own, tie_word_embeddings=False, **settings
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    tiny_models.randomise(model)
    # it never chooses a token that stands for a part of an image
    model.lm_head.weight.data[90:] = 0
    return model.eval()


ONE = [5, START, *[IMAGE] * 4, END, 6]
LONGER = [7, 8, START, *[IMAGE] * 8, END, 9]


def images(batch: str) -> dict[str, Tensor]:
    """A processor's output for a row with an image of 2 x 2 tokens, which take two positions;
    "ragged": with padding before it, and beside another row with one of 2 x 4 tokens.
    """
    alone = batch == "one"
    ids = torch.tensor([ONE] if alone else [[0] * 5 + ONE, LONGER])
    grid = torch.tensor([[1, 4, 4]] if alone else [[1, 4, 4], [1, 4, 8]])
    patches = int(grid.prod(1).sum())
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(patches, 96, generator=seeded(0)),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def generated(model: Any, inputs: dict[str, Any]) -> Any:
    """The model's own tokens and logits."""
    return model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)


# each update and mode once
WAYS: list[Any] = [("Qwen2VL", "ragged", ["stable two_pass", "exact shared_cache"])]
WAYS += [("Qwen2VL", "one", ["stable two_stream"])]
WAYS += [("Qwen2VL", "ragged", ["stable two_stream compiled", "stable shared_cache compiled"])]
WAYS += [("Qwen2_5_VL", "ragged", ["stable shared_cache", "exact two_pass"])]
WAYS += [("Qwen3VL", "ragged", ["direct two_stream", "exact shared_cache"])]


@pytest.mark.parametrize(("kind", "batch", "ways"), WAYS)
def test_generates_as_the_model_with_its_images(
    kind: str, batch: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traced graphs of compiled steps run as they are, which shows their positions."""
    monkeypatch.setattr(region_compiler, "BACKEND", "eager")
    model, inputs = image_model(kind), images(batch)
    own = generated(model, inputs)
    other = generated(model, inputs | {"pixel_values": -inputs["pixel_values"]})
    assert metrics.linf(other.logits[0], own.logits[0]).max() > 0.01  # the image matters
    limit = noise_limit(model, inputs["input_ids"])
    for way in ways:
        update, mode, *compiled = way.split()
        with ContextPatcher(model, update) as patcher:
            steps = list(patcher.generate(**inputs, **GREEDY, mode=mode, compile=bool(compiled)))
            for step, expected in zip(steps, own.logits, strict=True):
                assert metrics.linf(step.logits, expected).max() <= limit, way
                assert replay_error(patcher, step).max() <= limit, way
                assert step.mode == mode
            assert torch.equal(
                tokens_of(steps), own.sequences[:, inputs["input_ids"].shape[1] :]
            ), way


@pytest.mark.parametrize(("kind", "keep_last"), zip(KINDS, (0, 1, 0), strict=True))
def test_verify_replays_behind_images(kind: str, keep_last: int) -> None:
    model, inputs = image_model(kind), images("ragged")
    options = {"max_new_tokens": 4, "keep_last": keep_last}
    report = verify(model, embedded.load()[1], context=inputs, **options)
    own = generated(model, inputs).sequences[:, inputs["input_ids"].shape[1] :][:, :4]
    assert report.passed and report.bit_identical == 1
    assert [step.token_id for step in report.steps] == own.flatten().tolist()


def test_images_without_the_types_of_their_tokens_are_refused() -> None:
    model, inputs = image_model("Qwen2VL"), images("one")
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
    refusal = pytest.raises(ValueError, match="expected no token_type_ids for GPT2LMHeadModel")
    with ContextPatcher(tiny_models.build("gpt2"), "stable") as patcher, refusal:
        patcher.generate(ids, token_type_ids=torch.zeros_like(ids), **GREEDY)
    model = model_types.build("bert", {})
    own = generated(model, {"input_ids": ids}).sequences[:, ids.shape[1] :]
    with ContextPatcher(model, "stable") as patcher:
        steps = patcher.generate(ids, token_type_ids=torch.zeros_like(ids), **GREEDY)
        assert torch.equal(tokens_of(steps), own)
        with pytest.raises(ValueError, match=r"type 0 in token_type_ids .* got \[1\]"):
            patcher.generate(ids, token_type_ids=torch.ones_like(ids), **GREEDY)
