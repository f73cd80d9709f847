"""Choosing the kernels' configurations on a GPU, by measuring, and writing its data file:
``icl-patch tune``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from icl_patch.kernels import compilation
from icl_patch.kernels.ops.linear import launch_linear
from icl_patch.kernels.runtime.config import (
    DTYPES,
    GEMV,
    PATHS,
    Config,
    TunedConfig,
    dump,
    entries_for,
    gpu_name,
    slug,
)
from icl_patch.patch.atomic_file import write_atomically

LIMITS = (1728, 4096, 16384)
"""The largest N of the classes that have a configuration of their own; one more has no limit."""

ROWS = {"gemv": (1, 2, 4, 8, 16), "gemm": (32, 64, 512)}
"""Numbers of rows a path is measured at, every second in short: one configuration serves them all,
as it fixes the order of summation.
"""

FUSED = (1, 4, 8, 16, 32, 64)
"""How many coefficients a program may sum itself, to try once the blocks are chosen: the bits are
the same.
"""
# rows and rank, where the coefficients' place matters
FUSED_CASES = ((1, 1), (8, 1), (16, 1), (4, 4), (1, 16))

SPLITS = (1, 2, 4, 8)
"""Over how many programs an output's K may be split, to try for weights of few outputs."""

Progress = Callable[[str], None]
Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class TuningOptions:
    """The device and dtypes to tune for, whether in short, and how many processes compile."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    quick: bool = False
    workers: int | None = None

    @property
    def capability(self) -> int:
        """The GPU's compute capability, 10 · major + minor."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor


def write(
    options: TuningOptions, folder: Path | None, progress: Progress
) -> tuple[Path, tuple[TunedConfig, ...]]:
    """Tune and write ``<gpu>.json``, whole, after every path of a dtype. The entries of others stay
    as they are.

    Returns:
        The file and its entries.

    Raises:
        ValueError: no candidate serves some class of shapes.
    """
    gpu, versions = gpu_name(options.device), environment(options.device)
    names = ("icl_patch", "torch", "triton", "cuda")
    where = ", ".join(f"{name} {versions[name]}" for name in names)
    note = f"Measured on this GPU by icl-patch tune{' --quick' if options.quick else ''}: {where}."
    head: dict[str, object] = {"gpu": gpu, "capabilities": [options.capability], "note": note}
    target = (folder or Path(str(files("icl_patch.kernels") / "configs"))) / f"{slug(gpu)}.json"
    entries = entries_for(gpu)
    # a kernel takes seconds and one core to compile
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"))
    with torch.cuda.device(options.device), pool:
        for dtype in options.dtypes:
            measuring = Measuring(options, pool, progress, dtype)
            for path in PATHS:
                key = (path, DTYPES[dtype])
                others = [entry for entry in entries if (entry.path, entry.dtype) != key]
                entries = (*choose(options, dtype, path, measuring), *others)
                write_atomically(target, [dump(head, entries).encode()])
    return target, entries


def choose(
    options: TuningOptions, dtype: torch.dtype, path: str, measuring: "Measuring"
) -> Iterator[TunedConfig]:
    """An entry for every class of N. Blocks come first; then, with them, splits of K and dependent
    launches; then how many coefficients a program sums itself.
    """
    cases = [(rows, 1) for rows in ROWS[path][:: 2 if options.quick else 1]]
    for upper, shapes in classes([size for name, size in SHAPES.items() if CONV1D not in name]):
        of = functools.partial(TunedConfig, path, DTYPES[dtype], upper)
        some = shapes[: 1 if options.quick else None]
        entry = best(of, candidates(dtype, path), some, cases, measuring)
        if path == GEMV:
            tried = with_launches(entry.config, upper, options.capability)
            entry = best(of, tried, some, cases, measuring)
            tried = tuple(replace(entry.config, fused=fused) for fused in FUSED)
            entry = best(of, tried, some, FUSED_CASES, measuring)
        yield entry


