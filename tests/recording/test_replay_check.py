"""Replays where numbers round otherwise than where the patch was made: said, and refused if the
patch has become another one.

Batch-invariant products stand for another processor: they add up in another order.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numeric import replay_limit
from support.patchers import updates
from support.random_models import case, shallow, tokens
from torch import Tensor

from icl_patch import ContextPatch, ContextPatcher, metrics
from icl_patch.analysis.steering import in_rome_form
from icl_patch.analysis.transfer import on_other_weights
from icl_patch.errors import ExactnessWarning, ReplayMismatch
from icl_patch.patch.logit_digest import LogitDigest
from icl_patch.tolerances import rounding_limit

IDS, KEPT = tokens(3, 2, 9), tokens(4, 2, 5)


def loaded(patch: ContextPatch, folder: Path, patcher: ContextPatcher) -> ContextPatch:
    """The patch from its file."""
    patch.save(folder / "patch.safetensors")
    return ContextPatch.load(folder / "patch.safetensors", patcher.model)


def elsewhere(patch: ContextPatch) -> ContextPatch:
    """The patch, to be replayed with products that round otherwise."""
    return replace(patch, info=replace(patch.info, arithmetic="batch_invariant"))


def silent(patcher: ContextPatcher, patch: ContextPatch) -> Tensor:
    """The logits of a replay that says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return patcher.forward(patch.kept_ids, patch)


def changed(patch: ContextPatch, factor: float, place: Any = ...) -> tuple[dict[str, Tensor], ...]:
    """The factors with the output of the last block multiplied, at some tokens."""
    *layers, last = ({name: x.clone() for name, x in layer.items()} for layer in patch.layers)
    last["mlp.down_proj.u"][place] *= factor
    return (*layers, last)


def another(patch: ContextPatch, factor: float, place: Any = ...) -> ContextPatch:
    """A patch whose replay is not the one that its digest is of."""
    return replace(patch, layers=changed(patch, factor, place)).with_digest(patch.digest)


# -- what is said


@updates
def test_only_an_exact_patch_promises_its_bits(update: str, tmp_path: Path) -> None:
    with ContextPatcher(shallow("llama"), update) as patcher:
        computed = patcher.compute(**case("prefix"))
        patch = loaded(computed, tmp_path, patcher)
        here, mask = silent(patcher, patch), patch.kept_mask
        assert torch.equal(here, silent(patcher, computed))
        says: Any = nullcontext()
        if update == "exact":
            assert torch.equal(here[mask], computed.logits[mask])
            message = r"other bits than where it was made.* 15 of 15 tokens, .* row 0, kept token 0"
            says = pytest.warns(ExactnessWarning, match=message)
        for there in (patch, computed):
            with says:
                logits = patcher.forward(patch.kept_ids, elsewhere(there))
            off = metrics.linf(logits, here)[mask]
            assert 0 < off.max() <= replay_limit(patcher, computed)


# -- what is refused


def magnifying() -> tuple[Any, dict[str, Tensor]]:
    """A model of the first block's norm after the MLP reads a number near 0, for one kept token,
    and the arguments of ``compute``: a direct patch divides by that number, which is all rounding.
    """
    model, arguments = shallow("gemma3"), {"context_ids": IDS[:1], "kept_ids": KEPT[:1, :1]}
    down, inputs = model.model.layers[0].mlp.down_proj, []
    hook = down.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    with torch.no_grad():
        model(torch.cat(list(arguments.values()), 1), use_cache=False)
        hook.remove()
        h = inputs[0][0, -1].double()
        for row in down.weight[:8]:
            row -= ((1 - 4e-6) * (row.double() @ h) / (h @ h) * h).to(row)
    return model, arguments


def test_a_direct_patch_that_has_become_another(tmp_path: Path) -> None:
    model, arguments = magnifying()
    with ContextPatcher(model, "direct") as patcher:
        patch = loaded(patcher.compute(**arguments), tmp_path, patcher)
        here = silent(patcher, patch)
        logits = patcher.attached_model.replay_logits(elsewhere(patch))
        assert metrics.linf(logits, here).max() > rounding_limit(torch.float32)
        message = "direct patch.* 1 of 1 tokens, .*take update='stable' or 'exact'"
        with pytest.raises(ReplayMismatch, match=message):
            patcher.forward(patch.kept_ids, elsewhere(patch))
    with ContextPatcher(model, "stable") as patcher:  # as the message says
        silent(patcher, elsewhere(loaded(patcher.compute(**arguments), tmp_path, patcher)))


@pytest.mark.parametrize("update", ["stable", "exact"])
def test_a_patch_that_gives_other_tokens(update: str, tmp_path: Path) -> None:
    """One token in fp32; in bf16, where rounding can do that, most tokens of a row."""
    for dtype, place in ((torch.float32, (0, 3)), (torch.bfloat16, (0, slice(3)))):
        with ContextPatcher(shallow("llama", 0, dtype), update) as patcher:
            patch = loaded(patcher.compute(IDS, KEPT), tmp_path, patcher)
            message = (
                rf"this {update} patch.*others, off by at least .*Compute the patch again here"
            )
            with pytest.raises(ReplayMismatch, match=message):
                patcher.forward(KEPT, another(patch, -30, place))
            silent(patcher, patcher.compute(IDS, KEPT))
            silent(patcher, replace(another(patch, -30, place), digest=None))


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.1), (torch.bfloat16, -30)], ids=str
)
def test_some_tokens_beyond_rounding_are_said(
    dtype: torch.dtype, factor: float, tmp_path: Path
) -> None:
    with ContextPatcher(shallow("llama", 0, dtype), "stable") as patcher:
        patch = loaded(patcher.compute(IDS, KEPT), tmp_path, patcher)
        message = (
            r"other logits at some tokens .*2 of 10 tokens, the first being row 0, kept token 2"
        )
        with pytest.warns(ExactnessWarning, match=message):
            patcher.forward(KEPT, another(patch, factor, (0, slice(2, 4))))


