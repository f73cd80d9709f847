"""The experiments of Goldwaser et al.: what is measured is what is meant, the quick form runs, and
the committed results hold.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path

import goldwaser
import goldwaser_experiments as experiments
import goldwaser_shapes as shapes
import numpy as np
import pytest
import torch
from goldwaser_experiments import LAZY, MERGED, VARIANTS
from support.generation import own_steps
from support.numeric import UNIT, noise_limit
from support.random_models import build, tokens

from icl_patch import ContextPatcher, metrics
from icl_patch.evaluation.baseline import BaselineRun

RESULTS = Path(__file__).parents[2] / "docs" / "papers"

# -- the vision model's task


def test_answers_name_what_is_drawn() -> None:
    rng = random.Random(0)
    for _ in range(20):
        scene = shapes.Scene.sample(rng, held_out=True)
        image, half = scene.draw(rng), shapes.SIDE // 2
        assert image.shape == (shapes.SIDE, shapes.SIDE, 3) and image.dtype == np.uint8
        for place, cell in enumerate(shapes.CELLS):
            part = image[place // 2 * half :][:half, place % 2 * half :][:, :half].reshape(-1, 3)
            [drawn] = {tuple(pixel) for pixel in part.tolist()} - {(0, 0, 0)}
            [colour] = [name for name, value in shapes.COLOURS.items() if value == drawn]
            assert scene.answer(f"{cell} ?").split()[:2] == ["a", colour]
        assert scene.answer(shapes.EVERYTHING).split(" , ") == [
            scene.answer(f"{cell} ?").removesuffix(" .") + " ." * (cell == shapes.CELLS[-1])
            for cell in shapes.CELLS
        ]


def test_inputs_are_those_of_gemma_3_and_the_loss_is_on_the_answers() -> None:
    processor, rng = shapes.build_processor(), random.Random(2)
    image = shapes.held_out_scenes(1)[0].draw(rng)
    inputs = shapes.encode(processor, [image], [shapes.EVERYTHING])
    pixels = torch.from_numpy(image).permute(2, 0, 1) / 127.5 - 1
    assert (inputs["pixel_values"][0] - pixels).abs().max() <= 4 * UNIT[torch.float32]
    of_image = inputs["input_ids"][inputs["token_type_ids"].bool()].tolist()
    assert of_image == [processor.tokenizer.image_token_id] * shapes.IMAGE_TOKENS
    assert "pixel_values" not in shapes.encode(processor, None, [shapes.EVERYTHING])
    inputs, weights = shapes._batch(processor, rng, 4)
    for ids, own, mask in zip(inputs["input_ids"], weights, inputs["attention_mask"], strict=True):
        counted = processor.tokenizer.decode(ids[own == 1]).split()
        assert set(counted) <= {"a", ",", ".", *shapes.COLOURS, *shapes.SHAPES}
        assert counted.count(".") == shapes._ASKED
        assert not own[mask == 0].any()


# -- how patches are held


@pytest.fixture(scope="module")
def held() -> Iterator[tuple]:
    """An untouched model, a patcher on its copy, and a stable patch of one token a row."""
    plain = build("gemma3")
    with ContextPatcher(copy.deepcopy(plain), "stable") as patcher:
        yield plain, patcher, patcher.compute(tokens(0, 2, 7), tokens(1, 2, 1))


def test_merged_weights_give_the_patched_logits_and_are_put_back(held: tuple) -> None:
    plain, _, patch = held
    before = copy.deepcopy(plain.state_dict())
    logits = experiments.merged_logits(plain, patch)
    assert metrics.linf(logits, patch.logits[:, -1]).max() <= noise_limit(plain)
    assert metrics.linf(plain(patch.kept_ids).logits[:, -1], patch.logits[:, -1]).min() > 0.1
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


def test_exact_patches_held_as_vectors_are_bit_identical_and_rounding_costs_bits() -> None:
    model = build("gemma3", dtype=torch.bfloat16)
    ids = tokens(3, 2, 9)
    mask = torch.ones_like(ids, dtype=torch.bool)
    logits = torch.stack(list(own_steps(model, ids, mask, 3)), 1)
    run = BaselineRun(
        ids, mask, {}, 0, 0, logits, logits.argmax(-1), torch.tensor([logits.shape[1]])
    )
    variants = {name: VARIANTS[name] for name in (LAZY, MERGED)}
    errors = experiments.measure(model, "exact", run, variants)
    assert errors[LAZY].shape == (2, 3, 3)
    assert (errors[LAZY] == torch.tensor([1.0, 0, 0])).all()
    assert (errors[MERGED][..., 1] > 0).all()


# -- the command


def check(folder: Path) -> None:
    """What holds at any size: lazily held exact patches are bit-identical, whatever stands in the
    context; and the page is that of the numbers.
    """
    page = goldwaser.PAGE
    numbers = page.read(folder)
    assert page.text(numbers) == (folder / f"{page.name}.md").read_text()
    assert (folder / "goldwaser-5.png").read_bytes().startswith(b"\x89PNG")
    for found in numbers.values():
        for curve in found.get("curves", []):
            assert len(curve["tokens"]) == len(curve["match"]) == len(curve["linf"])
            if (curve["update"], curve["held"]) == ("exact", LAZY):
                assert all(curve["match"]) and not any(curve["linf"])
        for group in found["groups"]:
            if group["update"] == "exact" and group.get("held", LAZY) == LAZY:
                assert group["token_match"] == group["linf"]["zero"] == 1


@pytest.mark.stress  # test_papers.py has the quick form of an experiment
def test_the_quick_form_writes_pictures_numbers_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert goldwaser.main(["--quick", "--out", "out"]) == 0
    check(tmp_path / "out")


def committed(name: str) -> dict:
    return json.loads((RESULTS / f"goldwaser-{name}.json").read_text())


def test_committed_results_are_of_full_size_and_say_what_they_show() -> None:
    check(RESULTS)
    sizes = json.loads(json.dumps(goldwaser.asdict(experiments.FULL)))
    assert all(committed(name)["sizes"] == sizes for name in ("5", "held"))


def test_committed_answers_need_the_image() -> None:
    found = committed("5")
    for shares in found["answers_right"].values():
        assert shares["with_image"] >= 0.75
        assert max(shares["with_another_image"], shares["without_image"]) <= shares["chance"] + 0.1
    assert all(group["replay_right"] >= 0.75 for group in found["groups"])


def test_committed_numbers_show_what_moves_bf16() -> None:
    groups = [x for x in committed("held")["groups"] if x["dtype"] == "bfloat16"]
    shares = {(group["update"], group["held"]): group["token_match"] for group in groups}
    assert shares["direct", MERGED] < 0.9 < shares["stable", MERGED] and shares["exact", LAZY] == 1
