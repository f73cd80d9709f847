"""What the norms and the gated product must do in whichever implementation serves them, against
fp64.
"""

import itertools

import torch
import torch.nn.functional as F
from support.numeric import (
    FLOATS,
    UNIT,
    in_gaps,
    normal,
    poisoned,
    same_bits,
    seeded,
    within_roundings,
)
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import dispatch, native

NORMS = {"llama": (0.0, True), "gemma": (1.0, False)}
EPS = 1e-5


def unit(dtype: torch.dtype) -> float:
    """The relative error of one rounding: twice as large in Triton's interpreter, which cuts bf16
    off.
    """
    return UNIT[dtype] * (2 if dispatch.backend == "triton" and dtype == torch.bfloat16 else 1)


def alike(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Bit for bit where a kernel serves ``dtype``; plain torch may sum and multiply in another
    order for another layout.
    """
    if dtype == torch.float64 or dispatch.backend == "torch" or not native.serves("cpu"):
        few = 64 * UNIT[dtype]
        return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=few, atol=few)
    return same_bits(found, expected)


def norm_by_formula(x: Tensor, scale: Tensor, offset: float) -> Tensor:
    x = x.double()
    return (offset + scale.double()) * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def check_rms_norm(
    dtype: torch.dtype, spec: str, widths: tuple[int, ...] = (1, 63, 1000, 2049)
) -> None:
    offset, cast_first = NORMS[spec]
    options = {"scale_offset": offset, "cast_first": cast_first}
    for d, rows, scale_dtype in itertools.product(widths, (0, 1, 3), {dtype, torch.float32}):
        rng = seeded(d)
        x, weight, scale = (
            normal(rng, rows, d, dtype=dtype),
            normal(rng, d, dtype=scale_dtype),
            normal(rng, rows, d, dtype=scale_dtype),
        )
        for used in (weight, scale):
            y = ops.rms_norm(x, used, EPS, **options)
            expected = norm_by_formula(x, used, offset)
            # The normed row's own rounding is scaled with it; below the normal range roundings are
            # absolute.
            few = 64 * UNIT[dtype] if dtype == torch.float64 else 4 * UNIT[torch.float32]
            bound = ((1 + cast_first) * unit(dtype) + few) * expected.abs()
            tiny = (
                torch.finfo(dtype).smallest_normal
                * UNIT[dtype]
                * 4
                * (1 + (used.double() + offset).abs())
            )
            assert (y.dtype, y.shape) == (dtype, x.shape)
            assert ((y.double() - expected).abs() <= 1.01 * bound + tiny).all()
            for other in (poisoned, in_gaps):
                assert alike(ops.rms_norm(other(x), other(used), EPS, **options), y, dtype)
        for row in range(rows):
            assert alike(
                ops.rms_norm(x[row : row + 1], scale[row], EPS, **options), y[row : row + 1], dtype
            )


def check_norm_pair(
    dtype: torch.dtype, spec: str, widths: tuple[int, ...] = (1, 63, 1000, 2049)
) -> None:
    offset, cast_first = NORMS[spec]
    options = {"scale_offset": offset, "cast_first": cast_first}
    for d, rows in itertools.product(widths, (0, 1, 3)):
        rng = seeded(d)
        hidden, weight = normal(rng, 2 * rows, d, dtype=dtype), normal(rng, d, dtype=dtype)
        if rows > 1:
            hidden[-1] = 0
        z_pair, delta, direction = ops.norm_pair(poisoned(hidden), in_gaps(weight), EPS, **options)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert alike(z_pair, ops.rms_norm(hidden, weight, EPS, **options), dtype)
        assert same_bits(delta, hidden[:rows].to(wide) - hidden[rows:].to(wide))
        own = ops.read_direction(z_pair[rows:])
        assert (direction.v.dtype, direction.v.shape, direction.inverse_norm2.shape) == (
            wide,
            (rows, d),
            (rows,),
        )
        assert (direction.coeff is None) == (own.coeff is None)
        for found, separate in zip(direction, own, strict=True):
            if found is None:
                continue
            # Triton's sum of squares may follow the layout; it is in fp64, and shows in the last
            # bit of v at most.
            close = ((found - separate).abs() <= 2 * UNIT[torch.float32] * separate.abs()).all()
            assert close if dispatch.backend == "triton" else same_bits(found, separate)
        assert rows < 2 or not direction.v[-1].any()


def activation_by_formula(x: Tensor, activation: str) -> Tensor:
    """``x / (1 + exp(-s))`` in fp64: 1 + tanh would cancel."""
    slope = x if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-slope))


def check_gated_product(
    dtype: torch.dtype, activation: str, widths: tuple[int, ...] = (1, 63, 1000, 2049)
) -> None:
    for n, rows in itertools.product(widths, (0, 1, 3)):
        rng = seeded(n)
        fused = (3 * normal(rng, rows, 2 * n)).to(dtype)
        gate, up = fused.chunk(2, -1) if rows else (fused[:, :n], fused[:, n:])
        y = ops.gated_product(gate, up, activation)
        expected = activation_by_formula(gate.double(), activation) * up.double()
        # Where the activation is nearly 0, torch's 1 + tanh and Triton's exp carry an error of
        # fp32's spacing at the gate.
        lost = (
            4
            * UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
            * (gate.double() * up.double()).abs()
        )
        assert (y.dtype, y.shape) == (dtype, gate.shape)
        tiny = 4 * torch.finfo(dtype).smallest_normal * UNIT[dtype] * (1 + up.double().abs())
        assert (
            (y.double() - expected).abs() <= 2.02 * unit(dtype) * expected.abs() + lost + tiny
        ).all()
        for other in (poisoned, in_gaps):
            assert alike(ops.gated_product(other(gate), other(up), activation), y, dtype)


def check_extremes(dtype: torch.dtype) -> None:
    """What torch's own modules give at the ends of the range."""
    largest = torch.finfo(dtype).max
    gate = torch.tensor(
        [[0.0, -0.0, 1e4, -1e4, largest, -largest, torch.inf, -torch.inf, torch.nan]]
    ).to(dtype)
    for activation, module in (
        ("silu", F.silu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ):
        y, expected = ops.gated_product(gate, torch.ones_like(gate), activation), module(gate)
        assert torch.equal(y.isnan(), expected.isnan())
        assert same_bits(y.nan_to_num(7.0), expected.nan_to_num(7.0))
    sizes = (1e30, 1e-30) if dtype in (torch.float32, torch.bfloat16) else (6e4, 1e-7)
    for size, eps in itertools.product(sizes, (0.0, 1e-5)):
        x = (normal(seeded(0), 2, 65).clamp(-1, 1) * size).to(dtype)
        x[1] = 0
        y = ops.rms_norm(x, torch.ones(65), eps)
        expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.allclose(y.float(), expected, rtol=8 * unit(dtype), atol=0, equal_nan=True)


def check_gradients() -> None:
    """The kernels have none: where one is wanted plain torch serves."""
    x, scale, up = (normal(seeded(s), 4, 9, dtype=torch.float32).requires_grad_() for s in range(3))
    fine = [leaf.detach().double().requires_grad_() for leaf in (x, scale, up)]

    def forward(x: Tensor, scale: Tensor, up: Tensor) -> Tensor:
        pair = ops.norm_pair(x, scale[0], EPS)
        gated = ops.gated_product(ops.rms_norm(x, scale, EPS, scale_offset=1.0), up, "gelu_tanh")
        return gated.sum() + (pair.z_pair * up).sum() + pair.delta.square().sum()

    found, expected = (
        torch.autograd.grad(forward(x, scale, up), (x, scale, up)),
        torch.autograd.grad(forward(*fine), fine),
    )
    for own, exact in zip(found, expected, strict=True):
        # sums of nine products, three deep
        assert within_roundings(own, exact, 128, exact.abs().max())


def check_all(widths: tuple[int, ...]) -> None:
    """All of it, for a process whose implementation was chosen from outside."""
    for dtype in FLOATS.values():
        for spec in NORMS:
            check_rms_norm(dtype, spec, widths)
            check_norm_pair(dtype, spec, widths)
        for activation in ("gelu_tanh", "silu"):
            check_gated_product(dtype, activation, widths)
        if dtype != torch.float64:
            check_extremes(dtype)
    check_gradients()
