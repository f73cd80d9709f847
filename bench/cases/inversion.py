"""The RMSNorm inversion against 64-step bisection in plain torch, and against one RMSNorm of the
same tensor.

`inversion` is ours, `whole update` the whole stable update in one launch, `recorded norm` that with
the norm of both streams and all between, in one launch, and `its parts` the same by the ops that it
stands for; `torch bisection` is 64 steps of the whole batch in plain torch. Older tables have a
`bisection` of the native library too, and no recorded norm.
`passes` counts reads of a row: one for its extent, one for e and p, one for their sums, one for the
result, and one for each evaluation; these rows have a pole, so φ(0) is not evaluated. On a GPU all
but `torch bisection` are replayed as CUDA graphs.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch import ops
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.timing import Call, InTurn
from icl_patch.ops import reference, stable_update

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


def cases(device: torch.device, quick: bool) -> list[Case]:
    """A case per shape and dtype."""
    most = 512 if quick and device.type == "cpu" else 4096
    return [
        Case(
            f"{min(batch, most)} × {n} {dtype_name(dtype)}",
            functools.partial(comparison, min(batch, most), n, dtype, device),
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
    # In a model a small input is in the cache, as it was just computed; a large one is not: two
    # take turns.
    pair = torch.cat([h + delta, h]).float()
    inputs = [(delta, target, h, pair)]
    if h.nbytes > 2**24:
        inputs.append((delta.clone(), target.clone(), h.clone(), pair.clone()))
    functions: dict[str, Callable[[tuple[Tensor, ...]], object]] = {
        "inversion": lambda x: ops.invert_rmsnorm(x[1], scale, rms, EPS, x[2]),
        "RMSNorm": lambda x: F.rms_norm(x[2], (n,), scale, EPS),
        "whole update": lambda x: ops.stable_scale(x[0], scale, x[2], EPS),
        "recorded norm": lambda x: ops.record_norm(x[3], x[2], x[0], scale, EPS, out_dtype=dtype),
        "its parts": lambda x: stable_update.reference_record_norm(
            x[3], x[2], x[0], scale, EPS, dtype
        ),
    }
    turn = itertools.count()
    calls: dict[str, Call] = {
        name: InTurn(function, inputs, turn) for name, function in functions.items()
    }
    calls["torch bisection"] = lambda: reference.invert_rmsnorm(target, scale, rms, EPS, h)
    some, size = slice(64), rms[:64].unsqueeze(1)
    expected = reference.invert_rmsnorm(target[some], scale, rms[some], EPS)

    def check(_name: str, output: Any) -> float | None:
        if not isinstance(output, ops.RMSNormInverse):
            return None
        if not torch.equal(output.status[some], expected.status):
            raise AssertionError("expected the reference's statuses, got others")
        return relative_error(output.hidden[some] / size, expected.hidden / size, 1e-5)

    moved = sum(x.nbytes for x in (target, scale, rms, result.hidden, result.new_scale))
    mean, most = float(evaluations.mean()), float(evaluations.max())
    return Comparison(
        "inversion",
        calls,
        check,
        nbytes={"inversion": moved, "RMSNorm": 2 * h.nbytes},
        notes={"evaluations": mean, "evaluations max": most, "passes": mean + 4},
    )
