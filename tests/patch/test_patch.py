"""ContextPatch as an object and as a file: what is kept, what is refused, and what a part of it can
do.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models import build, case, shallow, tokens
from support.numeric import noise_limit, within_roundings
from support.patch_files import read, refuses, write
from torch import Tensor, nn

from icl_patch import ContextPatch, ContextPatcher, FingerprintMismatch, PatchFormatError, metrics
from icl_patch.errors import TokenPatchWarning
from icl_patch.evaluation import tiny_models
from icl_patch.evaluation.embedded.train import build_tokenizer

TOKEN_TENSORS = (
    "kept_ids",
    "kept_mask",
    "position_ids",
    "kept_slots",
    "prefix_ids",
    "prefix_mask",
    "prefix_positions",
    "prefix_slots",
)
UPDATES = ("direct", "stable", "exact")
SMALL = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "llama": {"num_hidden_layers": 2},
}
HIDDEN, INNER = 48, 72
WIDTHS = {
    "mlp.gate_proj.u": INNER,
    "mlp.up_proj.u": INNER,
    "readers.v": HIDDEN,
    "mlp.down_proj.u": HIDDEN,
    "mlp.down_proj.v": INNER,
    "post_feedforward_layernorm.new_scale": HIDDEN,
    "post_feedforward_layernorm.scale": HIDDEN,
}
SCALE, DOWN = {name for name in WIDTHS if "norm" in name}, {"mlp.down_proj.u", "mlp.down_proj.v"}


def small(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return build(family, 0, dtype, **SMALL[family])


def factor_names(family: str, update: str) -> set[str]:
    if family == "llama":
        return WIDTHS.keys() - SCALE
    return WIDTHS.keys() - (DOWN if update == "direct" else set())


@pytest.fixture(scope="module")
def patch_of() -> Callable[..., ContextPatch]:
    """The patch of the ragged case with a prefix, computed once a family and update."""
    made: dict[tuple[str, str], ContextPatch] = {}

    def get(family: str, update: str) -> ContextPatch:
        if (family, update) not in made:
            with ContextPatcher(small(family), update, tokenizer=build_tokenizer()) as patcher:
                made[family, update] = patcher.compute(**case("prefix"))
        return made[family, update]

    return get


def replayed(patch: ContextPatch, model: nn.Module) -> Tensor:
    with ContextPatcher(model, patch.info.update) as patcher:
        return patcher.forward(patch.kept_ids, patch)


families_and_updates = pytest.mark.parametrize(
    ("family", "update"), [(family, update) for family in SMALL for update in UPDATES]
)


# -- files


@families_and_updates
def test_round_trip(family: str, update: str, patch_of: Callable, tmp_path: Path) -> None:
    patch, path = patch_of(family, update), tmp_path / "p.safetensors"
    patch.save(path)
    loaded = ContextPatch.load(path)
    assert loaded.info == patch.info
    assert loaded.info.tokenizer is not None
    assert loaded.passes == patch.passes == 2
    for name in TOKEN_TENSORS:
        assert getattr(loaded, name).dtype == getattr(patch, name).dtype
        assert torch.equal(getattr(loaded, name), getattr(patch, name))
    assert len(loaded.layers) == len(patch.layers) == 2
    for mine, theirs in zip(loaded.layers, patch.layers, strict=True):
        assert mine.keys() == theirs.keys() == factor_names(family, update)
        for name, factor in mine.items():
            assert factor.dtype == theirs[name].dtype
            assert torch.equal(factor, theirs[name])
    assert loaded.logits is None
    assert loaded.report is None
    assert list(tmp_path.iterdir()) == [path]


@families_and_updates
def test_a_loaded_patch_replays_with_the_same_bits(
    family: str, update: str, patch_of: Callable, tmp_path: Path
) -> None:
    patch, path, model = patch_of(family, update), tmp_path / "p.safetensors", small(family)
    patch.save(path)
    loaded = ContextPatch.load(path, model, build_tokenizer())
    logits = replayed(loaded, model)
    assert torch.equal(logits, replayed(patch, model))
    assert metrics.linf(logits, patch.logits)[patch.kept_mask].max() <= (
        0 if update == "exact" else 1e-4
    )


def test_the_file_is_as_documented(patch_of: Callable, tmp_path: Path) -> None:
    patch, path = patch_of("gemma3", "stable"), tmp_path / "p.safetensors"
    patch.save(path)
    header, tensors = read(path)
    tokens = patch.kept_ids.shape
    shapes = {
        name: (width,) if name.endswith(".scale") else (*tokens, width)
        for name, width in WIDTHS.items()
    }
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        f"layers.{i}.{k}": v for i in range(2) for k, v in shapes.items()
    }
    assert header["format"] == 2
    assert (header["kind"], header["arithmetic"]) == ("per_token", "model")
    assert header["tensor_parallel"] == 1
    written = path.read_bytes()
    write(path, header, tensors)
    assert path.read_bytes() == written
    assert header["layers"] == [0, 1]
    assert header["kept_mask"] == patch.kept_mask.tolist()
    assert header["position_ids"] == patch.position_ids.tolist()


def interrupt(*_args: Any) -> None:
    raise KeyboardInterrupt


def fail_at_once(*_args: Any, **_options: Any) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("target", "replacement", "error"),
    [
        ("icl_patch.patch.atomic_file.os.fsync", interrupt, KeyboardInterrupt),
        ("icl_patch.patch.serialization.json.dumps", fail_at_once, OSError),
        ("pathlib.Path.replace", fail_at_once, OSError),
    ],
)
def test_a_file_is_written_whole_or_not_at_all(
    target: str,
    replacement: Callable,
    error: type[BaseException],
    patch_of: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch, path = patch_of("llama", "stable"), tmp_path / "p.safetensors"
    patch_of("gemma3", "stable").save(path)
    before = path.read_bytes()
    with monkeypatch.context() as broken, pytest.raises(error):
        broken.setattr(target, replacement)
        patch.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    patch.save(path)
    assert ContextPatch.load(path).info == patch.info


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_factors_that_are_not_finite_are_not_saved(
    value: float, patch_of: Callable, tmp_path: Path
) -> None:
    patch = patch_of("gemma3", "stable")
    broken = {name: factor.clone() for name, factor in patch.layers[1].items()}
    broken["mlp.down_proj.u"][2, 1, 7] = value
    with pytest.raises(
        PatchFormatError, match=r"layers\.1\.mlp\.down_proj\.u at row, token \[2, 1\]"
    ):
        dataclasses.replace(patch, layers=(patch.layers[0], broken)).save(
            tmp_path / "p.safetensors"
        )
    assert not list(tmp_path.iterdir())


# -- what a patch is refused for


def one_bit_more(model: nn.Module) -> nn.Module:
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight").data
    weight.view(torch.int32)[3, 5] ^= 1
    return model


OTHER_MODELS = {
    "one bit of one weight": lambda: one_bit_more(small("gemma3")),
    "another dtype": lambda: small("gemma3", torch.bfloat16),
    "another family": lambda: small("llama"),
    "more layers": lambda: build("gemma3", 0),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_a_patch_of_another_model_is_refused(
    other: str, patch_of: Callable, tmp_path: Path
) -> None:
    patch, path, model = (
        patch_of("gemma3", "stable"),
        tmp_path / "p.safetensors",
        OTHER_MODELS[other](),
    )
    patch.save(path)
    with pytest.raises(
        FingerprintMismatch,
        match=r"expected a patch of \w+ForCausalLM .* got one of Gemma3ForCausalLM",
    ):
        ContextPatch.load(path, model)
    with pytest.raises(FingerprintMismatch):
        replayed(patch, model)
    # without a model there is nothing to compare with
    assert ContextPatch.load(path).info.model == "Gemma3ForCausalLM"


def test_a_patch_of_another_dtype_names_both(patch_of: Callable, tmp_path: Path) -> None:
    """The two models have one name."""
    patch, path = patch_of("gemma3", "stable"), tmp_path / "p.safetensors"
    patch.save(path)
    message = (
        r"expected a patch of Gemma3ForCausalLM in torch\.bfloat16, got one of Gemma3ForCausalLM in"
        r" torch\.float32: load the model with dtype=torch\.float32"
    )
    with pytest.raises(FingerprintMismatch, match=message):
        ContextPatch.load(path, small("gemma3", torch.bfloat16), build_tokenizer())


def test_a_patch_of_another_tokenizer_is_refused(patch_of: Callable, tmp_path: Path) -> None:
    path, other = tmp_path / "p.safetensors", build_tokenizer()
    patch_of("gemma3", "stable").save(path)
    other.add_tokens(["<another>"])
    with pytest.raises(FingerprintMismatch, match="tokenizer"):
        ContextPatch.load(path, tokenizer=other)
    ContextPatch.load(path, tokenizer=build_tokenizer())


@pytest.mark.parametrize("length", [0, 7, 8, 300, -4, -1])
def test_a_truncated_file_is_refused(length: int, patch_of: Callable, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    patch_of("gemma3", "stable").save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(PatchFormatError, match="safetensors"):
        ContextPatch.load(path)


def test_a_pickle_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "sprung",)

    for zipped in (True, False):
        torch.save({"layers": Trap()}, tmp_path / "p.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(PatchFormatError, match="pickle"):
            ContextPatch.load(tmp_path / "p.pt")
    assert not (tmp_path / "sprung").exists()


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(PatchFormatError, match="icl_patch"):
        ContextPatch.load(path)
    for text in ("", "{", "null", "[1]", "3"):
        write(path, text, {"a": torch.zeros(2)})
        with pytest.raises(PatchFormatError):
            ContextPatch.load(path)


def without(name: str) -> Callable:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_nan(factor: Tensor) -> Tensor:
    factor[0, 0, 0] = math.nan
    return factor


NEW_SCALE = "layers.0.post_feedforward_layernorm.new_scale"
BAD_TENSORS = {
    "missing": (without("layers.1.readers.v"), r"missing: \['layers\.1\.readers\.v'\]"),
    "extra": (lambda tensors: tensors.update(extra=torch.zeros(1)), r"extra: \['extra'\]"),
    "a layer too many": (
        lambda tensors: tensors.update({"layers.2.readers.v": torch.zeros(1)}),
        r"extra: \['layers\.2",
    ),
    "fewer tokens": (
        changed("layers.0.mlp.up_proj.u", lambda u: u[:, 1:]),
        r"expected layers\.0\.mlp\.up_proj\.u \(3, 7, ",
    ),
    "fewer rows": (
        changed("layers.1.mlp.down_proj.v", lambda v: v[:2]),
        r"expected layers\.1\.mlp\.down_proj\.v \(3, 7, ",
    ),
    "two dimensions": (
        changed("layers.0.readers.v", lambda v: v[0]),
        r"expected layers\.0\.readers\.v",
    ),
    "no dimensions": (
        changed("layers.0.readers.v", lambda v: v.sum()),
        r"expected layers\.0\.readers\.v",
    ),
    "another width": (
        changed(NEW_SCALE, lambda m: m[..., :-1]),
        r"new_scale \(3, 7, 48\), got \(3, 7, 47\)",
    ),
    "a long scale": (
        changed("layers.0.post_feedforward_layernorm.scale", lambda m: m.repeat(2)),
        r"scale \(48,\), got \(96,\)",
    ),
    "NaN": (
        changed("layers.1.mlp.gate_proj.u", with_nan),
        r"finite factors, got NaN or infinity in layers\.1\.mlp\.gate_proj\.u",
    ),
    "infinity": (
        changed("layers.0.post_feedforward_layernorm.scale", lambda m: m / 0),
        r"infinity in layers\.0",
    ),
    "fp16": (
        changed("layers.0.mlp.up_proj.u", Tensor.half),
        r"layers\.0\.mlp\.up_proj\.u in fp32, fp64 or bf16, got torch\.float16",
    ),
    "int64": (changed("layers.0.mlp.up_proj.u", Tensor.long), r"64 or bf16, got torch\.int64"),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors_that_do_not_fit(fault: str, patch_of: Callable, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    patch_of("gemma3", "stable").save(path)
    header, tensors = read(path)
    change, message = BAD_TENSORS[fault]
    change(tensors)
    write(path, header, tensors)
    with pytest.raises(PatchFormatError, match=message):
        ContextPatch.load(path)


def test_factors_rounded_to_bf16_are_read_as_fp32(patch_of: Callable, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    patch = patch_of("llama", "exact")
    patch.save(path)
    header, tensors = read(path)
    rounded = {name: x.bfloat16() for name, x in tensors.items()}
    write(path, header, rounded)
    loaded = ContextPatch.load(path)
    for layer, factors in zip(loaded.layer_indices, loaded.layers, strict=True):
        for name, x in factors.items():
            assert x.dtype == torch.float32
            assert torch.equal(x, rounded[f"layers.{layer}.{name}"].float())


def narrow(header: dict, tensors: dict[str, Tensor]) -> None:
    """The residual stream's width cut everywhere: nothing in the file contradicts itself."""
    tensors.update(
        {name: x[..., :40].contiguous() for name, x in tensors.items() if x.shape[-1] == HIDDEN}
    )


