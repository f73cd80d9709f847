"""The costs of a decode step beside its time: operators or launches, and memory.

They come from calls that are not timed.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, PreTrainedModel

from icl_patch import ContextPatch
from icl_patch.bench.timing import Call

# Kineto reads this when it first starts; without it every start and stop writes a line to stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


def profile_of(call: Call, device: torch.device) -> profile:
    """The profile of a call on the CPU, and on the GPU if it is the device."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize(device)
    return profiler


def profiled(call: Call, device: torch.device) -> dict[str, int]:
    """``operator calls`` on a CPU, without those that another operator runs, or ``launches`` of
    kernels, copies and CUDA graphs.
    """
    events: Any = profile_of(call, device).events() or ()
    if device.type == "cuda":
        return {"launches": sum(event.name.startswith(_LAUNCHES) for event in events)}
    operators = [event for event in events if "::" in event.name]
    outer = (x.cpu_parent is None or "::" not in x.cpu_parent.name for x in operators)
    return {"operator calls": sum(outer)}


def transient_bytes(call: Call, device: torch.device) -> int:
    """The peak of the memory that a call allocates on a GPU, in bytes, by torch's allocator."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def cache_bytes(cache: Cache | None) -> int:
    """The bytes of a cache's tensors, their spare room included."""
    storages: dict[int, int] = {}
    for layer in () if cache is None else cache.layers:
        for value in vars(layer).values():
            for tensor in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def weight_bytes(model: PreTrainedModel, patch: ContextPatch) -> int:
    """The bytes that a decode step must read: every parameter once, without an embedding table that
    is not the head's, and of the experts only those that the patch's tokens chose.
    """
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    unread = table.weight.nbytes if table.weight is not head.weight else 0
    for block, layer in zip(patch.blocks, patch.layers, strict=True):
        if block.spec.experts is not None:
            experts: Any = model.get_submodule(block.path_of(block.spec.experts))
            chosen = layer[f"{block.spec.experts}.index"].unique().numel()
            unread += sum(
                (len(matrices) - chosen) * matrices[0].nbytes for matrices in experts.parameters()
            )
    return sum(parameter.nbytes for parameter in model.parameters()) - unread
