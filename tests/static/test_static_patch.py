"""Static patches in use: applied, merged, combined, compiled, as files."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.copies import COPIES
from support.patch_files import read, write
from support.random_models import build, shallow
from support.static import CLOSE, IDS, logits, random_examples, random_patch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch import (
    ContextPatch,
    ContextPatcher,
    FingerprintMismatch,
    PatchFormatError,
    detach,
    static,
)
from icl_patch.errors import StaticPatchWarning
from icl_patch.models.forward import cache_in, cache_name
from icl_patch.patch.fingerprints import weight_fingerprint
from icl_patch.static import LowRank, StaticInfo, StaticPatch


@torch.no_grad()
def changed_by_hand(model: nn.Module, patches: dict[float, StaticPatch]) -> Tensor:
    """The logits of a copy whose weights have the changes, times their factors, added in fp64."""
    twin = copy.deepcopy(model)
    for factor, patch in patches.items():
        for path, change in patch.changes.items():
            module = twin.get_submodule(path)
            dense = change.u.double().T @ change.v.double() * factor
            dense = dense.T if isinstance(module, Conv1D) else dense
            module.weight.copy_(module.weight.double() + dense)
    return logits(twin)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "falcon-rw"])
def test_applied_and_merged_are_the_changed_weights(name: str) -> None:
    model = shallow(name)
    patch = random_patch(model, 0)
    if name == "opt":  # its matrices are no children of an MLP module
        path = next(path for path, _ in model.named_modules() if path.endswith("layers.0.fc2"))
        n, k = model.get_submodule(path).weight.shape
        patch = StaticPatch(patch.info, {path: LowRank(torch.randn(2, n), torch.randn(2, k) / k)})
    before, expected = logits(model), changed_by_hand(model, {1.0: patch})
    assert not close(before, expected)
    with patch.applied(model) as changed:
        assert changed is model
        assert close(logits(model), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits(model, IDS[:1, : patch.rank])  # not taken for a change of each token's own
    assert torch.equal(logits(model), before)
    assert patch.merge(model) is model
    assert close(logits(model), expected)
    with pytest.raises(FingerprintMismatch):
        patch.merge(model)


def test_sums_scales_and_means_are_those_of_the_weights() -> None:
    model = build("llama")
    one, other = random_patch(model, 0), random_patch(model, 1, rank=2)
    del other.changes["model.layers.0.mlp.up_proj"]
    cases = {
        one + other: {1.0: one, 1.0 + 1e-9: other},
        2.0 * one: {2.0: one},
        one - 0.5 * other: {1.0: one, -0.5: other},
        static.mean([one, other]): {0.5: one, 0.5 + 1e-9: other},
    }
    for patch, parts in cases.items():
        expected = changed_by_hand(model, parts)
        with patch.applied(model):
            assert close(logits(model), expected)
    assert (one + other).rank == 5
    with pytest.raises(ValueError, match="at least one patch"):
        static.mean([])
    with pytest.raises(FingerprintMismatch, match="expected two patches of one model"):
        _ = one + random_patch(build("llama", seed=1), 0)


def test_truncation_keeps_the_largest_singular_values() -> None:
    model = build("llama")
    whole = random_patch(model, 0) + random_patch(model, 1)
    cut = whole.truncated(2)
    for path, change in whole.changes.items():
        u, s, v = torch.linalg.svd(change.dense(), full_matrices=False)
        error = (cut.changes[path].dense() - (u[:, :2] * s[:2]) @ v[:2]).norm()
        assert error < 8 * torch.finfo(torch.float32).eps * s[0]
    with pytest.raises(ValueError, match="a rank of at least 1"):
        whole.truncated(0)


def test_a_shared_weight_is_not_merged_into() -> None:
    """The embeddings would change with the head, which they do not where the patch is applied."""
    model = build("llama-tied")
    change = {"lm_head": LowRank(torch.ones(1, 97), torch.ones(1, 48))}
    patch = StaticPatch(StaticInfo.of(model, None, "random"), change)
    plain = logits(model)
    with patch.applied(model):
        assert not close(logits(model), plain)
    with pytest.raises(TypeError, match=r"that model\.embed_tokens and lm_head share"):
        patch.merge(model)
    assert torch.equal(logits(model), plain)


def test_weights_that_cannot_be_written_are_not_merged_into() -> None:
    """Those of one module were created in inference mode: no other is changed either."""
    model = build("llama")
    patch, plain = random_patch(model, 0), logits(model)
    last: Any = model.model.layers[2].mlp.down_proj
    with torch.inference_mode():
        last.weight = nn.Parameter(last.weight.clone(), requires_grad=False)
    with pytest.raises(TypeError, match=r"got those of model\.layers\.2\.mlp\.down_proj,"):
        patch.merge(model)
    assert torch.equal(logits(model), plain)
    expected = changed_by_hand(model, {1.0: patch})
    with torch.inference_mode():
        assert close(logits(patch.merge(model)), expected)


def test_patches_that_do_not_fit_change_nothing() -> None:
    model = build("llama")
    patch = random_patch(model, 0)
    block = "model.layers.{}.mlp.down_proj"
    one, narrow = patch.changes[block.format(1)], LowRank(torch.ones(1, 48), torch.ones(1, 71))
    before = weight_fingerprint(model)
    for message, changes in (
        ("expected u and v of widths", {block.format(1): narrow}),
        ("expected modules that the model has", {block.format(9): one}),
    ):
        spoiled = StaticPatch(patch.info, {**patch.changes, **changes})
        with pytest.raises(PatchFormatError, match=message):
            spoiled.merge(model)
        with pytest.raises(PatchFormatError, match=message), spoiled.applied(model):
            pass
    patched = pytest.raises(TypeError, match="patched already")
    with patch.applied(model), patched:
        patch.merge(model)
    with ContextPatcher(model), patched, patch.applied(model):
        pass
    assert weight_fingerprint(model) == before
    with pytest.raises(FingerprintMismatch, match="expected a patch of"):
        patch.merge(build("llama", seed=3))
    with pytest.raises(FingerprintMismatch, match=r"in torch\.bfloat16\), got .* in torch\.f"):
        patch.merge(build("llama").bfloat16())


# -- files


def test_a_file_holds_the_whole_patch(tmp_path: Path) -> None:
    model = build("llama")
    fitted = {"preserve": (), "accept_worse": True, "distillation": static.Distillation(steps=1)}
    with pytest.warns(StaticPatchWarning, match="no texts to preserve"):
        patch = static.fit(model, random_examples(), rank=2, **fitted)
    assert patch.info.front == (1,)
    file = tmp_path / "patch.safetensors"
    patch.save(file)
    loaded = StaticPatch.load(file, model)
    assert loaded.info == patch.info
    assert loaded.report == patch.report
    assert loaded.changes.keys() == patch.changes.keys()
    for path, change in patch.changes.items():
        assert torch.equal(loaded.changes[path].u, change.u)
        assert torch.equal(loaded.changes[path].v, change.v)
    with pytest.raises(FingerprintMismatch):
        StaticPatch.load(file, build("llama", seed=1))
    with pytest.raises(PatchFormatError, match=r"StaticPatch\.load and icl-patch"):
        ContextPatch.load(file)


def test_a_file_is_read_block_by_block(tmp_path: Path) -> None:
    file, numbers = tmp_path / "patch.safetensors", [11, 2, 10, 9, 100, 0]
    paths = [f"layers.{n}.mlp.{name}_proj" for n in numbers for name in ("up", "down")]
    changes = {path: LowRank(torch.ones(1, 2), torch.ones(1, 3)) for path in paths}
    StaticPatch(static.StaticInfo("m", None, None, "f", "test"), changes).save(file)
    assert list(StaticPatch.load(file).changes) == [
        f"layers.{number}.mlp.{name}_proj" for number in sorted(numbers) for name in ("down", "up")
    ]


def test_a_prompt_that_begins_otherwise_is_warned_of_once() -> None:
    model = build("llama")
    patch = random_patch(model, 0)
    patch = replace(patch, info=replace(patch.info, front=(5,)))
    begins, padded = torch.tensor([[5, 6, 7], [5, 8, 9]]), torch.tensor([[0, 5, 6], [5, 8, 9]])
    other = torch.tensor([[5, 6, 7], [6, 8, 9]])
    with patch.applied(model), warnings.catch_warnings():
        warnings.simplefilter("error", StaticPatchWarning)
        cache = cache_in(model(begins, use_cache=True))
        model(torch.tensor([[6], [6]]), **{cache_name(model): cache})  # goes on from a front
        model(torch.tensor([[6], [6]]), None, None, cache)
        model(padded, (padded != 0).long())
        model(input_ids=padded, attention_mask=(padded != 0).long())
        with pytest.raises(StaticPatchWarning, match=r"begin with the token 5, .* begins with 6"):
            model(other)
        model(other)
    with patch.applied(model, check_front=False), warnings.catch_warnings():
        warnings.simplefilter("error", StaticPatchWarning)
        model(other)
    assert not model._forward_pre_hooks
    unknown, else_where = replace(patch.info, front=()), replace(patch.info, front=(6,))
    assert (patch + StaticPatch(unknown, patch.changes)).info.front == (5,)
    assert (patch + StaticPatch(else_where, patch.changes)).info.front == ()


def test_a_copy_of_a_model_with_an_applied_patch_keeps_it_until_it_is_detached() -> None:
    """With weights of its own, and with the check of the front, which ends with the patch."""
    model: Any = build("llama")
    patch = random_patch(model, 0)
    patch, before = replace(patch, info=replace(patch.info, front=(5,))), logits(model)
    with patch.applied(model):
        copies = [copied(model) for copied in COPIES]
        expected = logits(model, torch.full_like(IDS, 5))
    assert torch.equal(logits(model), before)
    for twin in copies:
        twin.lm_head.weight.data.mul_(2)
        assert torch.equal(logits(twin, torch.full_like(IDS, 5)), 2 * expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StaticPatchWarning)
            with pytest.raises(StaticPatchWarning, match="begin with the token 5"):
                logits(twin.eval())
            copied = copy.deepcopy(twin)
            vars(next(iter(copied._forward_pre_hooks.values())))["_has_warned"] = False
            detach(copied)
            assert torch.equal(logits(copied), 2 * before)


def test_saving_a_model_with_an_applied_patch_warns_that_the_patch_is_not_in_it(
    tmp_path: Path,
) -> None:
    model: Any = build("llama")
    patch, message = random_patch(model, 0), r"without the patch.* call patch\.merge\(model\)"
    with patch.applied(model):
        expected = logits(model)
        for save in (model.state_dict, model.model.state_dict):
            with pytest.warns(UserWarning, match=message):
                save()
        with pytest.warns(UserWarning, match=message):
            model.save_pretrained(tmp_path)
    with ContextPatcher(model) as patcher:
        with patcher.applied(patcher.compute(IDS, IDS)), pytest.warns(UserWarning, match=message):
            model.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.state_dict()
    patch.merge(model).save_pretrained(tmp_path)  # the cure
    assert close(logits(type(model).from_pretrained(tmp_path)), expected)


def test_files_that_are_made_up_are_refused(tmp_path: Path) -> None:
    """And a patch that is not finite is not written."""
    patch, file = random_patch(build("llama", num_hidden_layers=1), 0), tmp_path / "p.safetensors"
    patch.save(file)
    header, tensors = read(file)
    wrong = {"method": 3, "tokenizer": [], "front": None, "report": {"steps": 3}}
    wrong |= {"kind": "per_token"}
    for name, value in wrong.items():
        write(file, header | {name: value}, tensors)
        with pytest.raises(PatchFormatError, match=f"expected .*{name}"):
            StaticPatch.load(file)
    write(file, header, tensors | {"model.layers.0.mlp.w": IDS})
    with pytest.raises(PatchFormatError, match="expected front, report and factors"):
        StaticPatch.load(file)
    file.unlink()
    next(iter(patch.changes.values())).u[0, 0] = float("inf")
    with pytest.raises(PatchFormatError, match="expected finite factors"):
        patch.save(file)
    assert not list(tmp_path.iterdir())
