"""Hashes by which a patch knows the model and the tokenizer it was computed with."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from icl_patch.models.block_spec import Block


def patched_tensors(model: nn.Module, blocks: Iterable[Block]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a patch of these blocks changes, by name, in order.

    Raises:
        AttributeError: the model has no such module.
    """
    for block in blocks:
        for part in block.spec.patched:
            module = model.get_submodule(block.path_of(part))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                yield f"{block.path_of(part)}.{name}", tensor


def _other_parameters(model: nn.Module, blocks: Iterable[Block]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that such a patch leaves alone, which its effect depends on as well."""
    patched = {id(tensor) for _, tensor in patched_tensors(model, blocks)}
    yield from (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in patched
    )


def weight_fingerprint(model: nn.Module, blocks: Iterable[Block]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, in order: of all the weights that a patch
    changes, and of a sample of the others.

    The sample has an element at least of every row and every column of a matrix.

    Raises:
        AttributeError: the model has no such module.
    """
    blocks = tuple(blocks)
    digest = hashlib.sha256()
    for tensors, whole in (
        (patched_tensors(model, blocks), True),
        (_other_parameters(model, blocks), False),
    ):
        for name, tensor in tensors:
            for part in _plain(tensor.detach()):
                digest.update(f"{name} {tuple(part.shape)} {part.dtype}".encode())
                content = (part if whole else _sample(part)).contiguous().cpu().reshape(-1)
                digest.update(content.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weight_state(model: nn.Module, blocks: Iterable[Block]) -> list[tuple[int, int, torch.dtype]]:
    """What changes when any of a model's weights is written to or replaced, at a small part of the
    cost of reading them.

    A write through ``.data``, or to a tensor that was made in inference mode, is counted nowhere.
    To the weights that a patch of these blocks changes it is seen by what it leaves in a sample:
    one element at least of every row and every column of a matrix, and of the matrices of many
    experts as many as of one. So a change of less than that, a single element's, may go unseen, and
    so to the others.
    """
    blocks = tuple(blocks)
    others = [part for _, tensor in _other_parameters(model, blocks) for part in _plain(tensor)]
    state = [
        (part.data_ptr(), 0 if part.is_inference() else part._version, part.dtype)
        for part in others
    ]
    for block in blocks:
        parts = [
            part.detach()
            for _, tensor in patched_tensors(model, [block])
            for part in _plain(tensor)
        ]
        state += [
            (part.data_ptr(), 0 if part.is_inference() else part._version, part.dtype)
            for part in parts
        ]
        samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for part in parts:
            samples.setdefault((part.device, part.dtype), []).append(_sample(part))
        # mostly one kind: the device is waited for once a block
        for (_, dtype), alike in samples.items():
            with torch.autocast(part.device.type, enabled=False):
                content = torch.cat(alike).view(torch.uint8).cpu().numpy().tobytes()
            state.append((len(content), hash(content), dtype))
    return state


def _sample(part: Tensor) -> Tensor:
    """Elements of a tensor, at one distance from each other, as a view (n,): of a matrix they go
    through all rows and all columns.
    """
    # as it lies in memory: nothing is copied
    laid = part.permute(sorted(range(part.dim()), key=part.stride, reverse=True))
    flat, (height, width) = laid.reshape(-1), (1, 1, *laid.shape)[-2:]
    every = max(len(flat) // max(height, width, 1), 1)
    while math.gcd(every, width) > 1:  # else some columns are never met
        every -= 1
    return flat[::every]


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or the parts of a quantised one."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over a tokenizer's vocabulary and special tokens."""
    description = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": sorted(map(str, tokenizer.all_special_tokens)),
    }
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
