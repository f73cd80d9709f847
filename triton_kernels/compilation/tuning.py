"""Tuning: the candidate configurations, and the choice among them. The caller measures; nothing
here runs at import.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context

import torch
import triton
from triton.backends.compiler import GPUTarget

from icl_patch.kernels.compilation import aot, specialisations
from icl_patch.kernels.ops.linear import plan_before, plan_linear
from icl_patch.kernels.runtime.config import DTYPES, GEMV, Config, TunedConfig
from icl_patch.kernels.runtime.launching import Launch

FUSED = (1, 4, 8, 16, 32, 64)
"""How many coefficients a program may sum itself, to try once the blocks are chosen: the bits are
the same.
"""

SPLITS = (1, 2, 4, 8)
"""Over how many programs an output's K may be split, to try for weights of few outputs."""

LIMITS = (1728, 4096, 16384)
"""The largest N of the classes that have a configuration of their own; one more has no limit."""


def candidates(dtype: torch.dtype, path: str) -> tuple[Config, ...]:
    """The configurations a tuning run tries for one path. Which of them compile without spills
    depends on the GPU.
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


def classes(
    shapes: Sequence[tuple[int, int]],
) -> Iterator[tuple[int | None, list[tuple[int, int]]]]:
    """The classes of N: up to which (None: any), and the shapes (N, K) in it. One without shapes is
    left out but the last: the entry of the next larger class serves it.
    """
    for lower, upper in zip((0, *LIMITS), (*LIMITS, None), strict=True):
        mine = [(n, k) for n, k in shapes if n > lower and (upper is None or n <= upper)]
        if mine or upper is None:
            yield upper, mine


def tune(
    dtype: torch.dtype,
    path: str,
    upper: int | None,
    shapes: Sequence[tuple[int, int]],
    measure: Callable[[Config, int, int], float | None],
    problem: Callable[[TunedConfig], str | None],
    tried: Sequence[Config],
) -> TunedConfig:
    """The entry of a class of N: the candidate that is closest to the fastest at each of the
    class's shapes, on average.

    Args:
        dtype, path, upper: of the entry.
        shapes: weights (N, K) to measure.
        measure: the time of a configuration at (N, K), over the relevant numbers of rows; None
            if it does not run there or its result is wrong.
        problem: why an entry cannot be kept, or None; asked of the best, then of the next best,
            until one can.
        tried: the configurations.

    Raises:
        ValueError: no candidate runs at all shapes and can be kept, or there is no shape.
    """
    times = {config: [measure(config, n, k) for n, k in shapes] for config in tried}
    whole = {config: [t for t in found if t is not None] for config, found in times.items()}
    whole = {config: found for config, found in whole.items() if len(found) == len(shapes) > 0}
    best = [min(found) for found in zip(*whole.values(), strict=True)]
    for config in sorted(
        whole, key=lambda config: sum(t / b for t, b in zip(whole[config], best, strict=True))
    ):
        entry = TunedConfig(path, DTYPES[dtype], upper, config)
        if problem(entry) is None:
            return entry
    raise ValueError(
        f"expected a candidate that runs at {shapes or 'a shape'} with N ≤ {upper or 'any'}, found"
        " none"
    )


@dataclass(frozen=True)
class Variant:
    """One call to compile: a weight (N, K), rows, the rank of factors (rows, R, ·) in fp32, and
    how; ``record`` for both streams.
    """

    dtype: torch.dtype
    n: int
    k: int
    rows: int
    rank: int
    config: Config
    record: bool = False

    def launches(self) -> Iterator[Launch]:
        """Its kernels, on tensors without storage."""

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        rows, rank = self.rows, self.rank
        z = empty((1 + self.record) * rows, self.k, dtype=self.dtype)
        weight = empty(self.n, self.k, dtype=self.dtype)
        if self.record:
            yield plan_linear(
                z, weight, None, None, None, None, self.dtype, self.config, record=True
            )
            return
        u, v = empty(rows, rank, self.n), empty(rows, rank, self.k)
        before = plan_before(z, v, None, self.config)
        if before is not None:
            yield before
        yield plan_linear(z, weight, u, v, None, None, self.dtype, self.config)


class _Ahead:
    """A driver that tells Triton's compiler which GPU to compile for, without touching one."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # kernels are kept by device: those for another target are others
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_variant(variant: Variant, capability: int) -> str | None:
    """Compile the variant's kernels into Triton's cache on disk, where a launch will find them.

    Call it in a separate process: it replaces Triton's driver.

    Returns:
        None, or why the variant does not compile.
    """
    triton.runtime.driver.set_active(_Ahead(capability))
    try:
        for launch in variant.launches():
            launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.options)
    except Exception as error:  # the compiler's errors have no common class
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def compilers(workers: int | None = None) -> Iterator[Executor]:
    """Processes to compile in, side by side, as many as there are cores: a kernel takes seconds and
    one core.
    """
    with ProcessPoolExecutor(
        workers or os.cpu_count() or 1, mp_context=get_context("spawn")
    ) as pool:
        yield pool


def compile_all(pool: Executor, variants: Sequence[Variant], capability: int) -> list[str | None]:
    """:func:`compile_variant` of each."""
    return list(pool.map(compile_variant, variants, repeat(capability)))


def entry_problem(pool: Executor, entry: TunedConfig, capabilities: Sequence[int]) -> str | None:
    """Why an entry cannot be in a data file for GPUs of these compute capabilities: one of its
    kernels spills or does not fit.
    """
    calls = []
    for variant, rank, gemv_rows, gemm_rows in specialisations.VARIANTS:
        rows = gemv_rows if entry.path == GEMV else gemm_rows
        if rows is not None:
            calls += [(entry, variant, rank, rows, capability) for capability in capabilities]
    return next(
        (
            problem
            for problem in pool.map(_kernel_problem, *zip(*calls, strict=True))
            if problem is not None
        ),
        None,
    )


def _kernel_problem(
    entry: TunedConfig, variant: str, rank: int | None, rows: int, capability: int
) -> str | None:
    problem = aot.resources(
        specialisations.linear_launch(entry, variant, rank, rows), capability
    ).problem(capability)
    return problem and f"{variant} on sm_{capability} {problem}"


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


def with_fused(config: Config) -> tuple[Config, ...]:
    """The configuration with every number of coefficients to try."""
    return tuple(replace(config, fused=fused) for fused in FUSED)
