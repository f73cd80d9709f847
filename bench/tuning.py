"""Measuring the kernels' configurations on a GPU and writing its data file: ``icl-patch tune``."""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch.bench.cases.linear import CONV1D, SHAPES, cold
from icl_patch.bench.harness import reason
from icl_patch.bench.results import environment, write_whole
from icl_patch.bench.timing import InTurn, compare
from icl_patch.kernels.compilation import tuning
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

ROWS = {"gemv": (1, 2, 4, 8, 16), "gemm": (32, 64, 512)}
QUICK_ROWS = {"gemv": (1, 8), "gemm": (32, 512)}
QUICK_SHAPES = ("Gemma-3-1B down", "Gemma-3-4B up", "Gemma-3-27B up")  # one in each class of N
# rows and rank, where the coefficients' place matters
FUSED_CASES = ((1, 1), (8, 1), (16, 1), (4, 4), (1, 16))

Measure = Callable[[Config, int, int], float | None]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TuningOptions:
    """What is tuned: the device, dtypes, whether in short, and how many processes compile."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    quick: bool = False
    workers: int | None = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(N, K) of the weights to measure."""
        stored = {name: shape for name, shape in SHAPES.items() if CONV1D not in name}
        return [shape for name, shape in stored.items() if not self.quick or name in QUICK_SHAPES]

    def rows(self, path: str) -> tuple[int, ...]:
        """The numbers of rows a path is measured at: one configuration serves them all, as it
        fixes the order of summation.
        """
        return (QUICK_ROWS if self.quick else ROWS)[path]


def write(
    plan: TuningOptions, folder: Path | None, progress: Progress
) -> tuple[Path, tuple[TunedConfig, ...]]:
    """Tune and write ``<gpu>.json``, whole; entries of dtypes that are not tuned stay as they are.

    Returns:
        The file and its entries.

    Raises:
        ValueError: the device is no CUDA device, or no candidate serves some class of shapes.
    """
    if plan.device.type != "cuda":
        raise ValueError(f"expected a CUDA device to tune for, got {plan.device}")
    gpu = gpu_name(plan.device)
    with tuning.compilers(plan.workers) as pool:
        entries = choose(
            plan, entries_for(gpu), functools.partial(Measuring, plan, pool, progress), progress
        )
    found = environment(plan.device)
    where = ", ".join(f"{name} {found[name]}" for name in ("icl_patch", "torch", "triton", "cuda"))
    note = f"Measured on this GPU by icl-patch tune{' --quick' if plan.quick else ''}: {where}."
    path = (folder or Path(str(files("icl_patch.kernels") / "configs"))) / f"{slug(gpu)}.json"
    write_whole(path, dump(gpu, note, entries))
    return path, entries


def choose(
    plan: TuningOptions,
    known: Sequence[TunedConfig],
    measuring: "Callable[[torch.dtype, str], Measuring]",
    progress: Progress,
) -> tuple[TunedConfig, ...]:
    """The entries of the tuned dtypes, by what ``measuring(dtype, path)`` says, then those of the
    others as they were.
    """
    chosen: list[TunedConfig] = []
    for dtype in plan.dtypes:
        for path in PATHS:
            progress(f"{DTYPES[dtype]}, {path}")
            chosen += _choose(plan, dtype, path, measuring(dtype, path))
    tuned = {DTYPES[dtype] for dtype in plan.dtypes}
    return tuple(chosen + [entry for entry in known if entry.dtype not in tuned])


def _choose(
    plan: TuningOptions, dtype: torch.dtype, path: str, measuring: "Measuring"
) -> list[TunedConfig]:
    """Blocks first, then, with them, how many coefficients a program sums itself."""
    tried = tuning.candidates(dtype, path)
    measuring.compile(tried, [(rows, 1) for rows in plan.rows(path)], plan.shapes)
    blocks = tuning.tune(
        dtype, path, plan.shapes, measuring.blocks, problem=measuring.problem, tried=tried
    )
    if path != GEMV:
        return list(blocks)
    found, lower = [], 0
    for entry in blocks:
        mine = [
            (n, k)
            for n, k in plan.shapes
            if n > lower and (entry.max_n is None or n <= entry.max_n)
        ]
        variants = tuning.with_fused(entry.config)
        measuring.compile(variants, FUSED_CASES, mine)
        [best] = tuning.tune(
            dtype,
            path,
            mine,
            measuring.fused,
            limits=(),
            problem=measuring.problem,
            tried=variants,
        )
        found.append(replace(best, max_n=entry.max_n))
        lower = entry.max_n or lower
    return found


