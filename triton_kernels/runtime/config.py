"""The kernels' block sizes, from data files by GPU, dtype and shape class in ``configs/``.

A configuration fixes the order in which K is summed. It is chosen from (N, dtype, GPU), never from
M, so a row has the same bits however many rows there are.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files

import torch

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Config:
    """How the linear kernels are compiled.

    dot: matrix units (``tl.dot``), else fused multiply-adds; block_m: rows per program, on matrix
        units twice as many for more than ``block_m`` rows of one stream;
    block_n: outputs per program (for multiply-adds: with up to 4 rows, fewer with more);
    block_k: elements of K per step, a multiple of 64; num_warps, num_stages: Triton's; fused: a
        program computes up to so many coefficients z·v itself; more are computed by a launch before
        it, with the same bits; sums: running sums of an output on matrix units, each of one part of
        block_k: as many chains of instructions that do not wait for each other.
    """

    dot: bool
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fused: int = 32
    sums: int = 1

    @property
    def arithmetic(self) -> "Config":
        """The configuration without the entries that change no bits and that the maps of one launch
        can share.
        """
        return replace(self, num_stages=1, fused=1)


@dataclass(frozen=True)
class TunedConfig:
    """A configuration and the N it serves: up to max_n; None is any."""

    dtype: str
    max_n: int | None
    config: Config


def slug(gpu: str) -> str:
    """The name of a GPU's data file: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def parse(text: str) -> tuple[TunedConfig, ...]:
    """The entries of a data file."""
    items = json.loads(text)["entries"]
    return tuple(TunedConfig(**item | {"config": Config(**item["config"])}) for item in items)


def dump(head: dict[str, object], entries: tuple[TunedConfig, ...]) -> str:
    """The text of a data file, which :func:`parse` reads; head: its other values by name."""
    return json.dumps(head | {"entries": [*map(asdict, entries)]}, indent=1) + "\n"


def data_files(capability: int | None = None) -> dict[str, tuple[TunedConfig, ...]]:
    """Every data file's entries, by file name without its ending; with a compute capability (80,
    90, …) those of the files for GPUs that have it.
    """
    texts = {
        file.name.removesuffix(".json"): file.read_text(encoding="utf-8")
        for file in (files("icl_patch.kernels") / "configs").iterdir()
        if file.name.endswith(".json")
    }
    return {
        name: parse(text)
        for name, text in texts.items()
        if capability is None or capability in json.loads(text)["capabilities"]
    }


@cache
def entries_for(gpu: str) -> tuple[TunedConfig, ...]:
    """The entries of the GPU's data file, else of ``untuned.json``."""
    known = data_files()
    return known.get(slug(gpu), known["untuned"])


@cache
def config_for(gpu: str, dtype: torch.dtype, n: int) -> Config:
    """The configuration for a weight (N, ·): the first entry that serves it.

    Args:
        gpu: the device's name as CUDA tells it; a name without a data file gets the default.
        dtype: the weight's.
        n: its number of outputs.

    Raises:
        LookupError: no entry serves the shape.
    """
    for entry in entries_for(gpu):
        if entry.dtype == DTYPES[dtype] and (entry.max_n is None or n <= entry.max_n):
            return entry.config
    raise LookupError(f"no configuration for {gpu or 'the default'}, {dtype}, N = {n}")


@cache
def gpu_name(device: torch.device) -> str:
    """The GPU's name, which its data file is named after; empty for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
