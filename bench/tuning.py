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

import torch
import torch.nn.functional as F
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
from icl_patch.kernels.compilation import aot, specialisations
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
"""Numbers of rows a path is measured at: one configuration serves them all, as it fixes the order
of summation.
"""

# of a quick run; the shapes are one in each class of N
QUICK_ROWS = {"gemv": (1, 8), "gemm": (32, 512)}
QUICK_SHAPES = ("Gemma-3-1B down", "Llama-3-8B down", "Llama-3-8B up", "Gemma-3-27B up")

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
    def shapes(self) -> Shapes:
        """(N, K) of the weights to measure."""
        names = QUICK_SHAPES if self.quick else [name for name in SHAPES if CONV1D not in name]
        return [SHAPES[name] for name in names]

    @property
    def capability(self) -> int:
        """The GPU's compute capability, 10 · major + minor."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor


def write(
    options: TuningOptions, folder: Path | None, progress: Progress
) -> tuple[Path, tuple[TunedConfig, ...]]:
    """Tune and write ``<gpu>.json``, whole, after every entry. Entries that are not tuned stay as
    they are.

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
    path = (folder or Path(str(files("icl_patch.kernels") / "configs"))) / f"{slug(gpu)}.json"
    entries = entries_for(gpu)
    # a kernel takes seconds and one core to compile
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"))
    with torch.cuda.device(options.device), pool:
        chosen: list[TunedConfig] = []
        for entry in choose(options, functools.partial(Measuring, options, pool, progress)):
            chosen.append(entry)
            entries = in_place_of(entries_for(gpu), chosen)
            write_atomically(path, [dump(head, entries).encode()])
    return path, entries


def in_place_of(
    known: Sequence[TunedConfig], chosen: Sequence[TunedConfig]
) -> tuple[TunedConfig, ...]:
    """The chosen entries, then the known ones for shapes, paths and dtypes that they leave out."""

    def serves(new: TunedConfig, old: TunedConfig) -> bool:
        same = (new.path, new.dtype) == (old.path, old.dtype)
        return same and (new.max_n is None or (old.max_n is not None and old.max_n <= new.max_n))

    return (*chosen, *(old for old in known if not any(serves(new, old) for new in chosen)))


def choose(
    options: TuningOptions, measuring: "Callable[[torch.dtype], Measuring]"
) -> Iterator[TunedConfig]:
    """An entry for every dtype, path and class of N. Blocks come first; then, with them, splits of
    K and dependent launches; then how many coefficients a program sums itself.
    """
    rows = QUICK_ROWS if options.quick else ROWS
    for dtype in options.dtypes:
        measure = measuring(dtype)
        for path in PATHS:
            cases = [(count, 1) for count in rows[path]]
            for upper, shapes in classes(options.shapes):
                of = functools.partial(TunedConfig, path, DTYPES[dtype], upper)
                entry = best(of, candidates(dtype, path), shapes, cases, measure)
                if path == GEMV:
                    tried = with_launches(entry.config, upper, options.capability)
                    entry = best(of, tried, shapes, cases, measure)
                    tried = tuple(replace(entry.config, fused=fused) for fused in FUSED)
                    entry = best(of, tried, shapes, FUSED_CASES, measure)
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
    narrow = upper is not None and upper <= specialisations.NARROW
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
    """The entry with the candidate that is closest to the fastest at each of the class's shapes, on
    average.

    Raises:
        ValueError: no candidate runs at all shapes and can be kept, or there is no shape.
    """
    measuring.compile(tried, shapes, cases)
    times: dict[Config, list[float]] = {}
    for config in tried:
        found = [measuring.seconds(cases, config, n, k) for n, k in shapes]
        if found and None not in found:
            times[config] = [seconds for seconds in found if seconds is not None]
    fastest = [min(found) for found in zip(*times.values(), strict=True)]

    def distance(config: Config) -> float:
        return sum(t / b for t, b in zip(times[config], fastest, strict=True))

    for config in sorted(times, key=distance):
        if measuring.problem(entry := entry_of(config)) is None:
            return entry
    raise ValueError(f"expected a candidate that runs at {shapes or 'a shape'}, found none")


