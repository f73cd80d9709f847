"""The patched linear against the plain one, the materialised one, and the low-rank term as operations of its own."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch import ops
from icl_patch.bench.harness import Call, Results, compare

# (N, K) of the readers and the writer of an MLP.
SHAPES = {
    "Qwen3-0.6B up": (3072, 1024),
    "Gemma-3-1B up": (6912, 1152),
    "Gemma-3-1B down": (1152, 6912),
    "Gemma-3-4B up": (10240, 2560),
    "Llama-3-8B up": (14336, 4096),
    "Llama-3-8B down": (4096, 14336),
    "Gemma-3-12B up": (15360, 3840),
    "Gemma-3-27B up": (21504, 5376),
    "Llama-3-70B up": (28672, 8192),
}
QUICK = ("Gemma-3-1B up", "Gemma-3-4B up", "Llama-3-8B up")
ROWS = (1, 2, 4, 8, 16)
RANKS = (1, 4, 16)
DTYPES = (torch.float32, torch.bfloat16)


def cold(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """As many weights of a shape as no cache holds: used in turn, each is read from memory."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else last_level_cache()
    size = shape[0] * shape[1] * dtype.itemsize
    count = max(2, min(-(-2 * cache // size) + 1, 4 * 2**30 // size))
    return [torch.randn(shape, device=device, dtype=dtype) / shape[1] ** 0.5 for _ in range(count)]


def last_level_cache() -> int:
    """Bytes, as Linux tells; 64 MiB where it does not."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(path.read_text().strip().removesuffix("K")) * 1024 for path in sizes), default=64 * 2**20)


def in_turn(function: Callable[[Tensor], object], weights: Sequence[Tensor]) -> Call:
    """Calls the function with the next weight each time."""
    turn = itertools.cycle(weights)
    return lambda: function(next(turn))


def check(weight: Tensor, z: Tensor, u: Tensor, v: Tensor) -> float:
    """Raises unless the op agrees with fp64 to the rounding of the output; returns the error relative to the largest output."""
    got = ops.patched_linear(z, weight, u, v).double()
    term = torch.einsum("mk,mrk,mrn->mn", z.double(), v.double(), u.double())
    want = z.double() @ weight.double().T + term
    error = float((got - want).abs().max() / want.abs().max())
    if error > 2 * torch.finfo(z.dtype).eps:
        raise AssertionError(f"expected the patched product within {2 * torch.finfo(z.dtype).eps:.1e} of the largest, got {error:.1e}")
    return error


def calls_for(weights: list[Tensor], z: Tensor, u: Tensor, v: Tensor) -> dict[str, Call]:
    """Ours first; materialised only for one row, whose weight it is."""
    narrow_u, narrow_v = u.to(z.dtype), v.to(z.dtype)

    def unfused(weight: Tensor) -> Tensor:
        coeff = torch.einsum("mk,mrk->mr", z, narrow_v)
        return F.linear(z, weight) + torch.einsum("mr,mrn->mn", coeff, narrow_u)

    calls = {
        "patched_linear": in_turn(lambda weight: ops.patched_linear(z, weight, u, v), weights),
        "F.linear": in_turn(lambda weight: F.linear(z, weight), weights),
        "unfused": in_turn(unfused, weights),
        "read": in_turn(lambda weight: weight.view(-1).view(torch.float32).sum(), weights),
    }
    if len(z) == 1 and u.shape[1] == 1:
        column, row = narrow_u[0, 0], narrow_v[0, 0]
        buffer = torch.empty_like(weights[0])
        calls["W + outer"] = in_turn(lambda weight: F.linear(z, weight + torch.outer(column, row)), weights)
        calls["addr into a buffer"] = in_turn(lambda weight: F.linear(z, torch.addr(weight, column, row, out=buffer)), weights)
    return calls


def run(device: torch.device, quick: bool, results: Results) -> Iterator[str]:
    """Adds the rows of every shape, dtype, number of rows and rank; yields what it is about to measure."""
    names = QUICK if quick else SHAPES
    for name, dtype in itertools.product(names, DTYPES):
        n, k = SHAPES[name]
        weights = cold(device, (n, k), dtype)
        for rows, rank in itertools.product(ROWS, RANKS):
            if rank > 1 and rows > 1:
                continue
            case = f"{name} {n} × {k} {str(dtype).removeprefix('torch.')} M={rows} R={rank}"
            yield case
            z = torch.randn(rows, k, device=device, dtype=dtype)
            u, v = torch.randn(rows, rank, n, device=device), torch.randn(rows, rank, k, device=device) / k
            error = check(weights[0], z, u, v)
            timings = compare(calls_for(weights, z, u, v), device, rounds=7 if quick else 15, least_seconds=0)
            size = weights[0].numel() * weights[0].element_size()
            share = timings["read"].median / timings["patched_linear"].median
            nbytes = {call: size for call in timings if call not in ("W + outer", "addr into a buffer")}
            results.add(case, timings, ours="patched_linear", nbytes=nbytes, notes={"patched_linear": {"of read": share, "error": error}})