# -- what is not the same replay, and must not be refused


def other_tokens(patch: ContextPatch) -> ContextPatch:
    return replace(patch, kept_ids=patch.kept_ids.flip(1))


def in_place(patch: ContextPatch) -> ContextPatch:
    patch.layers[-1]["mlp.down_proj.u"].mul_(-30)
    return patch


def in_the_dictionary(patch: ContextPatch) -> ContextPatch:
    patch.layers[-1].update(changed(patch, -30)[-1])
    return patch


CHANGES: dict[str, Callable[[ContextPatch], ContextPatch]] = {
    "other factors": lambda patch: replace(patch, layers=changed(patch, -30)),
    "factors written to": in_place,
    "factors exchanged": in_the_dictionary,
    "other tokens": other_tokens,
}


@updates
def test_a_changed_patch_is_another(update: str, tmp_path: Path) -> None:
    """Before it is saved, and after."""
    with ContextPatcher(shallow("llama"), update) as patcher:
        for change in CHANGES.values():
            before = loaded(change(patcher.compute(IDS, KEPT)), tmp_path, patcher)
            assert before.digest is None
            after = change(loaded(patcher.compute(IDS, KEPT), tmp_path, patcher))
            assert torch.equal(silent(patcher, before), silent(patcher, after))


def test_other_vectors_and_other_weights_are_other_patches(tmp_path: Path) -> None:
    with ContextPatcher(shallow("llama"), "stable") as patcher:
        patch = loaded(patcher.compute(IDS, KEPT), tmp_path, patcher)
        rome = in_rome_form(patch, [{} for _ in patch.layers])
        assert rome.digest is None
    with ContextPatcher(shallow("llama", 1), "stable") as patcher:
        silent(patcher, on_other_weights(patch, patcher))


@pytest.mark.parametrize("update", ["stable", "exact"])
def test_a_part_promises_no_bits(update: str, tmp_path: Path) -> None:
    """A row or the first tokens, cut in memory or after the patch was loaded, and saved again;
    other tokens are still refused.
    """
    with ContextPatcher(shallow("llama"), update) as patcher:
        computed = patcher.compute(IDS, KEPT)
        whole, row = loaded(computed, tmp_path, patcher), computed.select(rows=slice(1, 2))
        assert row.info.replayable and torch.equal(row.kept_ids, KEPT[1:])
        assert torch.equal(row.logits, computed.logits[1:])
        assert torch.equal(row.report.reader_error, computed.report.reader_error[:, 1:])
        for cut in (row, whole.select(tokens=slice(3))):
            for patch in (cut, loaded(cut, tmp_path, patcher)):
                assert patch.digest is not None and patch.replay_digest.bits is None
                silent(patcher, patch)
                silent(patcher, elsewhere(patch))
                with pytest.raises(ReplayMismatch):
                    patcher.forward(patch.kept_ids, another(patch, -30))
        assert computed.select(tokens=slice(1, None)).digest is None


def test_copies_keep_their_promise(tmp_path: Path) -> None:
    """They hold tensors, no model."""
    with ContextPatcher(shallow("llama")) as patcher:
        computed = patcher.compute(IDS, KEPT)
        for patch in (computed, loaded(computed, tmp_path, patcher)):
            parts = patch.select(slice(2), slice(5)), patch.to("cpu")
            copies = copy.copy(patch), copy.deepcopy(patch), pickle.loads(pickle.dumps(patch))
            assert all(again.weights is None for again in copies)
            for again in (*parts, *copies):
                silent(patcher, again)
                with pytest.warns(ExactnessWarning, match="10 of 10 tokens"):
                    patcher.forward(KEPT, elsewhere(again))


# -- decode steps


@pytest.mark.parametrize("mode", ["two_pass", "shared_cache"])
def test_steps_of_which_rows_have_ended(mode: str, tmp_path: Path) -> None:
    """Nothing is known of a row that had ended; the others have all their bits."""
    model = shallow("llama")
    with ContextPatcher(model) as patcher:
        first = next(patcher.generate(IDS, max_new_tokens=1, mode=mode, eos_token_id=None))
        ends = {"eos_token_id": int(first.token_ids[0]), "pad_token_id": 0}
        steps = list(patcher.generate(IDS, max_new_tokens=3, mode=mode, **ends))
        patch = loaded(steps[-1].patch, tmp_path, patcher)
        assert steps[-1].live.tolist() == [False, True]
        assert patch.digest is not None and patch.digest.known.tolist() == [[False], [True]]
        assert torch.equal(silent(patcher, patch)[1, -1], steps[-1].logits[1])
        row = patch.select(rows=slice(1, 2))
        assert (row.digest.bits is not None) == (mode == "shared_cache")
        silent(patcher, row)


def test_a_step_without_logits_has_no_digest(tmp_path: Path) -> None:
    with ContextPatcher(shallow("llama"), "stable") as patcher:
        step = next(patcher.generate(IDS, max_new_tokens=1, mode="shared_cache"))
        patch = loaded(step.patch, tmp_path, patcher)
        assert patch.digest is None
        silent(patcher, patch)
        logits = patcher.forward(patch.kept_ids, patch)
        of_replay = LogitDigest.of(logits, patch.kept_mask, logits.dtype, identical=False)
        silent(patcher, loaded(patch.with_digest(of_replay), tmp_path, patcher))
