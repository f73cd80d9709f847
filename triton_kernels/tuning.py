"""Choosing configurations: what there is to try, and which of it to keep. The measuring is the caller's; nothing here runs by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from icl_patch.kernels.config import DTYPES, STREAM, Config, Entry


def candidates(dtype: torch.dtype, regime: str) -> tuple[Config, ...]:
    """The configurations a tuning run tries for one regime. Which of them compile without spills depends on the GPU."""
    found: list[dict[str, Any]] = []
    if regime == STREAM and dtype == torch.float32:
        for block_n in (4, 8, 16, 32, 64):
            found += [
                {"dot": False, "block_m": 16, "block_n": block_n, "block_k": 64, "num_warps": warps, "num_stages": stages}
                for warps in (4, 8)
                for stages in (2, 4)
            ]
    elif regime == STREAM:
        for block_n in (16, 32, 64, 128):
            found += [
                {"dot": True, "block_m": 16, "block_n": block_n, "block_k": block_k, "num_warps": warps, "num_stages": stages}
                for block_k in (64, 128, 256)
                for warps in (4, 8)
                for stages in (3, 4, 5, 6)
                if stages * block_n * block_k * 2 <= 160 * 1024
            ]
    else:
        size = dtype.itemsize
        for block_m in (32, 64, 128):
            found += [
                {"dot": True, "block_m": block_m, "block_n": block_n, "block_k": 64, "num_warps": warps, "num_stages": stages}
                for block_n in (64, 128)
                for warps in (4, 8)
                for stages in (2, 3, 4)
                if stages * (block_n + block_m) * 64 * size <= 160 * 1024
            ]
    return tuple(Config(**values) for values in found)


def tune(
    dtype: torch.dtype,
    regime: str,
    shapes: Sequence[tuple[int, int]],
    measure: Callable[[Config, int, int], float | None],
    limits: Sequence[int] = (4096, 16384),
) -> tuple[Entry, ...]:
    """One entry for every class of N: the candidate that is closest to the fastest at each of the class's shapes, on average.

    Args:
        dtype, regime: what the entries are for.
        shapes: weights (N, K) to measure.
        measure: the time of a configuration at (N, K), over whatever numbers of rows matter; None if it does not run there or its result
            is wrong.
        limits: the classes' largest N, ascending; one more class has none. A class without a shape gets no entry of its own: the next
            larger one serves it.

    Raises:
        ValueError: no candidate runs at all shapes of a class, or there is no shape for the last class.
    """
    entries = []
    for lower, upper in zip((0, *limits), (*limits, None), strict=True):
        mine = [(n, k) for n, k in shapes if n > lower and (upper is None or n <= upper)]
        if not mine and upper is not None:
            continue
        times = {config: [measure(config, n, k) for n, k in mine] for config in candidates(dtype, regime)}
        whole = {config: [t for t in found if t is not None] for config, found in times.items()}
        whole = {config: found for config, found in whole.items() if len(found) == len(mine)}
        if not mine or not whole:
            raise ValueError(f"expected a candidate that runs at {mine or 'a shape'} with N > {lower}, found none")
        best = [min(found) for found in zip(*whole.values(), strict=True)]
        chosen = min(whole, key=lambda config: sum(t / b for t, b in zip(whole[config], best, strict=True)))
        entries.append(Entry(regime, DTYPES[dtype], upper, None, chosen))
    return tuple(entries)