def one_layer(header: dict, tensors: dict[str, Tensor]) -> None:
    header["layers"] = [0]
    for name in [name for name in tensors if name.startswith("layers.1")]:
        del tensors[name]


@pytest.mark.parametrize("change", [narrow, one_layer])
def test_consistent_tensors_that_do_not_fit_the_model(
    change: Callable, patch_of: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    patch_of("gemma3", "stable").save(path)
    header, tensors = read(path)
    change(header, tensors)
    write(path, header, tensors)
    with pytest.raises(PatchFormatError):
        ContextPatch.load(path, small("gemma3"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gemma4-moe"])
def test_factors_of_experts_are_read_again(family: str, tmp_path: Path) -> None:
    """Also where experts and router read the residual stream through norms of their own."""
    path, model = tmp_path / "p.safetensors", shallow(family)
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(**case("prefix"))
        patch.save(path)
        for layer, again in zip(patch.layers, ContextPatch.load(path, model).layers, strict=True):
            assert layer.keys() == again.keys()
            assert all(torch.equal(layer[name], again[name]) for name in layer)


def test_experts_that_no_token_has(tmp_path: Path) -> None:
    path, model, index = (
        tmp_path / "p.safetensors",
        tiny_models.build("mixtral", num_hidden_layers=2),
        "layers.1.mlp.experts.index",
    )
    with ContextPatcher(model, "stable") as patcher:
        patcher.compute(**case("prefix")).save(path)
        header, tensors = read(path)
        for chosen, message in (
            ([0, 7], None),
            ([3, 8], r"index of model\.layers\.1\.mlp\.experts\.gate_up_proj from 0 to 7, got 8"),
            ([99, 98], "from 0 to 7, got 99"),
            (
                [3, 3],
                (
                    r"expected layers\.1\.mlp\.experts\.index of distinct experts, got \[3, 3\] at"
                    r" row, token \[2, 1\]"
                ),
            ),
        ):
            tensors[index][2, 1] = torch.tensor(chosen)
            write(path, header, tensors)
            if message is None:
                ContextPatch.load(path, model)
            else:
                with pytest.raises(PatchFormatError, match=message):
                    ContextPatch.load(path, model)
                # read without a model, it is checked when it meets one
                if "distinct" not in message:
                    loaded = ContextPatch.load(path)
                    with pytest.raises(PatchFormatError, match=message):
                        patcher.forward(loaded.kept_ids, loaded, kept_mask=loaded.kept_mask)
    with pytest.raises(PatchFormatError, match="distinct"):  # without a patcher, or a model
        ContextPatch.load(path)


@pytest.mark.parametrize("name", ["kept_ids", "prefix_ids"])
def test_ids_that_the_model_does_not_have(name: str, patch_of: Callable, tmp_path: Path) -> None:
    path, model = tmp_path / "p.safetensors", small("gemma3")
    patch_of("gemma3", "stable").save(path)
    header, tensors = read(path)
    for last in (96, 97):
        header[name][1][-1] = last
        write(path, header, tensors)
        if last == 96:
            ContextPatch.load(path, model)
    with pytest.raises(
        PatchFormatError,
        match=rf"expected {name} from 0 to 96, as many ids as the model has, got 97",
    ):
        ContextPatch.load(path, model)
    ContextPatch.load(path)


def test_a_place_that_does_not_follow_the_one_before(patch_of: Callable, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    patch_of("gemma3", "stable").save(path)
    header, tensors = read(path)
    for name, column in (
        ("kept_slots", 1),
        ("position_ids", 1),
        ("kept_slots", 0),
        ("position_ids", 0),
        ("prefix_slots", 4),
    ):
        row = list(header[name][0])
        before = (
            {"kept_slots": "prefix_slots", "position_ids": "prefix_positions"}[name]
            if not column
            else name
        )
        # the same as the one before, and an earlier one
        for place in (header[before][0][column - 1], 0):
            row[column] = place
            write(path, header | {name: [row, *header[name][1:]]}, tensors)
            with pytest.raises(
                PatchFormatError,
                match=rf"{name}.* that increase from token to token, got .* in row 0",
            ):
                ContextPatch.load(path)
    same = [[5] * len(row) for row in header["kept_slots"]]
    assert refused(path, header | {"kept_slots": same}, tensors)
    # the last row's last token is padding
    padded = [[*row[:-1], 0] for row in header["kept_slots"]]
    assert not header["kept_mask"][2][-1]
    assert not refused(
        path, header | {"kept_slots": [*header["kept_slots"][:2], padded[2]]}, tensors
    )


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama"])
def test_positions_that_the_model_does_not_have(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "p.safetensors", tiny_models.build(family, num_hidden_layers=1)
    with ContextPatcher(model, "stable") as patcher:
        patcher.compute(tokens(1, 1, 126), tokens(2, 1, 2)).save(path)  # as many as there are
        patch = ContextPatch.load(path, model)
        assert patch.position_ids.tolist() == [[126, 127]]
        assert patcher.forward(patch.kept_ids, patch).isfinite().all()
        header, tensors = read(path)
        for name, places in (("position_ids", [127, 128]), ("prefix_positions", [128])):
            changed = {name: [places], "longest": 129}
            if name == "prefix_positions":
                changed |= {"prefix_ids": [[1]], "prefix_mask": [[False]], "prefix_slots": [[0]]}
            write(path, header | changed, tensors)
            with pytest.raises(
                PatchFormatError,
                match=f"expected {name} from 0 to 127, as many positions as the model has, got 128",
            ):
                ContextPatch.load(path, model)
        write(path, header | {"longest": 129}, tensors)
        with pytest.raises(
            PatchFormatError,
            match="expected longest of at most 128, as many positions as the model has, got 129",
        ):
            ContextPatch.load(path, model)


STRINGS = ("model", "fingerprint", "family", "update", "dtype", "kind", "arithmetic")
NUMBERS = ("format", "passes", "longest", "tensor_parallel")
HEADER = (*STRINGS, *NUMBERS, "divisible", "replayable", "layers", "blocks", *TOKEN_TENSORS)
# Nothing that any of these entries may be: there are 7 kept tokens and 5 of the prefix.
NEVER_RIGHT = (
    None,
    -1,
    0.5,
    {},
    [],
    [[]],
    [1],
    [[1, 2, 3]] * 3,
    [["a"]],
    [[None]],
    [[1], [2, 3]],
    [[[1]]],
)
ELEMENTS = (0.5, -1, "1", None, math.nan)


def refused(path: Path, header: dict, tensors: dict[str, Tensor]) -> bool:
    write(path, header, tensors)
    return refuses(path)


@pytest.mark.parametrize("name", HEADER)
def test_header_entries_that_are_missing_or_of_another_kind(
    name: str, patch_of: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    patch_of("gemma3", "stable").save(path)
    header, tensors = read(path)
    entry = header.pop(name)
    wrong: list[Any] = list(NEVER_RIGHT)
    if name in TOKEN_TENSORS:
        elements = (*ELEMENTS, 1) if name.endswith("mask") else (*ELEMENTS, True)
        wrong += [[[element] * len(entry[0])] * 3 for element in elements]
        wrong += [entry[:2], [row[1:] for row in entry], "?"]
    elif name not in ("model", "fingerprint", "family"):
        wrong += ["?"] if name in ("passes", "tensor_parallel") else ["?", 3]
    accepted = [value for value in wrong if not refused(path, header | {name: value}, tensors)]
    assert not accepted
    write(path, header, tensors)
    with pytest.raises(PatchFormatError, match=name):
        ContextPatch.load(path)
    assert not refused(path, header | {name: entry}, tensors)


# -- parts


# A direct patch of a scale writer holds in the shapes it was recorded in only, see below.
steady = pytest.mark.parametrize(
    ("family", "update"),
    [("gemma3", "stable"), ("gemma3", "exact"), ("llama", "stable"), ("llama", "exact")],
)


@steady
def test_the_first_tokens_can_be_replayed(
    family: str, update: str, patch_of: Callable, tmp_path: Path
) -> None:
    patch, model, path = patch_of(family, update), small(family), tmp_path / "p.safetensors"
    part = patch.select(tokens=slice(3))
    assert part.info.replayable
    assert torch.equal(part.kept_ids, patch.kept_ids[:, :3])
    assert torch.equal(part.logits, patch.logits[:, :3])
    assert torch.equal(part.report.reader_error, patch.report.reader_error[:, :, :3])
    logits = replayed(part, model)
    # not the same bits: a matrix product of 3 columns rounds otherwise than one of 7
    assert metrics.linf(logits, replayed(patch, model)[:, :3])[part.kept_mask].max() <= noise_limit(
        model
    )
    part.save(path)
    assert torch.equal(replayed(ContextPatch.load(path, model), model), logits)


@pytest.mark.parametrize(
    "chosen",
    [
        {"tokens": slice(1, None)},
        {"tokens": slice(None, None, 2)},
        {"layers": slice(1)},
        {"layers": slice(1, None)},
    ],
    ids=str,
)
def test_other_parts_are_measured_but_not_replayed(
    chosen: dict, patch_of: Callable, tmp_path: Path
) -> None:
    patch, path = patch_of("gemma3", "exact"), tmp_path / "p.safetensors"
    part = patch.select(**chosen)
    layers, tokens = chosen.get("layers", slice(None)), chosen.get("tokens", slice(None))
    assert not part.info.replayable
    for name, sizes in part.norms().items():
        assert torch.equal(sizes, patch.norms()[name][layers, :, tokens])
    part.save(path)
    for again in (part, ContextPatch.load(path), part.select(rows=slice(1))):
        with pytest.raises(ValueError, match="part"):
            replayed(again, small("gemma3"))


@pytest.mark.parametrize(
    "chosen", [{"rows": slice(3, None)}, {"tokens": slice(0)}, {"layers": slice(2, 9)}], ids=str
)
def test_nothing_cannot_be_selected(chosen: dict, patch_of: Callable) -> None:
    with pytest.raises(ValueError, match="leave something"):
        patch_of("gemma3", "exact").select(**chosen)


def test_layers_keep_their_order(patch_of: Callable) -> None:
    """A file has them in increasing order."""
    with pytest.raises(ValueError, match="expected layers in increasing order"):
        patch_of("gemma3", "exact").select(layers=slice(None, None, -1))


# -- measures


@families_and_updates
def test_weight_changes_are_outer_products_of_the_factors(
    family: str, update: str, patch_of: Callable
) -> None:
    patch, model = patch_of(family, update), small(family)
    changes = dict(patch.weight_changes(1, 2))
    parameters = dict(model.named_parameters())
    expected = {"mlp.gate_proj", "mlp.up_proj"}
    expected |= {"mlp.down_proj"} if (family, update) != ("gemma3", "direct") else set()
    expected |= {"post_feedforward_layernorm"} if family == "gemma3" else set()
    assert changes.keys() == {
        f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in expected
    }
    for name, change in changes.items():
        assert change.shape == parameters[name].shape
        assert change.any()
        layer, module = (
            patch.layers[int(name.split(".")[2])],
            name.split(".", 3)[3].removesuffix(".weight"),
        )
        if module == "post_feedforward_layernorm":
            # Gemma stores w = m - 1
            wanted = layer[f"{module}.new_scale"][1, 2] - (1 + parameters[name])
            size = 1 + layer[f"{module}.new_scale"][1, 2].abs() + parameters[name].abs()
        else:
            v = layer[f"{module}.v" if module == "mlp.down_proj" else "readers.v"][1, 2]
            wanted = layer[f"{module}.u"][1, 2].unsqueeze(1) * v.unsqueeze(0)
            size = wanted.abs()
        assert within_roundings(change, wanted.detach(), 4, size.detach()), name


@families_and_updates
def test_norms_are_those_of_the_materialised_changes(
    family: str, update: str, patch_of: Callable
) -> None:
    patch = patch_of(family, update)
    norms = patch.norms()
    for row, token in ((0, 0), (1, 2), (2, 6)):  # the last is padding
        for name, change in patch.weight_changes(row, token):
            size = norms[name.split(".", 3)[3].removesuffix(".weight")][
                int(name.split(".")[2]), row, token
            ]
            wanted = change.double().norm()
            assert within_roundings(size, wanted, INNER + HIDDEN, wanted), name
            assert bool(size > 0) == bool(patch.kept_mask[row, token])


@families_and_updates
def test_size(family: str, update: str, patch_of: Callable) -> None:
    """At most 4(3I + 4d) bytes a layer and token, twice that for exact; and no tensor holds on to
    more than it shows.
    """
    patch = patch_of(family, update).select(rows=slice(1), tokens=slice(1))
    limit = 4 * (3 * INNER + 4 * HIDDEN) * (2 if update == "exact" else 1)
    assert 0 < patch.nbytes <= 2 * limit
    assert patch.nbytes == sum(
        factor.numel() * factor.element_size()
        for layer in patch.layers
        for factor in layer.values()
    )
    whole = patch_of(family, update)
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for layer in whole.layers
        for x in layer.values()
    }
    assert sum(storages.values()) == whole.nbytes <= 2 * whole.kept_ids.numel() * limit


def test_to_moves_every_tensor(patch_of: Callable) -> None:
    patch = patch_of("gemma3", "exact")
    moved = patch.to("meta")
    tensors = [getattr(moved, name) for name in TOKEN_TENSORS] + [
        factor for layer in moved.layers for factor in layer.values()
    ]
    tensors += [moved.logits, *vars(moved.report).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert patch.kept_ids.device.type == "cpu"


def test_the_lora_of_a_token_warns_that_it_is_no_others(tmp_path: Path) -> None:
    with ContextPatcher(small("llama"), "stable") as patcher:
        patch = patcher.compute(tokens(0, 2, 5), tokens(1, 2, 3))
    with pytest.warns(TokenPatchWarning, match="position only, kept token 2 of row 1") as caught:
        patch.to_peft(tmp_path / "lora", patcher.model, row=1)
    assert caught[0].filename == __file__
    with pytest.raises(FingerprintMismatch, match="expected a patch of LlamaForCausalLM"):
        patch.to_peft(tmp_path / "other", build("llama", 7))
    assert not (tmp_path / "other").exists()
