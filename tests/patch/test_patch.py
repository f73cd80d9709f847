"""ContextPatch as an object and as a file: what is kept, what is refused, and what a part of it can
do.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.random_models import case, two_layers
from torch import Tensor, nn

from icl_patch import ContextPatch, ContextPatcher, FingerprintMismatch, PatchFormatError, metrics
from icl_patch.patch.serialization import TOKEN_TENSORS
from tools.train_embedded import build_tokenizer

UPDATES = ("direct", "stable", "exact")
FAMILIES, HIDDEN, INNER = ("gemma3", "llama"), 48, 72


@pytest.fixture(scope="module")
def patch_of() -> Callable[..., ContextPatch]:
    """The patch of the ragged case with a prefix, computed once a family and update."""
    made: dict[tuple[str, str], ContextPatch] = {}

    def get(family: str, update: str) -> ContextPatch:
        if (family, update) not in made:
            with ContextPatcher(two_layers(family), update, tokenizer=build_tokenizer()) as patcher:
                made[family, update] = patcher.compute(**case("prefix"))
        return made[family, update]

    return get


def replayed(patch: ContextPatch, model: nn.Module) -> Tensor:
    with ContextPatcher(model, patch.info.update) as patcher:
        return patcher.forward(patch.kept_ids, patch)


families_and_updates = pytest.mark.parametrize(
    ("family", "update"), [(family, update) for family in FAMILIES for update in UPDATES]
)


# -- files


@families_and_updates
def test_a_file_is_the_patch(family: str, update: str, patch_of: Callable, tmp_path: Path) -> None:
    patch, path, model = patch_of(family, update), tmp_path / "p.safetensors", two_layers(family)
    patch.save(path)
    assert list(tmp_path.iterdir()) == [path]
    loaded = ContextPatch.load(path, model, build_tokenizer())
    assert loaded.info == patch.info and loaded.info.tokenizer is not None
    assert loaded.passes == patch.passes == 2
    assert loaded.logits is loaded.report is None
    for name in TOKEN_TENSORS:
        mine, theirs = getattr(loaded, name), getattr(patch, name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    for own, other in zip(loaded.layers, patch.layers, strict=True):
        assert own.keys() == other.keys()
        for name, factor in own.items():
            assert factor.dtype == other[name].dtype and torch.equal(factor, other[name])
    logits = replayed(loaded, model)
    assert torch.equal(logits, replayed(patch, model))
    error = metrics.linf(logits, patch.logits)[patch.kept_mask].max()
    assert error <= (0 if update == "exact" else 1e-4)


def test_factors_that_are_not_finite_are_not_saved(patch_of: Callable, tmp_path: Path) -> None:
    patch = patch_of("gemma3", "stable")
    layer = {name: factor.clone() for name, factor in patch.layers[1].items()}
    layer["mlp.down_proj.u"][2, 1, 7] = math.nan
    broken = dataclasses.replace(patch, layers=(patch.layers[0], layer))
    message = r"layers\.1\.mlp\.down_proj\.u at row, token \[2, 1\]"
    with pytest.raises(PatchFormatError, match=message):
        broken.save(tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


# -- what a patch is refused for


def test_a_patch_of_another_model_is_refused(patch_of: Callable, tmp_path: Path) -> None:
    patch, path, one_bit_more = patch_of("gemma3", "stable"), tmp_path / "p", two_layers("gemma3")
    weight = one_bit_more.get_parameter("model.layers.1.mlp.up_proj.weight").data
    weight.view(torch.int32)[3, 5] ^= 1
    patch.save(path)
    for model, dtype in (
        (one_bit_more, ""),
        (two_layers("gemma3", torch.bfloat16), r"in torch\.float32\): load that model with dtype"),
    ):
        message = rf"expected a patch of \w+ForCausalLM .* got one of Gemma3ForCausalLM.*{dtype}"
        with pytest.raises(FingerprintMismatch, match=message):
            ContextPatch.load(path, model, build_tokenizer())
        with pytest.raises(FingerprintMismatch):
            replayed(patch, model)
    # without a model there is nothing to compare with
    assert ContextPatch.load(path).info.model == "Gemma3ForCausalLM"


def test_a_patch_of_another_tokenizer_is_refused(patch_of: Callable, tmp_path: Path) -> None:
    """When it is read, and when it is applied."""
    other, patch = build_tokenizer(), patch_of("gemma3", "stable")
    other.add_tokens(["<another>"])
    patch.save(tmp_path / "p")
    with pytest.raises(FingerprintMismatch, match="tokenizer"):
        ContextPatch.load(tmp_path / "p", tokenizer=other)
    refusal = pytest.raises(FingerprintMismatch, match="tokenizer")
    with ContextPatcher(two_layers("gemma3"), tokenizer=other) as patcher, refusal:
        patcher.forward(patch.kept_ids, patch, kept_mask=patch.kept_mask)


# -- parts


def test_other_parts_are_measured_but_not_replayed(patch_of: Callable, tmp_path: Path) -> None:
    patch, path, later = patch_of("gemma3", "exact"), tmp_path / "p.safetensors", slice(1, None)
    parts = [{"tokens": later}, {"tokens": slice(None, None, 2)}, {"layers": slice(1)}]
    for chosen in (*parts, {"layers": later}):
        part = patch.select(**chosen)
        layers, tokens = (chosen.get(name, slice(None)) for name in ("layers", "tokens"))
        assert not part.info.replayable
        for name, sizes in part.norms().items():
            assert torch.equal(sizes, patch.norms()[name][layers, :, tokens])
        part.save(path)
        for again in (part, ContextPatch.load(path), part.select(rows=slice(1))):
            with pytest.raises(ValueError, match="part"):
                replayed(again, two_layers("gemma3"))


def test_parts_that_cannot_be_selected(patch_of: Callable) -> None:
    patch = patch_of("gemma3", "exact")
    for chosen in ({"rows": slice(3, None)}, {"tokens": slice(0)}, {"layers": slice(2, 9)}):
        with pytest.raises(ValueError, match="expected at least one row, token and layer"):
            patch.select(**chosen)
    with pytest.raises(ValueError, match="expected layers in increasing order"):  # as a file has
        patch.select(layers=slice(None, None, -1))


# -- measures


@families_and_updates
def test_size(family: str, update: str, patch_of: Callable) -> None:
    """At most 4(3I + 4d) bytes a layer and token, twice that for exact; and no tensor holds on to
    more than it shows.
    """
    patch = patch_of(family, update).select(rows=slice(1), tokens=slice(1))
    limit = 4 * (3 * INNER + 4 * HIDDEN) * (2 if update == "exact" else 1)
    assert 0 < patch.nbytes <= 2 * limit
    assert patch.nbytes == sum(x.nbytes for layer in patch.layers for x in layer.values())
    whole = patch_of(family, update)
    storages = [x.untyped_storage() for layer in whole.layers for x in layer.values()]
    sizes = {x.data_ptr(): x.nbytes() for x in storages}
    assert sum(sizes.values()) == whole.nbytes <= 2 * whole.kept_ids.numel() * limit


def test_to_moves_every_tensor(patch_of: Callable) -> None:
    patch = patch_of("gemma3", "exact")
    moved = patch.to("meta")
    tensors = [getattr(moved, name) for name in TOKEN_TENSORS]
    tensors += [x for layer in moved.layers for x in layer.values()]
    tensors += [moved.logits, *vars(moved.report).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert patch.kept_ids.device.type == "cpu"
    with pytest.raises(TypeError, match="dtype"):
        patch.to(torch.float16)


def test_one_tokens_changes_are_counted_from_the_rows_own_end(patch_of: Callable) -> None:
    """Padding has none: its factors are 0, which look like a change of 0."""
    patch = patch_of("gemma3", "stable")
    row = int(patch.kept_mask.sum(1).argmin())
    count = int(patch.kept_mask[row].sum())
    assert 0 < count < patch.kept_mask.shape[1]
    last, column = dict(patch.weight_changes(row, -1)), count - 1
    assert dict(patch.weight_changes(row, column)).keys() == last.keys()
    u, v = (patch.layers[0][f"mlp.down_proj.{name}"][row, column] for name in "uv")
    assert torch.equal(last["model.layers.0.mlp.down_proj.weight"], torch.outer(u, v.to(u)))
    assert torch.equal(patch.of_token(row, -1)[0]["mlp.down_proj.u"], u)
    for token, message in (
        (count, "which has .*, got padding"),
        (99, "expected a row and a token"),
    ):
        for changes in (patch.of_token, patch.weight_changes):
            with pytest.raises(ValueError, match=message):
                changes(row, token)
