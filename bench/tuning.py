"""Measuring the kernels' configurations on a GPU and writing its data file: ``icl-patch tune``."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.resources import files
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
    parse,
    slug,
)
from icl_patch.patch.atomic_file import write_atomically

# Numbers of rows a path is measured at: one configuration serves them all, as it fixes the order of
# summation.
ROWS = {"gemv": (1, 2, 4, 8, 16), "gemm": (32, 64, 512)}
QUICK_ROWS = {"gemv": (1, 8), "gemm": (32, 512)}
# one in each class of N
QUICK_SHAPES = ("Gemma-3-1B down", "Llama-3-8B down", "Llama-3-8B up", "Gemma-3-27B up")
# rows and rank, where the coefficients' place matters
FUSED_CASES = ((1, 1), (8, 1), (16, 1), (4, 4), (1, 16))

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

    def cases(self, path: str) -> list[tuple[int, int]]:
        """The rows and rank 1 of the calls to measure."""
        return [(rows, 1) for rows in (QUICK_ROWS if self.quick else ROWS)[path]]


def write(
    options: TuningOptions, folder: Path | None, progress: Progress
) -> tuple[Path, tuple[TunedConfig, ...]]:
    """Tune and write ``<gpu>.json``, whole, after every entry; a stopped run is resumed. Entries
    that are not tuned stay as they are.

    Returns:
        The file and its entries.

    Raises:
        ValueError: the device is no CUDA device, or no candidate serves some class of shapes.
    """
    if options.device.type != "cuda":
        raise ValueError(f"expected a CUDA device to tune for, got {options.device}")
    gpu, versions = gpu_name(options.device), environment(options.device)
    where = ", ".join(
        f"{name} {versions[name]}" for name in ("icl_patch", "torch", "triton", "cuda")
    )
    note = f"Measured on this GPU by icl-patch tune{' --quick' if options.quick else ''}: {where}."
    head: dict[str, object] = {"gpu": gpu, "capabilities": [options.capability], "note": note}
    path = (folder or Path(str(files("icl_patch.kernels") / "configs"))) / f"{slug(gpu)}.json"
    known, chosen = entries_for(gpu), measured_before(path, note)
    if chosen:
        progress(f"{len(chosen)} entries of {path} are measured already")
    with torch.cuda.device(options.device), tuning.compilers(options.workers) as pool:
        measuring = functools.partial(Measuring, options, pool, progress)
        for entry in choose(options, chosen, measuring, progress):
            chosen.append(entry)
            unfinished = head | {"measured": len(chosen)}
            write_atomically(path, [dump(unfinished, in_place_of(known, chosen)).encode()])
    entries = in_place_of(known, chosen)
    write_atomically(path, [dump(head, entries).encode()])
    return path, entries


def measured_before(path: Path, note: str) -> list[TunedConfig]:
    """The entries that a run with the same note measured until it was stopped."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    head = json.loads(text)
    return list(parse(text)[: head.get("measured", 0)]) if head["note"] == note else []


def in_place_of(
    known: Sequence[TunedConfig], chosen: Sequence[TunedConfig]
) -> tuple[TunedConfig, ...]:
    """The chosen entries, then the known ones for shapes, paths and dtypes that they leave out."""

    def serves(new: TunedConfig, old: TunedConfig) -> bool:
        same = (new.path, new.dtype) == (old.path, old.dtype)
        return same and (new.max_n is None or (old.max_n is not None and old.max_n <= new.max_n))

    return (*chosen, *(old for old in known if not any(serves(new, old) for new in chosen)))


def choose(
    options: TuningOptions,
    before: Sequence[TunedConfig],
    measuring: "Callable[[torch.dtype, str], Measuring]",
    progress: Progress,
) -> Iterator[TunedConfig]:
    """The entries of the tuned dtypes that are not among those of ``before``, by the times of
    ``measuring(dtype, path)``.
    """
    done = {(entry.dtype, entry.path, entry.max_n) for entry in before}
    for dtype in options.dtypes:
        for path in PATHS:
            for upper, shapes in tuning.classes(options.shapes):
                if (DTYPES[dtype], path, upper) not in done:
                    progress(f"{DTYPES[dtype]}, {path}, N ≤ {upper or 'any'}")
                    yield _choose(options, dtype, path, upper, shapes, measuring(dtype, path))


def _choose(
    options: TuningOptions,
    dtype: torch.dtype,
    path: str,
    upper: int | None,
    shapes: Shapes,
    measuring: "Measuring",
) -> TunedConfig:
    """Blocks first; then, with them, splits of K and dependent launches; then how many coefficients
    a program sums itself.
    """

    def tune(cases: Sequence[tuple[int, int]], tried: Sequence[Config]) -> TunedConfig:
        measuring.compile(tried, cases, shapes)
        measure = functools.partial(measuring.seconds, cases)
        return tuning.tune(dtype, path, upper, shapes, measure, measuring.problem, tried)

    entry = tune(options.cases(path), tuning.candidates(dtype, path))
    if path != GEMV:
        return entry
    launches = tuning.with_launches(entry.config, upper, options.capability)
    entry = tune(options.cases(path), launches)
    return tune(FUSED_CASES, tuning.with_fused(entry.config))


class Measuring:
    """Times of configurations of one dtype and path on a GPU, relative to ``F.linear``; results
    are checked before.
    """

    def __init__(
        self,
        options: TuningOptions,
        pool: Executor,
        progress: Progress,
        dtype: torch.dtype,
        path: str,
    ) -> None:
        self._device, self._pool, self._capability = options.device, pool, options.capability
        self._progress, self._dtype = progress, dtype
        # used in turn; those of all shapes are kept, as every configuration goes through them
        self._weights = functools.cache(lambda n, k: cold(options.device, (n, k), dtype))
        self._plain = functools.cache(self._plain_seconds)
        operands_of.cache_clear()

    def compile(
        self, configs: Iterable[Config], cases: Sequence[tuple[int, int]], shapes: Shapes
    ) -> None:
        """Compile everything that will be measured, in parallel, into Triton's cache."""
        variants = [
            tuning.Variant(self._dtype, n, k, rows, rank, config)
            for config in configs
            for n, k in shapes
            for rows, rank in cases
        ]
        self._progress(f"compiling {len(variants)} variants")
        problems = tuning.compile_all(self._pool, variants, self._capability)
        if failed := [problem for problem in problems if problem is not None]:
            first = failed[0].splitlines()[0]
            self._progress(f"{len(failed)} of them do not compile; the first: {first:.200}")

    def problem(self, entry: TunedConfig) -> str | None:
        """Spills and the like, in any kernel that the entry is compiled to."""
        problem = tuning.entry_problem(self._pool, entry, [self._capability])
        self._progress(f"{entry.config}: {problem or 'chosen'}")
        return problem

    def seconds(
        self, cases: Sequence[tuple[int, int]], config: Config, n: int, k: int
    ) -> float | None:
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
        return compare({"": InTurn(function, weights)}, self._device, rounds=5)[""].median


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
