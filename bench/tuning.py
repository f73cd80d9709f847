"""Choosing the kernels' configurations on a GPU, by measuring, and writing its data file:
``icl-patch tune``.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from icl_patch.atomic_file import write_atomically
from icl_patch.bench.cases.linear import (
    CONV1D,
    SHAPES,
    cold,
    expected_output,
    product_error_limit,
    random_operands,
)
from icl_patch.bench.harness import reason, relative_error
from icl_patch.bench.results import environment
from icl_patch.bench.timing import InTurn, compare
from icl_patch.kernels.compilation import compile_ahead, linear_launches
from icl_patch.kernels.ops.linear import launch_linear
from icl_patch.kernels.runtime.config import (
    DTYPES,
    Config,
    TunedConfig,
    dump,
    entries_for,
    gpu_name,
    slug,
)

LIMITS = (1728, 4096, 16384, None)
"""The largest N of the classes that have a configuration of their own."""

CASES = ((1, 1), (4, 1), (16, 1), (32, 1))
"""Rows and rank at which candidates are measured, in short every second. All share a configuration,
because it fixes the order of summation.
"""

Progress = Callable[[str], None]
Shapes = Sequence[tuple[int, int]]


def write(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    quick: bool,
    folder: Path | None,
    progress: Progress,
) -> tuple[Path, tuple[TunedConfig, ...]]:
    """Tune and write ``<gpu>.json``, whole, after every dtype. Entries of others stay as they are.

    Returns:
        The file and its entries.

    Raises:
        ValueError: no candidate serves some class of shapes.
    """
    gpu, versions = gpu_name(device), environment(device)
    where = ", ".join(f"{name} {versions[name]}" for name in ("icl_patch", "torch", "triton"))
    head: dict[str, object] = {"gpu": gpu, "capabilities": [capability_of(device)]}
    head["note"] = f"Measured on this GPU by icl-patch tune{' --quick' if quick else ''}: {where}."
    target = (folder or Path(str(files("icl_patch.kernels") / "configs"))) / f"{slug(gpu)}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    entries = entries_for(gpu)
    # a process that has used the GPU cannot fork
    spawned, workers = get_context("spawn"), min(len(os.sched_getaffinity(0)), 16)
    with ProcessPoolExecutor(workers, spawned) as pool, torch.cuda.device(device):
        for dtype in dtypes:
            mine = choose(device, dtype, quick, progress, pool)
            others = [entry for entry in entries if entry.dtype != DTYPES[dtype]]
            entries = (*mine, *others)
            write_atomically(target, [dump(head, entries).encode()])
    return target, entries


def capability_of(device: torch.device) -> int:
    """A GPU's compute capability, 10 · major + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def choose(
    device: torch.device,
    dtype: torch.dtype,
    quick: bool,
    progress: Progress,
    pool: Executor,
) -> list[TunedConfig]:
    """The entries of a dtype, one for each class of N: first the fastest blocks, then how many
    coefficients a program sums itself.
    """
    chosen, least = [], 0
    cases = CASES[:: 2 if quick else 1]
    known = [size for name, size in SHAPES.items() if CONV1D not in name]
    for most in LIMITS:
        shapes = [(n, k) for n, k in known if n > least and (most is None or n <= most)]
        some = shapes[: 1 if quick else None]
        best = functools.partial(fastest, some, device, dtype, progress=progress, pool=pool)
        config = best(candidates(dtype), cases)
        fused = [replace(config, fused=n) for n in (1, 4, 8, 16, 32)]
        # 32 coefficients need most shared memory with rank 2 and 16 rows
        config = best(fused, ((1, 1), (8, 1), (4, 4), (16, 2)))
        progress(f"{DTYPES[dtype]} N ≤ {most}: {config}")
        chosen.append(TunedConfig(DTYPES[dtype], most, config))
        least = most or 0
    return chosen


def candidates(dtype: torch.dtype) -> list[Config]:
    """The configurations to try for a dtype."""
    if dtype == torch.float32:
        return [
            Config(False, 16, block_n, 64, warps, stages)
            for block_n in (4, 8, 16, 32)
            for warps in (2, 4, 8)
            for stages in (4, 8)
            if 4 <= 32 * warps // block_n <= 32  # lanes of 64 that share the sums of an output
        ]
    return [
        Config(True, 16, block_n, block_k, warps, stages, sums=sums)
        for block_n in (16, 32, 64)
        for block_k in (128, 256)
        for warps, sums in ((2, 4), (4, 4), (4, 1))
        for stages in (3, 5)
    ]


def fastest(
    shapes: Shapes,
    device: torch.device,
    dtype: torch.dtype,
    configs: Iterable[Config],
    cases: Shapes,
    progress: Progress,
    pool: Executor,
) -> Config:
    """The configuration that is closest to the fastest at each shape (N, K) and case, on average.
    They are compiled in the processes of ``pool``, and measured one after the other.

    Raises:
        ValueError: none runs everywhere.
    """
    times: dict[Config, list[float]] = {config: [] for config in configs}
    compiled = functools.partial(compile_linear, dtype, capability_of(device))
    with suppress(BrokenProcessPool):  # then the measurement compiles
        for _ in pool.map(compiled, itertools.product(shapes, cases, times)):
            pass
    for shape, case in itertools.product(shapes, cases):
        for config in list(times):
            try:
                times[config].append(seconds(cold(device, shape, dtype), *case, config))
            except Exception as error:  # wrong, does not compile or fit: another candidate will
                progress(f"{config}: {reason(error):.120}")
                del times[config]
    if not times:
        raise ValueError(f"expected a candidate that runs at {shapes}, found none")
    least = [min(found) for found in zip(*times.values(), strict=True)]

    def distance(config: Config) -> float:
        return sum(t / best for t, best in zip(times[config], least, strict=True))

    return min(times, key=distance)


def compile_linear(
    dtype: torch.dtype, capability: int, job: tuple[tuple[int, int], tuple[int, int], Config]
) -> None:
    """Compile what :func:`seconds` launches for a shape (N, K), a case and a configuration, into
    Triton's cache on disk; what does not compile, it reports.
    """
    shape, (rows, rank), config = job
    with suppress(Exception):
        for count in dict.fromkeys((rows, 1)):
            for launch in linear_launches(config, dtype, shape, rank, count):
                compile_ahead(launch, capability)


def seconds(weights: list[Tensor], rows: int, rank: int, config: Config) -> float:
    """The median time of a configuration; its result is checked before."""
    n, k = weights[0].shape
    operands = random_operands((n, k), rows, rank, weights[0].dtype, weights[0].device)
    check(weights[0], operands, config)
    z, u, v = operands
    call = InTurn(lambda weight: launch_linear(z, weight, u, v, config=config), weights)
    return compare({"": call}, z.device)[""]["median"]


def check(weight: Tensor, operands: tuple[Tensor, Tensor, Tensor], config: Config) -> None:
    """Check a configuration's result for z (M, K), u (M, R, N) and v (M, R, K).

    Raises:
        AssertionError: it is off, differs in a second call, or its last row differs from that row
            computed alone.
    """

    def run(some: slice) -> Tensor:
        z, u, v = (x[some] for x in operands)
        return launch_linear(z, weight, u, v, config=config)

    output = run(slice(None))
    limit = product_error_limit(weight.dtype, weight.shape[1])
    relative_error(output, expected_output(weight, *operands), limit)
    if not torch.equal(output, run(slice(None))):
        raise AssertionError("expected the same bits twice, got others")
    if not torch.equal(output[-1:], run(slice(-1, None))):
        raise AssertionError("expected the bits of the last row alone, got others with the rest")
