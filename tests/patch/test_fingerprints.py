"""The hash of a model's weights: what it finds, when it is taken, and which patches it refuses."""

import gc
import hashlib
import weakref
from pathlib import Path

import pytest
import torch
from support.patchers import IDS, KEPT, works
from support.random_models import build, shallow, tokens
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from icl_patch import ContextPatch, ContextPatcher, FingerprintMismatch
from icl_patch.patch import fingerprints
from icl_patch.patch.fingerprints import tensor_hashes, weight_fingerprint, weight_state

DTYPES = [torch.float8_e4m3fn, torch.complex64, torch.bool]
DTYPES += [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROW = 8192  # bytes that have a pair of checksums


class Holder(nn.Module):
    """Tensors as buffers, which may have any dtype."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def hash_of(tensor: Tensor) -> str:
    return weight_fingerprint(Holder(x=tensor))


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).squeeze(-1)


# -- what is found


@every_dtype
@pytest.mark.parametrize("size", [1, ROW - 1, ROW, ROW + 1, 129 * ROW + 13], ids=str)
def test_a_change_of_any_element(dtype: torch.dtype, size: int) -> None:
    """The first, the last, those beside the ends of rows, and some others; one bit of each."""
    count = max(size // torch.empty((), dtype=dtype).element_size(), 1)
    x = random_bits(dtype, count)
    data, before = x.view(torch.uint8), hash_of(x)
    places = {0, ROW - 1, ROW, 128 * ROW, len(data) - 1, *torch.randint(len(data), (5,)).tolist()}
    for place in sorted(place for place in places if place < len(data)):
        data[place] ^= 1 if dtype == torch.bool else 1 << place % 8
        assert hash_of(x) != before, place
        data[place] ^= 1 if dtype == torch.bool else 1 << place % 8
    assert hash_of(x) == before


def test_shape_dtype_and_name_count() -> None:
    x = torch.zeros(6, dtype=torch.int32)
    others = [x, x.view(2, 3), x.view(3, 2), x[:5], torch.tensor(0), x[:0], x.view(6, 1)[:, :0]]
    others += [x.view(dtype) for dtype in (torch.float32, torch.int16, torch.int64)]
    hashes = {hash_of(y) for y in others}
    hashes |= {weight_fingerprint(Holder(y=x)), weight_fingerprint(Holder())}
    assert len(hashes) == len(others) + 2
    assert hash_of(torch.tensor(0.0)) != hash_of(torch.tensor(1.0))


@every_dtype
def test_the_layout_in_memory_does_not_count(dtype: torch.dtype) -> None:
    x = random_bits(dtype, 70, 90)
    expected = hash_of(x)
    assert hash_of(x.T.contiguous().T) == expected
    assert hash_of(random_bits(dtype, 80, 100)[5:75, 3:93].copy_(x)) == expected
    for offset in (1, 3, 8):  # a part of other memory, from no multiple of 8 bytes on
        other = random_bits(dtype, x.numel() + 9)[offset : x.numel() + offset]
        assert hash_of(other.view(70, 90).copy_(x)) == expected
    with torch.inference_mode():
        assert hash_of(x.clone()) == expected
    with torch.autocast("cpu"):
        assert hash_of(x) == expected


def test_checksums_are_as_documented() -> None:
    """The formula with Python's integers; and one hash, which files hold and must not change."""
    stream = hashlib.shake_256(b"icl-patch").digest(ROW)
    factors = [int.from_bytes(stream[i : i + 8], "little") | 1 for i in range(0, ROW, 8)]
    assert len({factor % 2**32 for factor in factors}) == 1024
    x = torch.randint(-(2**63), 2**63 - 1, (1500,))
    words = [*x.tolist(), *[0] * 548]
    rows = [words[:1024], words[1024:]]
    sums = [sum(f * y for f, y in zip(factors, row, strict=True)) for row in rows]
    high = [sum(f * (y >> 32) for f, y in zip(factors, row, strict=True)) for row in rows]
    got = [value % 2**64 for value in fingerprints._checksums(x).tolist()]
    assert got == [value % 2**64 for value in (sums[0], high[0], sums[1], high[1])]
    expected = "a0f195501b06e0f02a654ced68d0be79ef40ed44ba6793559dc4959e1610b1a7"
    assert hash_of(torch.arange(3000.0)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_does_not_count() -> None:
    model = build("llama")
    expected = weight_fingerprint(model)
    assert weight_fingerprint(model.cuda()) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2", "mamba"])
def test_every_weight_of_a_model_counts(family: str) -> None:
    """One bit of one element of each; buffers that the model computes itself do not."""
    model = shallow(family)
    before = weight_fingerprint(model)
    for name, tensor in model.state_dict().items():
        data = tensor.view(-1)[-1:].view(torch.uint8)
        data ^= 1
        assert weight_fingerprint(model) != before, name
        data ^= 1
    assert weight_fingerprint(model) == before
    for name, buffer in model.named_buffers():
        if name not in model.state_dict():
            buffer.data += 1
            assert weight_fingerprint(model) == before


def test_the_parts_of_a_quantised_weight_count() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 4), torch.ones(3, 4)), requires_grad=False)
    before, state = weight_fingerprint(model), weight_state(model)
    for part in ("a", "b"):
        inner = getattr(model.weight.data, part)
        inner[2, 3] += 1
        assert weight_fingerprint(model) != before
        assert weight_state(model) != state
        inner[2, 3] -= 1
        assert weight_fingerprint(model) == before


