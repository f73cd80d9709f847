"""Patched modules in other loops, and one patch applied to every step."""

import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.numeric import noise_limit
from support.patchers import IDS, KEPT, Snapshot
from support.random_models import build, ragged, shallow, tokens
from torch.func import functional_call

from icl_patch import ContextPatch, ContextPatcher, UnsupportedModelError, metrics

OWN_LOOP = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "generation" / "own_loop.py")
)


def test_the_example_says_that_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert OWN_LOOP["main"]()
    assert capsys.readouterr().out


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "gpt_neox", "gpt_oss"])
def test_the_example_serves_every_form_of_block(family: str) -> None:
    """Its loop gives the tokens that the model chooses with its context."""
    model, ids = stock(family), tokens(7, 1, 6)
    model.generation_config.eos_token_id = None
    new = OWN_LOOP["NEW_TOKENS"]
    expected = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
    assert torch.equal(OWN_LOOP["own_loop"](model, ids), expected[:, ids.shape[1] :])


APPLIED = [("gemma3", "direct"), ("gemma3", "stable"), ("gemma3", "exact"), ("llama-tied", "exact")]
APPLIED += [("gpt2", "stable"), ("gpt_neox", "direct")]


@pytest.mark.parametrize(("family", "update"), APPLIED)
def test_an_applied_patch_is_its_tokens_change(family: str, update: str) -> None:
    """On its own token the changed weights give the context's logits; on others, those of the
    materialised weights.
    """
    model = stock(family)
    before = Snapshot(model)
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(tokens(5, 2, 7), tokens(6, 2, 1))
        for row in (0, 1):
            with patcher.applied(patch, row=row) as changed, torch.no_grad():
                one = slice(row, row + 1)
                token, place = patch.kept_ids[one], {"position_ids": patch.position_ids[one]}
                alone = changed(token, **place, use_cache=False).logits
                # of the changed weights: a direct update divides by activations, and magnifies what
                # they are off by
                limit, limit_elsewhere = (
                    noise_limit(changed, token, **place),
                    noise_limit(changed, IDS),
                )
                greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
                generated = changed.generate(IDS, attention_mask=torch.ones_like(IDS), **greedy)
                elsewhere = changed(IDS).logits
            assert metrics.linf(alone[:, -1], patch.logits[row, -1:]).max() <= limit
            assert generated.shape[1] > IDS.shape[1]
            changes = dict(patch.weight_changes(row, 0))
            state = {name: value.clone() for name, value in before.state.items()}
            for name, change in changes.items():
                state.setdefault(name, torch.zeros_like(change)).add_(change)
            with torch.no_grad():
                called = functional_call(stock(family), state, (IDS,), tie_weights=False)
            assert metrics.linf(elsewhere, called.logits).max() <= limit_elsewhere
        assert not torch.equal(elsewhere, before.logits)
    before.check(model)


def stock(family: str) -> torch.nn.Module:
    return build(family, 2) if family in ("gemma3", "llama", "llama-tied") else shallow(family, 2)


def test_a_token_is_chosen_and_bad_choices_are_named(tmp_path: Path) -> None:
    model = build("llama")
    kept = ragged(2, 3, side="right")  # rows of 3 and 1 tokens
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(IDS, KEPT, kept_mask=kept)
        patch.save(tmp_path / "patch.safetensors")
        loaded = ContextPatch.load(tmp_path / "patch.safetensors", model)
        found = []
        for given, row, token in ((patch, 1, 0), (loaded, 1, -1), (patch, 0, -1), (patch, 0, 2)):
            with patcher.applied(given, row=row, token=token), torch.no_grad():
                found.append(model(IDS).logits)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[2], found[3])
        assert not torch.equal(found[0], found[2])
        for arguments, message in (
            ({"row": 2}, "a row and a token of 2 x 3, got 2 and -1"),
            ({"token": 3}, "a row and a token of 2 x 3, got 0 and 3"),
            ({"row": 1, "token": 1}, "kept token of row 1, which has 1, got padding"),
            ({"row": 1, "token": -2}, "kept token of row 1, which has 1, got padding"),
        ):
            with pytest.raises(ValueError, match=message), patcher.applied(patch, **arguments):
                pass
        refusal = pytest.raises(ValueError, match="all its layers")
        with refusal, patcher.applied(patch.select(layers=slice(1, 3))):
            pass
        with patcher.applied(patch):
            for call in (
                lambda: patcher.compute(IDS, KEPT),
                lambda: patcher.generate(IDS),
                lambda: patcher.applied(patch).__enter__(),
            ):
                with pytest.raises(ValueError, match="without an applied patch"):
                    call()
        with pytest.raises(ZeroDivisionError), patcher.applied(patch):
            _ = 1 / 0
        again = patcher.compute(IDS, KEPT, kept_mask=kept)
        assert torch.equal(again.layers[0]["readers.v"], patch.layers[0]["readers.v"])


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_every_token_gets_its_own_change_in_one_call(family: str) -> None:
    """Of several rows and tokens; calls on others are refused, and the cure works. A change of
    experts is none of other tokens.
    """
    model = stock(family)
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(tokens(5, 2, 7), tokens(6, 2, 3))
        with patcher.applied(patch, token=None) as changed:
            place = {"position_ids": patch.position_ids}
            logits = changed(patch.kept_ids, **place, use_cache=False).logits
            with pytest.raises(ValueError, match=r"for the 4 rows of this call.*prefill"):
                changed(patch.kept_ids[:, :2], use_cache=False)
        part = patch.select(slice(2), slice(2))
        place = {"position_ids": part.position_ids}
        with patcher.applied(part, token=None) as changed:
            first = changed(part.kept_ids, **place, use_cache=False).logits
        limit = noise_limit(model, tokens(6, 2, 3))
        assert metrics.linf(logits, patch.logits).max() <= limit
        assert metrics.linf(first, patch.logits[:, :2]).max() <= limit
        refused = pytest.raises(ValueError, match=r"expected no row without a token, got 1: patch")
        with refused, patcher.applied(patch, row=1, token=None):
            pass
        refused = pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 has experts")
        with refused if family == "mixtral" else nullcontext(), patcher.applied(patch):
            pass
        replayed = patcher.forward(patch.kept_ids, patch)
        assert torch.equal(replayed.argmax(-1), patch.logits.argmax(-1))
