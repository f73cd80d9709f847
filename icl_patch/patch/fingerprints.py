"""Hashes by which a patch knows the model and the tokenizer it was computed with."""

import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import FingerprintMismatch, RankError, UnsupportedModelError
from icl_patch.layers.device_hooks import offloaded
from icl_patch.models.ranks import on_all_ranks, ranks_of

_ROW = 1024  # words of 8 bytes, which have two checksums
_CHUNK = 128  # rows, 1 MiB, which a core's cache holds


def weight_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the weights of a model.

    The weights are the tensors of the state dict: parameters and persistent buffers. Buffers that
    a model computes from its configuration (rotary frequencies) are left out, because they differ
    between devices by rounding, and some models replace them as a sequence grows.

    The hash covers the name of every tensor, and the shape, dtype and content of each plain tensor
    in it, in logical order. The content is cut into rows of 1024 words x of 8 bytes, and the last
    row is padded with zeros. Each row contributes two checksums modulo 2⁶⁴,

        Σ f_k x_k   and   Σ f_k (x_k >> 32),

    with fixed factors f that are odd and differ in their low 32 bits. A change within one word and
    an exchange of two elements (of up to 8 bytes) always change a checksum. For random factors any
    other change would go unnoticed with a probability of at most 2⁻³². The hash does not depend on
    the device and the memory layout.

    Raises:
        UnsupportedModelError: the model is split over processes, and nothing is attached to it.
    """
    if ranks_of(model).size == 1:
        return _together(tensor_hashes(model))
    if (watched := _watched.get(model)) is None or (check := watched.check()) is None:
        raise UnsupportedModelError(
            f"expected a patcher attached to {type(model).__name__}, which is split over processes:"
            " attaching makes one fingerprint of all parts. Load or compare patches afterwards"
        )
    return check.fingerprint


def _together(hashes: Mapping[str, str]) -> str:
    """SHA-256 over the names and the hashes of tensors."""
    digest = hashlib.sha256()
    for name, content in sorted(hashes.items()):
        digest.update(f"{name} ".encode() + bytes.fromhex(content))
    return digest.hexdigest()


def tensor_hashes(model: nn.Module, *, whole: bool = False) -> dict[str, str]:
    """The hash of each tensor of :func:`weight_fingerprint`, by name.

    whole: join the parts of a tensor that several ranks share. All of these ranks must then call
    this function.
    """
    hashes, known = dict[str, str](), dict[int, str]()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, Tensor):  # from a module's get_extra_state
            continue
        if id(tensor) not in known:  # tied weights are read once
            read = offloaded(model, name) if tensor.is_meta else None
            held = tensor if read is None else read().to(tensor.dtype)
            if whole and isinstance(held, DTensor):
                held = held.full_tensor()
            digest = hashlib.sha256()
            for part in _plain(held.detach()):
                digest.update(f"{tuple(part.shape)} {part.dtype} ".encode())
                digest.update(_checksums(part).cpu().numpy().data)
            known[id(tensor)] = digest.hexdigest()
        hashes[name] = known[id(tensor)]
    return hashes


def _checksums(part: Tensor) -> Tensor:
    """The checksums of :func:`weight_fingerprint`: int64, two for every row."""
    data = part.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # words begin at multiples of their size
        data = data.clone()
    whole = len(data) - len(data) % (8 * _ROW)
    last = F.pad(data[whole:], (0, 8 * _ROW - len(data) + whole))
    rows = (data[:whole].view(torch.int64).view(-1, _ROW), last.view(torch.int64).view(1, _ROW))
    factors = _factors().to(part.device)
    chunks = [chunk for group in rows for chunk in group.split(_CHUNK)]
    return torch.cat([_dot(x, factors) for chunk in chunks for x in (chunk, chunk >> 32)])


def _dot(rows: Tensor, factors: Tensor) -> Tensor:
    """``Σ_k rows[:, k] factors[k]`` modulo 2⁶⁴: (R,) int64."""
    if rows.is_cpu:
        return rows.mv(factors)
    return (rows * factors).sum(1)  # CUDA multiplies no matrices of integers


@cache
def _factors() -> Tensor:
    """Odd int64 numbers (1024,) that differ in their low 32 bits."""
    content = bytearray(hashlib.shake_256(b"icl-patch").digest(8 * _ROW))
    return torch.frombuffer(content, dtype=torch.int64) | 1


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or the parts of a quantised one."""
    if isinstance(tensor, DTensor):  # this rank has a part of it
        yield tensor.to_local()
        return
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def check_same_model(
    model: PreTrainedModel, name: str, dtype: str | None, expected: str, got: str | None = None
) -> None:
    """Check that a model has the weights and the dtype that a patch was computed with.

    Args:
        name: the name of the patch's model.
        dtype: its dtype, such as ``"torch.float32"``; None if unknown.
        expected: its fingerprint.
        got: the fingerprint of ``model``; taken now by default.

    Raises:
        FingerprintMismatch: the model has other weights or another dtype.
    """
    got, other = got or weight_fingerprint(model), dtype not in (None, str(model.dtype))
    if got != expected or other:
        own = model.config.name_or_path or type(model).__name__
        raise FingerprintMismatch(
            f"expected a patch of {own} (weights {got[:12]}… in {model.dtype}), got one of {name}"
            f" (weights {expected[:12]}… in {dtype or 'an unknown dtype'}): load that model"
            f"{f' with dtype={dtype}' if other else ''}, or make the patch again"
        )