def test_what_a_module_saves_beside_its_parameters_counts() -> None:
    """But a text of ``get_extra_state`` does not."""
    model, scale = nn.Linear(2, 2), torch.ones(3)
    model.get_extra_state = lambda: "a text"
    model.register_state_dict_post_hook(lambda _, state, *_others: state.update(scale=scale))
    before = weight_fingerprint(model)
    scale[1] = 2
    assert weight_fingerprint(model) != before


# -- when it is taken


COUNTED = ("in place", "another tensor", "load_state_dict")


def change(model: nn.Module, name: str, through: str) -> None:
    """Change a weight of the model by half."""
    weight = model.get_parameter(name)
    if through == "load_state_dict":
        model.load_state_dict(model.state_dict() | {name: 1.5 * weight.detach()})
    elif through == "another tensor":
        weight.data = weight.data * 1.5
    else:
        with torch.inference_mode(through == "inference mode"), torch.no_grad():
            (weight if through == "in place" else weight.data).mul_(1.5)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("through", [*COUNTED, ".data", "inference mode"])
def test_changed_weights_refuse_older_patches(name: str, through: str, tmp_path: Path) -> None:
    """A change that torch counts is found at once, others at the next hash: no patch is saved under
    a hash of other weights. A new patch has the new weights' hash.
    """
    path, unaware_path = tmp_path / "p.safetensors", tmp_path / "unaware.safetensors"
    with torch.inference_mode(through == "inference mode"):
        model = build("llama")
    with ContextPatcher(model) as patcher:
        outdated = [patcher.compute(IDS, KEPT)]
        outdated[0].save(path)
        change(model, name, through)
        if through not in COUNTED:
            with pytest.raises(FingerprintMismatch):
                ContextPatch.load(path, model)
            outdated += [patcher.compute(IDS, KEPT)]
            with pytest.raises(FingerprintMismatch, match="Compute it again"):
                outdated[1].save(unaware_path)
            assert not unaware_path.exists()
        for patch in outdated:
            with pytest.raises(FingerprintMismatch):
                patcher.forward(KEPT, patch)
        works(patcher)
        patcher.compute(IDS, KEPT).save(path)
    ContextPatch.load(path, model)


def test_check_weights_finds_them_too() -> None:
    with ContextPatcher(build("llama")) as patcher:
        old, first = patcher.compute(IDS, KEPT), patcher.check_weights()
        change(patcher.model, "lm_head.weight", ".data")
        second, third = patcher.check_weights(), patcher.check_weights()
        assert [check.changed for check in (first, second, third)] == [False, True, False]
        assert first.fingerprint == old.info.fingerprint != second.fingerprint == third.fingerprint


def test_attaching_again_finds_them_too(tmp_path: Path) -> None:
    model = build("llama")
    with ContextPatcher(model) as patcher:
        old = patcher.compute(IDS, KEPT)
    change(model, "model.layers.0.mlp.up_proj.weight", ".data")
    with ContextPatcher(model) as patcher:
        assert patcher.fingerprint == weight_fingerprint(model) != old.info.fingerprint
        patcher.compute(IDS, KEPT).save(tmp_path / "p.safetensors")
        with pytest.raises(FingerprintMismatch):
            patcher.forward(KEPT, old)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were hashed, in order."""
    models: list[nn.Module] = []

    def counted(model: nn.Module, *, whole: bool = False) -> dict[str, str]:
        models.append(model)
        return tensor_hashes(model, whole=whole)

    monkeypatch.setattr(fingerprints, "tensor_hashes", counted)
    return models


@pytest.mark.parametrize("update", ["exact", "stable"])
def test_how_often_weights_are_hashed(update: str, hashes: list[nn.Module]) -> None:
    model = build("llama")
    with ContextPatcher(model, update) as patcher:
        for count in (1, 2):  # attaching made a first patch to try
            for _ in range(2):
                patcher.forward(KEPT, patcher.compute(IDS, KEPT))
                for mode in ("two_pass", "shared_cache"):
                    for step in patcher.generate(IDS, max_new_tokens=3, mode=mode):
                        assert step.patch.info.fingerprint == patcher.fingerprint
                assert hashes == [model] * count
            with torch.no_grad():
                model.lm_head.weight[0, 0] += 1


def test_saving_and_loading_hash_once_each(hashes: list[nn.Module], tmp_path: Path) -> None:
    path, model = tmp_path / "p.safetensors", build("llama")
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(IDS, KEPT)
    patch.save(path)  # detached, the model still has the weights
    assert len(hashes) == 2
    ContextPatch.load(path, model).save(path)  # the hash that was read goes on
    assert len(hashes) == 3
    ContextPatch.load(path)
    assert len(hashes) == 3


def test_positions_of_long_sequences_are_no_weights(hashes: list[nn.Module]) -> None:
    """Some models replace their rotary frequencies as a sequence grows."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=scaling, max_position_embeddings=16)
    with ContextPatcher(model) as patcher:
        patcher.compute(tokens(0, 1, 5), tokens(1, 1, 2))
        frequencies = model.model.rotary_emb.inv_freq.clone()
        with torch.no_grad():
            model(tokens(0, 1, 40))
        assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
        patcher.compute(tokens(0, 1, 5), tokens(1, 1, 2))
    assert hashes == [model]


# -- what a patch keeps


def test_a_patch_outlives_its_model(tmp_path: Path) -> None:
    """Which is collected once nobody refers to it, attached or not."""
    model = build("llama")
    patcher = ContextPatcher(model)
    patch, alive = patcher.compute(IDS, KEPT), weakref.ref(model)
    del model, patcher
    gc.collect()
    assert alive() is None
    patch.save(tmp_path / "p.safetensors")
    assert ContextPatch.load(tmp_path / "p.safetensors", build("llama")).info == patch.info
