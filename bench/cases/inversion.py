"""The RMSNorm inversion against 64-step bisection in plain torch, and against one RMSNorm of the
same tensor.

`inversion` is ours, `bisection` the other method of the native library, `whole update` the whole
stable update in one launch, `torch bisection` 64 steps of the whole batch in plain torch. `passes`
counts reads of a row: one for its extent, one for e and p, one for their sums, one for the result,
and one for each evaluation; these rows have a pole, so φ(0) is not evaluated. On a GPU all but
`torch bisection` are replayed as CUDA graphs.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch import ops
from icl_patch.bench.harness import Case, Comparison, dtype_name
from icl_patch.bench.timing import Call, InTurn, last_level_cache
from icl_patch.ops import reference

SHAPES = [(1, 1152), (32, 2560), (4096, 5376)]
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
DELTAS = [0.03, 0.3, 3.0]


def update_rows(
    batch: int, n: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """``delta, scale, h`` as a block has them: a scale about 1, and changes from small to larger
    than the norm's output.
    """
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(batch, n, generator=rng)
    scale = 1 + 0.4 * torch.randn(n, generator=rng)
    size = torch.tensor(DELTAS)[torch.arange(batch) % len(DELTAS)].unsqueeze(1)
    delta = size * torch.randn(batch, n, generator=rng)
    return delta.to(device, dtype), scale.to(device, dtype), h.to(device, dtype)


def check(result: ops.RMSNormInverse, target: Tensor, scale: Tensor, rms: Tensor) -> float:
    """Raises unless up to 64 rows agree with the reference; returns the largest difference relative
    to the RMS.
    """
    rows = slice(None, 64)
    expected = reference.invert_rmsnorm(target[rows], scale, rms[rows], EPS)
    if not torch.equal(result.status[rows], expected.status):
        raise AssertionError("the statuses differ from the reference's")
    error = float(((result.hidden[rows] - expected.hidden).abs().amax(1) / rms[rows]).max())
    if not error <= 1e-5:
        raise AssertionError(f"expected the reference's result within 1e-5, got {error}")
    return error


def cases(device: torch.device, quick: bool) -> list[Case]:
    """A case per shape and dtype."""
    most = 512 if quick and device.type == "cpu" else 4096
    return [
        Case(
            f"{min(batch, most)} × {n} {dtype_name(dtype)}",
            functools.partial(comparison, min(batch, most), n, dtype, device),
            {"batch": min(batch, most), "n": n},
        )
        for (batch, n), dtype in itertools.product(SHAPES, DTYPES)
    ]


def comparison(batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Comparison:
    """The calls of one case."""
    delta, scale, h = update_rows(batch, n, dtype, device)
    rms = h.double().square().mean(1).sqrt().to(dtype)
    target = (delta + scale * ops.rms_normalize(h, EPS)).to(dtype)
    result = ops.invert_rmsnorm(target, scale, rms, EPS, h)
    evaluations = result.evaluations.double()
    # In a model a small input is in the GPU's cache, as it was just computed; a large one is
    # not: two take turns.
    inputs = [(delta, target, h)]
    if device.type == "cuda" and 4 * h.nbytes > last_level_cache(device):
        inputs.append((delta.clone(), target.clone(), h.clone()))
    functions: dict[str, Callable[[tuple[Tensor, Tensor, Tensor]], object]] = {
        "inversion": lambda x: ops.invert_rmsnorm(x[1], scale, rms, EPS, x[2]),
        "RMSNorm": lambda x: F.rms_norm(x[2], (n,), scale, EPS),
        "bisection": lambda x: ops.invert_rmsnorm(x[1], scale, rms, EPS, x[2], method="bisection"),
        "whole update": lambda x: ops.stable_scale(x[0], scale, x[2], EPS),
    }
    turn = itertools.count()
    calls: dict[str, Call] = {
        name: InTurn(function, inputs, turn) for name, function in functions.items()
    }
    calls["torch bisection"] = lambda: reference.invert_rmsnorm(
        target, scale, rms, EPS, h, method="bisection"
    )

    def check_call(name: str, output: Any) -> float | None:
        return check(output, target, scale, rms) if isinstance(output, ops.RMSNormInverse) else None

    moved = sum(x.nbytes for x in (target, scale, rms, result.hidden, result.new_scale))
    mean = float(evaluations.mean())
    return Comparison(
        ours="inversion",
        calls=calls,
        check=check_call,
        nbytes={"inversion": moved, "RMSNorm": 2 * h.nbytes},
        notes={
            "evaluations": mean,
            "evaluations max": float(evaluations.max()),
            "passes": mean + 4,
        },
    )