class Measuring:
    """Times of configurations of one dtype and path on a GPU, relative to ``F.linear``; results
    are checked before.
    """

    def __init__(
        self,
        plan: TuningOptions,
        pool: Executor,
        progress: Progress,
        dtype: torch.dtype,
        path: str,
    ) -> None:
        self._plan, self._pool, self._progress, self._dtype, self._path = (
            plan,
            pool,
            progress,
            dtype,
            path,
        )
        self._plains: dict[tuple[int, int, int], float] = {}
        self._weights: dict[tuple[int, int], list[Tensor]] = {}
        operands_of.cache_clear()

    def compile(
        self,
        configs: Iterable[Config],
        cases: Sequence[tuple[int, int]],
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """Everything that will be measured, side by side, into Triton's cache."""
        variants = [
            tuning.Variant(self._dtype, n, k, rows, rank, c)
            for c in configs
            for n, k in shapes
            for rows, rank in cases
        ]
        capability = torch.cuda.get_device_capability(self._plan.device)
        self._progress(f"compiling {len(variants)} variants")
        problems = tuning.compile_all(self._pool, variants, 10 * capability[0] + capability[1])
        if failed := [problem for problem in problems if problem is not None]:
            self._progress(
                f"{len(failed)} of them do not compile; the first: {failed[0].splitlines()[0]:.200}"
            )

    def problem(self, entry: TunedConfig) -> str | None:
        """Spills and the like, in any kernel that the entry is compiled to."""
        found = tuning.entry_problem(self._pool, entry)
        self._progress(f"{entry.config}: {found or 'chosen'}")
        return found

    def blocks(self, config: Config, n: int, k: int) -> float | None:
        """Over the path's numbers of rows, at rank 1."""
        return self._measure(config, n, k, [(rows, 1) for rows in self._plan.rows(self._path)])

    def fused(self, config: Config, n: int, k: int) -> float | None:
        """Over rows and ranks."""
        return self._measure(config, n, k, FUSED_CASES)

    def _measure(
        self, config: Config, n: int, k: int, cases: Sequence[tuple[int, int]]
    ) -> float | None:
        weights, total = self._cold(n, k), 0.0
        for rows, rank in cases:
            operands = operands_of(weights[0], rows, rank)
            try:
                if problem := check(operands, weights[0], config):
                    self._progress(f"{config} at {rows} rows of ({n}, {k}): {problem}")
                    return None
                seconds = _seconds(
                    functools.partial(_launch, operands, config=config), weights, self._plan.device
                )
            except Exception as error:  # does not fit, does not launch: another candidate will
                self._progress(f"{config} at {rows} rows of ({n}, {k}): {reason(error):.120}")
                return None
            total += seconds / self._plain(n, k, rows)
        return total

    def _cold(self, n: int, k: int) -> list[Tensor]:
        """Weights in turn; those of all shapes are kept, as every configuration goes through
        them.
        """
        if (n, k) not in self._weights:
            self._weights[n, k] = cold(self._plan.device, (n, k), self._dtype)
        return self._weights[n, k]

    def _plain(self, n: int, k: int, rows: int) -> float:
        """Seconds of ``F.linear``."""
        if (n, k, rows) not in self._plains:
            weights = self._cold(n, k)
            z = operands_of(weights[0], rows, 1).z
            self._plains[n, k, rows] = _seconds(
                lambda weight: F.linear(z, weight), weights, self._plan.device
            )
        return self._plains[n, k, rows]


def _seconds(
    function: Callable[[Tensor], object], weights: Sequence[Tensor], device: torch.device
) -> float:
    return compare({"": InTurn(function, weights)}, device, rounds=5)[""].median


@dataclass(frozen=True, eq=False)
class Operands:
    """z (M, K), u (M, R, N), v (M, R, K), and what the patched linear map of them is, (M, N)
    fp64.
    """

    z: Tensor
    u: Tensor
    v: Tensor
    expected: Tensor


@functools.lru_cache(maxsize=256)
def operands_of(weight: Tensor, rows: int, rank: int) -> Operands:
    """Random operands for a weight, the same every time."""
    n, k = weight.shape
    rng = torch.Generator(weight.device).manual_seed(rows)
    z, u, v = (
        torch.randn(size, generator=rng, device=weight.device)
        for size in ((rows, k), (rows, rank, n), (rows, rank, k))
    )
    z, v = z.to(weight.dtype), v / k**0.5
    coeff = (z.double().unsqueeze(1) * v.double()).sum(-1)
    expected = z.double() @ weight.double().T + (coeff.unsqueeze(-1) * u.double()).sum(1)
    return Operands(z, u, v, expected)


def _launch(
    operands: Operands, weight: Tensor, config: Config, rows: slice = slice(None)
) -> Tensor:
    return launch_linear(
        operands.z[rows], weight, operands.u[rows], operands.v[rows], config=config
    )


def check(operands: Operands, weight: Tensor, config: Config) -> str | None:
    """None if a configuration computes what it should, twice the same, and its last row as it does
    alone; else what it does not.
    """
    got = _launch(operands, weight, config)
    most = (
        torch.finfo(weight.dtype).eps + 2 * torch.finfo(torch.float32).eps * weight.shape[1] ** 0.5
    )
    error = float((got.double() - operands.expected).abs().max() / operands.expected.abs().max())
    if not error <= most:
        return f"expected the fp64 result within {most:.1e} of the largest element, got {error:.1e}"
    if not torch.equal(got, _launch(operands, weight, config)):
        return "expected the same bits twice, got others"
    if not torch.equal(got[-1:], _launch(operands, weight, config, slice(len(got) - 1, None))):
        return "expected the bits of the last row alone, got others beside the rest"
    return None