class Measuring:
    """Times of configurations of one dtype on a GPU, relative to ``F.linear``; results are checked
    before.
    """

    def __init__(
        self, options: TuningOptions, pool: Executor, progress: Progress, dtype: torch.dtype
    ) -> None:
        self._device, self._capability = options.device, options.capability
        self._pool, self._progress, self._dtype = pool, progress, dtype
        # used in turn; those of all shapes are kept, as every configuration goes through them
        self._weights = functools.cache(lambda n, k: cold(options.device, (n, k), dtype))
        self._plain = functools.cache(self._plain_seconds)
        operands_of.cache_clear()

    def compile(self, configs: Sequence[Config], shapes: Shapes, cases: Shapes) -> None:
        """Compile everything that will be measured, in parallel, into Triton's cache."""
        jobs = [
            (self._capability, config, self._dtype, size, rank, rows)
            for config in configs
            for size in shapes
            for rows, rank in cases
        ]
        self._progress(f"compiling {len(jobs)} variants")
        problems = [problem for problem in self._pool.map(compile_problem, jobs) if problem]
        if problems:
            self._progress(f"{len(problems)} do not compile; the first: {problems[0]:.200}")

    def problem(self, entry: TunedConfig) -> str | None:
        """Spills and the like, in any kernel that the entry is compiled to."""
        problem = entry_problem(self._pool, entry, self._capability)
        self._progress(f"{entry.path} N ≤ {entry.max_n}, {entry.config}: {problem or 'chosen'}")
        return problem

    def seconds(self, cases: Shapes, config: Config, n: int, k: int) -> float | None:
        """The sum over rows and ranks, relative to ``F.linear``; None if one of them fails."""
        weights, total = self._weights(n, k), 0.0
        for rows, rank in cases:
            operands = operands_of(weights[0], rows, rank)
            try:
                check(operands, weights[0], config)
                call = functools.partial(_launch, operands, config=config)
                seconds = self._time(call, weights)
            except Exception as error:  # wrong, or does not fit: another candidate will
                self._progress(f"{config} at {rows} rows of ({n}, {k}): {reason(error):.120}")
                return None
            total += seconds / self._plain(n, k, rows)
        return total

    def _plain_seconds(self, n: int, k: int, rows: int) -> float:
        weights = self._weights(n, k)
        z = operands_of(weights[0], rows, 1).z
        return self._time(lambda weight: F.linear(z, weight), weights)

    def _time(self, function: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
        return compare({"": InTurn(function, weights)}, self._device)[""]["median"]


def compile_problem(
    job: tuple[int, Config, torch.dtype, tuple[int, int], int | None, int],
) -> str | None:
    """Compile a linear map (the capability, then the arguments of
    :func:`icl_patch.kernels.compilation.specialisations.linear_launch`); why it fails, or None.
    """
    capability, config, dtype, size, rank, rows = job
    try:
        launch = specialisations.linear_launch(config, dtype, size, rank, rows)
        aot.compile_ahead(launch, capability)
    except Exception as error:  # the compiler's errors have no common class
        return reason(error)
    return None


def entry_problem(pool: Executor, entry: TunedConfig, capability: int) -> str | None:
    """Why an entry cannot be in a data file for GPUs of a compute capability: one of its kernels
    spills or does not fit.
    """
    variants = [variant for variant, _ in specialisations.entry_launches(entry, capability)]
    jobs = ((entry, capability, variant) for variant in variants)
    return next((problem for problem in pool.map(_kernel_problem, jobs) if problem), None)


def _kernel_problem(job: tuple[TunedConfig, int, str]) -> str | None:
    entry, capability, variant = job
    launch = dict(specialisations.entry_launches(entry, capability))[variant]
    problem = aot.resources(launch, capability).problem(capability)
    return problem and f"{variant} on sm_{capability} {problem}"


@dataclass(frozen=True, eq=False)
class Operands:
    """z (M, K), u (M, R, N), v (M, R, K), and the output of the patched linear map, (M, N) fp64."""

    z: Tensor
    u: Tensor
    v: Tensor
    expected: Tensor


@functools.lru_cache(maxsize=256)
def operands_of(weight: Tensor, rows: int, rank: int) -> Operands:
    """Random operands for a weight, the same every time."""
    n, k = weight.shape
    z, u, v = random_operands((n, k), rows, rank, weight.dtype, weight.device)
    return Operands(z, u, v, expected_output(weight, z, u, v))


def _launch(
    operands: Operands, weight: Tensor, config: Config, rows: slice = slice(None)
) -> Tensor:
    return launch_linear(
        operands.z[rows], weight, operands.u[rows], operands.v[rows], config=config
    )


def check(operands: Operands, weight: Tensor, config: Config) -> None:
    """Check a configuration's result.

    Raises:
        AssertionError: it is off, differs in a second call, or its last row differs from that row
            computed alone.
    """
    output = _launch(operands, weight, config)
    relative_error(output, operands.expected, product_error_limit(weight.dtype, weight.shape[1]))
    if not torch.equal(output, _launch(operands, weight, config)):
        raise AssertionError("expected the same bits twice, got others")
    if not torch.equal(
        output[-1:], _launch(operands, weight, config, slice(len(output) - 1, None))
    ):
        raise AssertionError("expected the bits of the last row alone, got others beside the rest")