def weight_state(model: nn.Module) -> list[tuple[int, int, torch.dtype]]:
    """Address, version and dtype of all parameters and persistent buffers.

    The state changes when a weight is replaced or written to in place. Torch does not count writes
    through ``.data``, or writes to tensors created in inference mode.
    """
    tensors: list[Tensor] = list(model.parameters())
    for module in model.modules():
        computed = module._non_persistent_buffers_set
        named = module._buffers.items()
        tensors += [x for name, x in named if x is not None and name not in computed]
    parts = [part for tensor in tensors for part in _plain(tensor)]
    return [(x.data_ptr(), 0 if x.is_inference() else x._version, x.dtype) for x in parts]


@dataclass(frozen=True)
class WeightCheck:
    """A hash of all weights of a model, as :meth:`icl_patch.ContextPatcher.check_weights` takes it.

    fingerprint: SHA-256, see :func:`weight_fingerprint`; changed: whether it differs from the one
    before.
    """

    fingerprint: str
    changed: bool


class WatchedWeights:
    """The fingerprint of a model's weights, taken again after each change that torch counts.

    A patcher and its patches share it. It does not keep the model alive. If the model is split over
    processes, each rank hashes its own part; the hashes of the other parts are those of the last
    :meth:`refresh`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._state: list[tuple[int, int, torch.dtype]] = []
        self._fingerprint: str | None = None
        # of whole tensors of all ranks, and of this rank's parts, at the last `refresh`
        self._others: dict[str, str] = {}
        self._own: dict[str, str] = {}

    def refresh(self) -> None:
        """Collect the hashes of all ranks if one of them has changed. All ranks must call it.

        Raises:
            RankError: two ranks have different contents of one tensor.
        """
        model = self._model()
        assert model is not None
        ranks = ranks_of(model)
        if ranks.size == 1 or not ranks.any(
            self._fingerprint is None or self._state != weight_state(model)
        ):
            return
        _watched[model] = self
        self._others = {}
        self._own = tensor_hashes(model)
        for rank, hashes in enumerate(ranks.exchange(tensor_hashes(model, whole=True))):
            for name, content in hashes.items():
                if self._others.setdefault(name, content) != content:
                    raise on_all_ranks(
                        RankError(
                            f"expected the same {name} on all ranks that have it, got another one"
                            f" on rank {ranks.ranks[rank]}: load the same model on all"
                        )
                    )
        self._check(model)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the present weights, except for changes that torch does not count."""
        model = self._model()
        assert model is not None
        if self._fingerprint is None or self._state != weight_state(model):
            return self._check(model).fingerprint
        return self._fingerprint

    def check(self) -> WeightCheck | None:
        """Hash all weights now; None if the model is gone."""
        model = self._model()
        return None if model is None else self._check(model)

    def _check(self, model: nn.Module) -> WeightCheck:
        before, self._state = self._fingerprint, weight_state(model)
        hashes = tensor_hashes(model)
        others = {name: x for name, x in hashes.items() if x != self._own.get(name)}
        self._fingerprint = _together(self._others | others)
        return WeightCheck(self._fingerprint, before not in (None, self._fingerprint))


_watched: "weakref.WeakKeyDictionary[nn.Module, WatchedWeights]" = weakref.WeakKeyDictionary()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over a tokenizer's vocabulary and special tokens."""
    description = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": sorted(map(str, tokenizer.all_special_tokens)),
    }
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
