"""Models that are split over processes: every rank has the bits of one process, and what one rank
refuses, all refuse.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.optional import imported
from support.ranks import CONTEXT, KEEP_FIRST, KEPT, TIMEOUT, bits_of, launch, updates_of
from transformers import AutoModelForCausalLM

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.evaluation import tiny_models

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
# of as few blocks as give one of two ranks several
FAMILIES: dict[str, dict] = {
    "gemma3": {"num_hidden_layers": 3, "layer_types": KINDS},
    "llama": {"num_hidden_layers": 2},
}

DIVISIBLE = {"num_key_value_heads": 4, "vocab_size": 100}  # by four ranks


def folders(path: Path, families: dict[str, dict], **changes: Any) -> list[str]:
    imported("accelerate")  # which transformers asks for
    for family, own in families.items():
        tiny_models.build(family, **own, **changes).save_pretrained(path / family)
    return [str(path / family) for family in families]


def check_bits(said: list[list[Any]], saved: list[str], file: Path) -> None:
    """Each rank said what one process computes."""
    cases = [(folder, update) for folder in saved for update in updates_of(folder)]
    for place, (folder, update) in enumerate(cases):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        expected = bits_of(model, update, file)
        for rank in said:
            assert rank[place] == expected, (folder, update)


def test_two_ranks(tmp_path: Path) -> None:
    """In two processes, which take longer to start than to run."""
    saved = folders(tmp_path, FAMILIES)
    shared = folders(tmp_path / "shared", FAMILIES, **DIVISIBLE)
    of_one = made_by_one(shared)
    said = launch(2, "everything", *saved, *shared)
    cases = [(folder, update) for folder in saved for update in updates_of(folder)]
    check_bits(said, saved, tmp_path / "file")
    check_shared(2, of_one, [rank[len(cases) :] for rank in said])
    check_refusals(*(rank[len(cases) + len(of_one) :] for rank in said))


def check_refusals(first: list[Any], second: list[Any]) -> None:
    """What the ranks refuse together, and that one says so if the other dies."""
    refusals = [
        ("RankError", "expected the update to be the same on all ranks, got exact on rank 0 and"),
        ("ValueError", "expected update direct, stable, exact, got 'other' (on rank 0)"),
        ("RankError", "expected the same model.embed_tokens.weight on all ranks that have it"),
        ("RankError", "expected the tokens to be the same on all ranks"),
        ("ValueError", "expected at least one kept token, got kept_ids (2, 0) (on rank 1)"),
        ("ValueError", "expected the kept tokens that the patch was computed for"),
        ("RankError", "expected the call to be the same on all ranks, got forward on rank 0"),
        ("ControllabilityError", "model.layers.2, row 0, kept token 0: the input h of mlp.down"),
        ("ControllabilityError", "model.layers.2, row 0, kept token 0: the input h of mlp.down"),
        (
            "UnsupportedModelError",
            "compile does not cover Gemma3ForCausalLM: models split over processes",
        ),
        ("ValueError", "expected an attached patcher, this one has been detached (on rank 0)"),
    ]
    assert len(second) == len(refusals) + 1 and second[-1] == "ends"
    for one, other, (kind, text) in zip(first, second, refusals, strict=False):
        assert one == other and one[0] == kind and one[1].startswith(text), one
    kind, text, seconds = first[len(refusals)]
    assert kind == "RankError" and text.startswith("a rank does not answer: it has ended, or")
    assert seconds < 6 * TIMEOUT
    kind, text = first[len(refusals) + 1]
    assert kind == "RankError" and "have lost each other before (a rank does not answer" in text


def made_by_one(saved: list[str]) -> dict[tuple[str, str], Any]:
    """Patches and tokens of one process, in the order in which ranks say theirs."""
    of_one: dict[tuple[str, str], Any] = {}
    for folder in saved:
        for update in updates_of(folder):
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            with ContextPatcher(model, update) as patcher:
                patch = patcher.compute(CONTEXT, KEPT, keep_first=KEEP_FIRST)
                patch.save(f"{folder}/{update}.safetensors")
                steps = list(patcher.generate(CONTEXT, max_new_tokens=3))
                tokens = [step.token_ids.tolist() for step in steps]
            of_one[folder, update] = patch, tokens
    return of_one


def check_shared(count: int, of_one: dict[tuple[str, str], Any], said: list[list[Any]]) -> None:
    """What ranks that share a model's matrices said, against one process."""
    for number, (folder, update) in enumerate(of_one):
        words = [rank[number] for rank in said]
        if update == "exact":
            assert all(word == words[0] for word in words), words
            assert words[0][0] == "UnsupportedModelError"
            assert "the bits of a sum over ranks depend on their number" in words[0][1]
            continue
        word, (patch, tokens) = words[0], of_one[folder, update]
        assert all(other["factors"] == word["factors"] for other in words)
        assert all(other["tokens"] == tokens for other in words)
        assert word["replay"] < 1e-5
        own, ours = word["reduced"]
        assert own == ours  # a replay sums over the ranks what the model does
        assert word["applied"] < 1e-5
        *some_parts, in_compute, in_step = word["dead"]
        assert all(kind == "nothing" for kind, _ in some_parts), some_parts
        if "mlp.down_proj.u" in patch.layers[0]:
            refused = "model.layers.0, row 0, kept token 0: the input h of mlp.down_proj is 0"
            for kind, text in (in_compute, in_step):
                assert kind == "ControllabilityError" and text.startswith(refused), text
        if update == "direct" and not patch.info.divisible:  # a change of the scale alone
            assert word["of_one"].startswith(f"expected a patch of a model with tp_size={count}")
        else:
            assert word["of_one"] < 1e-5
        written = ContextPatch.load(f"{folder}/{update}-{count}.safetensors", None)
        assert written.info.tensor_parallel == count
        for layer, expected in zip(written.layers, patch.layers, strict=True):
            assert layer.keys() == expected.keys()
            for name, factor in layer.items():
                torch.testing.assert_close(factor, expected[name], rtol=2e-3, atol=2e-4)


@pytest.mark.stress
def test_matrices_shared_by_four_ranks(tmp_path: Path) -> None:
    saved = folders(tmp_path, {"gemma2": {}, "qwen2": {}}, **DIVISIBLE)
    of_one = made_by_one(saved)
    check_shared(4, of_one, launch(4, "tensor_parallel", *saved))


@pytest.mark.stress
@pytest.mark.parametrize("count", [3, 4])
def test_several_ranks(count: int, tmp_path: Path) -> None:
    families = (*FAMILIES, "granite", "qwen3_moe", "olmo3")
    saved = folders(tmp_path, {family: {} for family in families})
    check_bits(launch(count, "bits", *saved), saved, tmp_path / "file")
