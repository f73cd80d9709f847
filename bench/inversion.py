"""The RMSNorm inversion against 64-step bisection in plain torch, and against one RMSNorm of the same tensor."""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch import ops, reference
from icl_patch.bench.harness import Call, Results, compare

SHAPES = [(1, 1152), (32, 2560), (4096, 5376)]
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
DELTAS = [0.03, 0.3, 3.0]


def update_rows(batch: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """``delta, scale, h`` as a block has them: a scale about 1, and changes from small to larger than the norm's output."""
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(batch, n, generator=rng)
    scale = 1 + 0.4 * torch.randn(n, generator=rng)
    size = torch.tensor(DELTAS)[torch.arange(batch) % len(DELTAS)].unsqueeze(1)
    delta = size * torch.randn(batch, n, generator=rng)
    return delta.to(device, dtype), scale.to(device, dtype), h.to(device, dtype)


def check(result: ops.RMSNormInverse, target: Tensor, scale: Tensor, rms: Tensor) -> float:
    """Raises unless up to 64 rows agree with the reference; returns the largest difference relative to the RMS."""
    rows = slice(None, 64)
    expected = reference.invert_rmsnorm(target[rows], scale, rms[rows], EPS)
    if not torch.equal(result.status[rows], expected.status):
        raise AssertionError("the statuses differ from the reference's")
    error = float(((result.hidden[rows] - expected.hidden).abs().amax(1) / rms[rows]).max())
    if error > 1e-5:
        raise AssertionError(f"expected the reference's result within 1e-5, got {error}")
    return error


def run(device: torch.device, quick: bool, results: Results) -> Iterator[str]:
    """Adds a row per shape and dtype; yields what it is about to measure."""
    for (batch, n), dtype in itertools.product(SHAPES, DTYPES):
        if quick and device.type == "cpu":
            batch = min(batch, 512)
        name = str(dtype).removeprefix("torch.")
        yield f"({batch}, {n}) {name}"
        delta, scale, h = update_rows(batch, n, dtype, device)
        rms = h.double().square().mean(1).sqrt().to(dtype)
        target = (delta + scale * ops.rms_normalize(h, EPS)).to(dtype)
        result = ops.invert_rmsnorm(target, scale, rms, EPS, h)
        error = check(result, target, scale, rms)
        evaluations = result.evaluations.double()
        calls: dict[str, Call] = {
            "RMSNorm": lambda h=h, n=n, scale=scale: F.rms_norm(h, (n,), scale, EPS),
            "inversion": lambda a=(target, scale, rms, EPS, h): ops.invert_rmsnorm(*a),
            "bisection": lambda a=(target, scale, rms, EPS, h): ops.invert_rmsnorm(*a, method="bisection"),
            "whole update": lambda a=(delta, scale, h, EPS): ops.stable_scale(*a),
        }
        if device.type == "cuda":
            one = torch.zeros(1, device=device)
            calls["empty launch"] = one.zero_
        timings = compare(calls, device, rounds=7 if quick else 15)
        slow = compare(
            {"torch": lambda a=(target, scale, rms, EPS, h): reference.invert_rmsnorm(*a, method="bisection")},
            device,
            rounds=3 if batch * n < 1 << 22 else 1,
        )["torch"]
        moved = sum(x.numel() * x.element_size() for x in (target, scale, rms, result.hidden, result.new_scale))
        quantiles = {f"evaluations {name}": float(evaluations.quantile(q)) for name, q in (("p99", 0.99), ("max", 1.0))}
        results.add(
            f"{batch} × {n} {name}",
            {**timings, "torch bisection, 64 steps": slow},
            ours="inversion",
            nbytes={"inversion": moved, "RMSNorm": 2 * h.numel() * h.element_size()},
            notes={
                # a row is read for its extent, for e and p, for their sums and for the result besides; these rows have a pole, so no φ(0)
                "inversion": {
                    "evaluations": float(evaluations.mean()),
                    **quantiles,
                    "passes": float(evaluations.mean()) + 4,
                    "error": error,
                }
            },
        )