def classes(shapes: Shapes) -> Iterator[tuple[int | None, list[tuple[int, int]]]]:
    """The classes of N: up to which (None: any), and the shapes (N, K) in it. One without shapes is
    left out but the last: the entry of the next larger class serves it.
    """
    for lower, upper in zip((0, *LIMITS), (*LIMITS, None), strict=True):
        mine = [(n, k) for n, k in shapes if n > lower and (upper is None or n <= upper)]
        if mine or upper is None:
            yield upper, mine


def candidates(dtype: torch.dtype, path: str) -> tuple[Config, ...]:
    """The configurations to try for one path. Which of them compile without spills depends on the
    GPU.
    """
    shared_memory = 160 * 1024
    if path == GEMV and dtype == torch.float32:
        return tuple(
            Config(False, 16, block_n, 64, warps, stages)
            for block_n in (4, 8, 16, 32, 64)
            for warps in (1, 2, 4, 8)
            for stages in (4, 8)
            if 4 <= 32 * warps // block_n <= 32  # lanes of 64 that share the sums of an output
        )
    if path == GEMV:
        few, many = ((1, 4), (2, 4), (4, 4), (4, 1), (8, 1)), ((4, 1), (8, 1))
        return tuple(
            Config(True, 16, block_n, block_k, warps, stages, sums=sums)
            for block_n in (16, 32, 64, 128)
            for block_k in (64, 128, 256)
            for warps, sums in (few if block_n <= 32 else many)
            for stages in (3, 4, 5, 6)
            if stages * block_n * block_k * 2 <= shared_memory
        )
    return tuple(
        Config(True, block_m, block_n, 64, warps, stages)
        for block_m in (32, 64, 128)
        for block_n in (64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        if stages * (block_n + block_m) * 64 * dtype.itemsize <= shared_memory
    )


def with_launches(config: Config, upper: int | None, capability: int) -> tuple[Config, ...]:
    """The configuration with every number of splits to try for weights of up to ``upper`` outputs,
    each with and without programmatic dependent launch.
    """
    narrow = upper is not None and upper <= compilation.NARROW
    tried = (
        replace(config, splits=splits, pdl=pdl).for_capability(capability)
        for splits in (SPLITS if narrow else (1,))
        for pdl in (False, True)
    )
    return tuple(dict.fromkeys(tried))


def best(
    entry_of: Callable[[Config], TunedConfig],
    tried: Sequence[Config],
    shapes: Shapes,
    cases: Shapes,
    measuring: "Measuring",
) -> TunedConfig:
    """The entry with the candidate that is closest to the fastest at each of the class's shapes and
    at each case (rows and rank), on average.

    Raises:
        ValueError: no candidate runs at all shapes and can be kept, or there is no shape.
    """
    measuring.compile(tried, shapes, cases)
    times: dict[Config, list[float]] = {}
    for config in tried:
        found = [measuring.seconds(cases, config, n, k) for n, k in shapes]
        if found and all(found):
            times[config] = [seconds for of_shape in found for seconds in of_shape]
    fastest = [min(found) for found in zip(*times.values(), strict=True)]

    def distance(config: Config) -> float:
        return sum(t / b for t, b in zip(times[config], fastest, strict=True))

    for config in sorted(times, key=distance):
        if measuring.problem(entry := entry_of(config)) is None:
            return entry
    raise ValueError(f"expected a candidate that runs at {shapes or 'a shape'}, found none")


class Measuring:
    """Times of configurations of one dtype on a GPU; results are checked before."""

    def __init__(
        self, options: TuningOptions, pool: Executor, progress: Progress, dtype: torch.dtype
    ) -> None:
        self._device, self._capability = options.device, options.capability
        self._pool, self._progress, self._dtype = pool, progress, dtype
        # used in turn; those of all shapes are kept, as every configuration goes through them
        self._weights = functools.cache(lambda n, k: cold(options.device, (n, k), dtype))
        operands_of.cache_clear()

    def compile(self, configs: Sequence[Config], shapes: Shapes, cases: Shapes) -> None:
        """Compile everything that will be measured, in parallel, into Triton's cache."""
        jobs = [
            (self._capability, (config, self._dtype, size, rank, rows), False)
            for config in configs
            for size in shapes
            for rows, rank in cases
        ]
        self._progress(f"compiling {len(jobs)} variants")
        problems = [problem for problem in self._pool.map(kernel_problem, jobs) if problem]
        if problems:
            self._progress(f"{len(problems)} do not compile; the first: {problems[0]:.200}")

    def problem(self, entry: TunedConfig) -> str | None:
        """Spills and the like, in any kernel that the entry is compiled to."""
        problem = entry_problem(self._pool, entry, self._capability)
        self._progress(f"{entry.path} N ≤ {entry.max_n}, {entry.config}: {problem or 'chosen'}")
        return problem

    def seconds(self, cases: Shapes, config: Config, n: int, k: int) -> list[float]:
        """Of each case, a number of rows and a rank; none if one of them fails."""
        weights, found = self._weights(n, k), []
        for rows, rank in cases:
            try:
                check(weights[0], rows, rank, config)
                z, u, v, _ = operands_of(weights[0], rows, rank)
                call = functools.partial(launch_linear, z, u=u, v=v, config=config)
                found.append(compare({"": InTurn(call, weights)}, self._device)[""]["median"])
            except Exception as error:  # wrong, or does not fit: another candidate will
                self._progress(f"{config} at {rows} rows of ({n}, {k}): {reason(error):.120}")
                return []
        return found


def kernel_problem(job: tuple[int, tuple[Any, ...], bool]) -> str | None:
    """Compile a linear map: the capability, the arguments of
    :func:`icl_patch.kernels.compilation.linear_launch`, and whether its resources count. Why it
    fails, or None.
    """
    capability, arguments, in_full = job
    try:
        launch = compilation.linear_launch(*arguments)
        if in_full:
            return compilation.resources(launch, capability).problem(capability)
        compilation.compile_ahead(launch, capability)
    except Exception as error:  # the compiler's errors have no common class
        return reason(error)
    return None


def entry_problem(pool: Executor, entry: TunedConfig, capability: int) -> str | None:
    """Why an entry cannot be in a data file for GPUs of a compute capability: one of its kernels
    does not compile, spills or does not fit.
    """
    variants = dict(compilation.entry_variants(entry, capability))
    jobs = [(capability, arguments, True) for arguments in variants.values()]
    for variant, problem in zip(variants, pool.map(kernel_problem, jobs), strict=True):
        if problem:
            return f"{variant} on sm_{capability} {problem}"
    return None


@functools.lru_cache(maxsize=256)
def operands_of(weight: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z (M, K), u (M, R, N) and v (M, R, K) for a weight, random and the same every time, and the
    output of the patched linear map, (M, N) fp64.
    """
    n, k = weight.shape
    operands = random_operands((n, k), rows, rank, weight.dtype, weight.device)
    return *operands, expected_output(weight, *operands)


def check(weight: Tensor, rows: int, rank: int, config: Config) -> None:
    """Check a configuration's result.

    Raises:
        AssertionError: it is off, differs in a second call, or its last row differs from that row
            computed alone.
    """
    *operands, expected = operands_of(weight, rows, rank)

    def run(some: slice) -> Tensor:
        z, u, v = (x[some] for x in operands)
        return launch_linear(z, weight, u, v, config=config)

    output = run(slice(None))
    relative_error(output, expected, product_error_limit(weight.dtype, weight.shape[1]))
    if not torch.equal(output, run(slice(None))):
        raise AssertionError("expected the same bits twice, got others")
    if not torch.equal(output[-1:], run(slice(rows - 1, None))):
        raise AssertionError("expected the bits of the last row alone, got others beside the rest")
