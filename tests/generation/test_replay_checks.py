"""The promise of an exact update is measured: replays that differ, and slower steps, are said."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.random_models import shallow, tokens

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.errors import (
    ExactnessWarning,
    PatchFormatError,
    SlowerStepsWarning,
    UnsupportedModelError,
)
from icl_patch.generation import one_pass_plan
from icl_patch.recording import block_math

IDS, KEPT = tokens(3, 2, 9), tokens(4, 2, 3)


def plant(monkeypatch: pytest.MonkeyPatch, layer_calls: slice = slice(None)) -> None:
    """From now on closing a block chooses factors that are off, and does not notice."""
    close, calls = block_math.close, []

    def off(*args: object, **kwargs: object) -> block_math.Closed:
        calls.append(None)
        closed = close(*args, **kwargs)
        wrong = len(calls) in range(*layer_calls.indices(len(calls) + 1))
        return closed._replace(factor=1.01 * closed.factor) if wrong else closed

    monkeypatch.setattr(block_math, "close", off)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("gemma3", torch.bfloat16)], ids=str
)
def test_an_exact_patch_that_is_not_is_said(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``compute``, and by ``generate`` of its first step, in one pass and in two."""
    ways: dict = {"shared_cache": 1, "two_pass": 2}
    options: dict = {"max_new_tokens": 3, "eos_token_id": None}
    with ContextPatcher(shallow(family, 0, dtype)) as patcher:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            patch = patcher.compute(IDS, KEPT)
            for mode, passes in ways.items():
                steps = list(patcher.generate(IDS, mode=mode, **options))
                assert {step.patch.passes for step in steps} == {passes}
        assert patch.report.misses.sum() == 0
        plant(monkeypatch)
        with pytest.warns(ExactnessWarning, match="6 of 6 tokens.*row 0, kept token 0"):
            patch = patcher.compute(IDS, KEPT)
        assert patch.report.misses[0].min() > 0
        assert not torch.equal(patcher.attached_model.replay_logits(patch), patch.logits)
        message = "step 1 of this generation is not exact: at 2 of 2"
        for mode in ways:
            with pytest.warns(ExactnessWarning, match=message):
                next(patcher.generate(IDS, mode=mode, eos_token_id=None))


def test_misses_are_those_of_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose factor is off makes all later blocks differ, which closing cannot see."""
    with ContextPatcher(shallow("llama")) as patcher:
        plant(monkeypatch, slice(2, 3))  # the second of two blocks alone
        with pytest.warns(ExactnessWarning, match="not exact"):
            patch = patcher.compute(IDS, KEPT)
        monkeypatch.undo()
        right = patcher.compute(IDS, KEPT)
        outputs = [block.output for block in patcher.attached_model.replay(right)[1]]
        replayed = [block.output for block in patcher.attached_model.replay(patch)[1]]
        differing = [(x != y).sum(-1) for x, y in zip(outputs, replayed, strict=True)]
    assert torch.equal(patch.report.misses, torch.stack(differing))
    assert patch.report.misses[0].sum() == 0
    assert patch.report.misses[1].min() > 0


SLOWER = [("exact", "in two passes", "two_pass", ("SharedCacheStreams", "TwoStreams"))]
SLOWER += [("stable", "with rows of both streams", "two_stream", ("SharedCacheStreams",))]


@pytest.mark.parametrize(("update", "time", "mode", "layouts"), SLOWER)
def test_slower_steps_are_said_with_the_reason(
    update: str, time: str, mode: str, layouts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def refuse(model: object, _blocks: object, **_: object) -> None:
        refused.append(model)
        raise UnsupportedModelError("this model is planted")

    for layout in layouts:
        monkeypatch.setattr(one_pass_plan, layout, refuse)
    arguments: dict = {"max_new_tokens": 1, "eos_token_id": None}
    with ContextPatcher(shallow("llama"), update) as patcher:
        with pytest.raises(ValueError, match="planted"):
            list(patcher.generate(IDS, mode="shared_cache", **arguments))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(patcher.generate(IDS, mode=mode, **arguments))  # who asks for it knows
        with pytest.warns(SlowerStepsWarning, match=f"{update} steps run {time}.*planted"):
            steps = list(patcher.generate(IDS, **arguments))
            list(patcher.generate(IDS, **arguments))
        assert steps[0].mode == mode
    assert len(refused) == len(layouts)  # a refusal is remembered, as a plan is


def test_a_file_of_misread_blocks_is_refused(tmp_path: Path) -> None:
    """Versions that fitted a block's numbers wrote them into the file."""
    with ContextPatcher(shallow("llama")) as patcher:
        patch = patcher.compute(IDS, KEPT)
        first, *others = patch.blocks
        nearly = replace(first, spec=replace(first.spec, residual_multiplier=1 + 2.0**-41))
        patcher.forward(KEPT, replace(patch, blocks=(nearly, *others)))  # measured elsewhere
        wrong = replace(first, spec=replace(first.spec, residual_multiplier=1.0023))
        replace(patch, blocks=(wrong, *others)).save(tmp_path / "patch.safetensors")
        loaded = ContextPatch.load(tmp_path / "patch.safetensors", patcher.model)
        refused = r"residual_multiplier 1\.0 in model\.layers\.0, got one with 1\.0023: compute"
        with pytest.raises(PatchFormatError, match=refused):
            patcher.forward(KEPT, loaded)
        with pytest.raises(PatchFormatError, match=refused), patcher.applied(loaded):
            pass
        patch.save(tmp_path / "right.safetensors")
        right = ContextPatch.load(tmp_path / "right.safetensors", patcher.model)
        assert torch.equal(patcher.forward(KEPT, right), patch.logits)
