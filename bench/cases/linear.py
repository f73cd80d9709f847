"""The patched linear map against the plain one, and against other ways to the same result.

`patched_linear` is ours; every row has its own factors. `F.linear` is the plain map, without a
patch. `unfused` adds the low-rank term in separate operations. `W + ΔW` builds the changed weight
and multiplies (older tables have it in existing memory too, `in a buffer`), and `PEFT` is that
library's LoRA layer; these have one patch for all rows, which is less work than ours. Several
copies of the weight are used in turn, so that none is in a cache. GB/s counts every operand once.
The ceiling is the bandwidth of `reading W`, torch's sum of the weight, timed beside the others (in
tables without that column, of the best of several reads and copies before them). The error is the
largest difference from fp64, relative to the largest output.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch import ops
from icl_patch.bench.baselines import has_peft, lora_layer
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.timing import COLD, InTurn

# (N, K) of the readers and writers of an MLP, the most telling first.
SHAPES = {
    "Gemma-3-1B up": (6912, 1152),
    "Gemma-3-1B down": (1152, 6912),
    "Llama-3-8B up": (14336, 4096),
    "Llama-3-8B down": (4096, 14336),
    "Gemma-3-4B up": (10240, 2560),
    "Gemma-3-4B down": (2560, 10240),
    "Gemma-3-12B up": (15360, 3840),
    "Gemma-3-12B down": (3840, 15360),
    "Gemma-3-27B up": (21504, 5376),
    "Gemma-3-27B down": (5376, 21504),
    "Llama-3-70B up": (28672, 8192),
    "Llama-3-70B down": (8192, 28672),
    "Qwen3-0.6B up": (3072, 1024),
    "Qwen3-0.6B down": (1024, 3072),
    "GPT-2 XL up, Conv1D": (6400, 1600),
}
CONV1D = "Conv1D"  # of a matrix that is stored as (K, N)
ON_CPU = (
    "Gemma-3-1B up",
    "Gemma-3-1B down",
    "Gemma-3-4B up",
    "Llama-3-8B up",
    f"GPT-2 XL up, {CONV1D}",
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
RANKS = (1, 4, 16)
DTYPES = (torch.bfloat16, torch.float32)
READ = "reading W"


def cases(device: torch.device, quick: bool) -> list[Case]:
    """The whole grid, or a part that takes a few minutes, of rank 1: on a GPU bf16, on a CPU few
    rows and weights from 16 MB to 0.23 GB. The cases of a weight come in sequence.
    """
    shapes, dtypes, ranks, most = [*SHAPES], [*DTYPES], [*RANKS], ROWS[-1]
    if quick:
        ranks = [1]
        if device.type == "cuda":
            dtypes = [torch.bfloat16]
        else:
            shapes, most = [*ON_CPU], 16
    return [
        Case(
            f"{matrix} {n} × {k} {dtype_name(dtype)} M={rows} R={rank}",
            functools.partial(comparison, matrix, dtype, rows, rank, device),
        )
        for matrix, dtype, rank, rows in itertools.product(shapes, dtypes, ranks, ROWS)
        for n, k in [SHAPES[matrix]]
        if rows <= most
    ]


@functools.lru_cache(maxsize=1)
def cold(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Copies of one weight, as many as no cache holds: used in turn, each is read from memory."""
    count = max(2, COLD // (shape[0] * shape[1] * dtype.itemsize))
    weight = (
        torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
        / shape[1] ** 0.5
    ).to(dtype)
    return [weight, *(weight.clone() for _ in range(count - 1))]


def comparison(
    matrix: str, dtype: torch.dtype, rows: int, rank: int, device: torch.device
) -> Comparison:
    """The calls of one case, on operands of the size that a model has."""
    n, k = SHAPES[matrix]
    weights = cold(device, (n, k), dtype)
    if CONV1D in matrix:
        weights = [weight.view(k, n).T for weight in weights]
    z, u, v = random_operands((n, k), rows, rank, dtype, device)
    plain = _plain(weights[0], z)
    per_row, shared = (plain + _term(z, u[:m], v[:m]) for m in (rows, 1))
    expected = {"patched_linear": per_row, "F.linear": plain, "unfused": per_row}
    u_all, v_all, column = u.to(dtype), v.to(dtype), z.unsqueeze(2)
    functions: dict[str, Callable[[Tensor], object]] = {
        "patched_linear": lambda weight: ops.patched_linear(z, weight, u, v),
        "F.linear": lambda weight: F.linear(z, weight),
        "unfused": lambda weight: (  # as LoRA layers do it
            F.linear(z, weight) + torch.bmm(torch.bmm(v_all, column).mT, u_all).squeeze(1)
        ),
        "W + ΔW": lambda weight: F.linear(z, weight + u_all[0].T @ v_all[0]),
    }
    size, ends = n * k * dtype.itemsize, rows * (n + k) * dtype.itemsize
    factors = rows * rank * (n + k) * u.itemsize
    functions[READ] = _read
    nbytes = {"patched_linear": size + ends + factors, "F.linear": size + ends, READ: size}
    turn = itertools.count()
    calls = {name: InTurn(function, weights, turn) for name, function in functions.items()}
    if has_peft():
        calls["PEFT"] = InTurn(
            lambda layer: layer(z), [lora_layer(weight, u[0], v[0]) for weight in weights], turn
        )

    def check(name: str, result: Any) -> float | None:
        if name == READ:
            return None
        # the others round the weight, the factors or the parts too
        roundings = 1 if name in ("patched_linear", "F.linear") else 8
        limit = product_error_limit(dtype, k, roundings)
        return relative_error(result, expected.get(name, shared), limit)

    return Comparison("patched_linear", calls, check, nbytes, READ)


def random_operands(
    shape: tuple[int, int], rows: int, rank: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """z (M, K), and u (M, R, N) and v (M, R, K) in fp32 of a patch as large as the plain output: a
    missing one shows.
    """
    (n, k), rng = shape, torch.Generator(device).manual_seed(1)
    z, u, v = (
        torch.randn(size, generator=rng, device=device)
        for size in ((rows, k), (rows, rank, n), (rows, rank, k))
    )
    return z.to(dtype), u, v / k**0.5


def expected_output(weight: Tensor, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``W z + Σ_r (v_r·z) u_r`` in fp64: (M, N)."""
    return _plain(weight, z) + _term(z, u, v)


def product_error_limit(dtype: torch.dtype, k: int, roundings: int = 1) -> float:
    """The error of sums of K products in fp32 and of some roundings to the dtype."""
    return roundings * torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * k**0.5


def _plain(weight: Tensor, z: Tensor) -> Tensor:
    """``z Wᵀ`` in fp64, block by block: a wide copy of the whole weight may not fit."""
    return torch.cat(
        [z.double() @ part.double().T for part in weight.split(max(1, 2**25 // weight.shape[1]))], 1
    )


def _term(z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``Σ_r (z·v_r) u_r`` in fp64, rank by rank, for factors (M, R, ·) or (1, R, ·)."""
    term = torch.zeros(len(z), u.shape[2], dtype=torch.float64, device=z.device)
    for r in range(u.shape[1]):
        term += (z.double() * v[:, r].double()).sum(1, keepdim=True) * u[:, r].double()
    return term


def _read(weight: Tensor) -> Tensor:
    """The sum of the weight's memory in words of fp32: torch's fastest read."""
    stored = weight if weight.is_contiguous() else weight.T
    return stored.flatten()[: weight.numel() // 2 * 2].view(torch.float32).sum()
