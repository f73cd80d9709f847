"""What the norms, the gated product and the direction must do in whichever implementation serves
them, against fp64.
"""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from support.numeric import UNIT, in_gaps, normal, poisoned, same_bits, seeded
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import dispatch

NORMS = {"llama": (0.0, True), "gemma": (1.0, False)}
EPS = 1e-5
WIDTHS = (1, 63, 1000, 2049)
FP32 = UNIT[torch.float32]


def unit(dtype: torch.dtype) -> float:
    """The relative error of one rounding: twice as large in Triton's interpreter, which cuts bf16
    off.
    """
    return UNIT[dtype] * (2 if dispatch.backend == "triton" and dtype == torch.bfloat16 else 1)


def alike(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit where a kernel of ours serves them; plain torch may sum and multiply in another
    order for another layout.
    """
    if expected.dtype == torch.float64 or not ops.has_kernels(expected.device.type):
        few = 64 * UNIT[expected.dtype]
        return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=few, atol=few)
    return same_bits(found, expected)


def check_rms_norm(
    dtype: torch.dtype, spec: str, widths: tuple[int, ...] = WIDTHS, device: str = "cpu"
) -> None:
    offset, cast_first = NORMS[spec]
    options = {"scale_offset": offset, "cast_first": cast_first}
    for d, rows, scale_dtype in itertools.product(widths, (0, 1, 3), {dtype, torch.float32}):
        rng = seeded(d)
        x = normal(rng, rows, d, dtype=dtype).to(device)
        weight, scale = (
            normal(rng, *size, dtype=scale_dtype).to(device) for size in ((d,), (rows, d))
        )
        for used in (weight, scale):
            y = ops.rms_norm(x, used, EPS, **options)
            wide = x.double()
            expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
            expected = (offset + used.double()) * expected
            # The normed row's own rounding is scaled with it; below the normal range roundings are
            # absolute.
            few = 64 * UNIT[dtype] if dtype == torch.float64 else 4 * FP32
            bound = ((1 + cast_first) * unit(dtype) + few) * expected.abs()
            least = 4 * torch.finfo(dtype).smallest_normal * UNIT[dtype]
            bound = 1.01 * bound + least * (1 + (used.double() + offset).abs())
            assert (y.dtype, y.shape) == (dtype, x.shape)
            assert ((y.double() - expected).abs() <= bound).all()
            for other in (poisoned, in_gaps):
                assert alike(ops.rms_norm(other(x), other(used), EPS, **options), y)
        for row in range(rows):
            one = slice(row, row + 1)
            assert alike(ops.rms_norm(x[one], scale[row], EPS, **options), y[one])


def check_norm_pair(
    dtype: torch.dtype, spec: str, widths: tuple[int, ...] = WIDTHS, device: str = "cpu"
) -> None:
    offset, cast_first = NORMS[spec]
    options = {"scale_offset": offset, "cast_first": cast_first}
    for d, rows in itertools.product(widths, (0, 1, 3)):
        rng = seeded(d)
        hidden, weight = (
            normal(rng, *size, dtype=dtype).to(device) for size in ((2 * rows, d), (d,))
        )
        if rows > 1:
            hidden[-1] = 0
        z_pair, delta, direction = ops.norm_pair(poisoned(hidden), in_gaps(weight), EPS, **options)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert alike(z_pair, ops.rms_norm(hidden, weight, EPS, **options))
        assert same_bits(delta, hidden[:rows].to(wide) - hidden[rows:].to(wide))
        shapes = (direction.v.dtype, direction.v.shape, direction.inverse_norm2.shape)
        assert shapes == (wide, (rows, d), (rows,))
        for found, separate in zip(direction, ops.read_direction(z_pair[rows:]), strict=True):
            if found is None or separate is None:
                assert found is separate
            elif ops.has_triton(device):  # its sum of squares in fp64 may follow the layout
                assert ((found - separate).abs() <= 2 * FP32 * separate.abs()).all()
            else:
                assert same_bits(found, separate)
        assert rows < 2 or not direction.v[-1].any()


def activation_by_formula(x: Tensor, activation: str) -> Tensor:
    """``x / (1 + exp(-s))`` in fp64: 1 + tanh would cancel."""
    slope = x if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-slope))


def check_gated_product(
    dtype: torch.dtype, activation: str, widths: tuple[int, ...] = WIDTHS, device: str = "cpu"
) -> None:
    for n, rows in itertools.product(widths, (0, 1, 3)):
        fused = (3 * normal(seeded(n), rows, 2 * n)).to(device, dtype)
        gate, up = fused.chunk(2, -1) if rows else (fused[:, :n], fused[:, n:])
        y = ops.gated_product(gate, up, activation)
        expected = activation_by_formula(gate.double(), activation) * up.double()
        # Where the activation is nearly 0, torch's 1 + tanh and Triton's exp carry an error of
        # fp32's spacing at the gate.
        lost = 4 * UNIT[torch.promote_types(dtype, torch.float32)]
        lost = lost * (gate.double() * up.double()).abs()
        tiny = 4 * torch.finfo(dtype).smallest_normal * UNIT[dtype] * (1 + up.double().abs())
        bound = 2.02 * unit(dtype) * expected.abs() + lost + tiny
        assert (y.dtype, y.shape) == (dtype, gate.shape)
        assert ((y.double() - expected).abs() <= bound).all()
        for other in (poisoned, in_gaps):
            assert alike(ops.gated_product(other(gate), other(up), activation), y)


def check_read_direction(dtype: torch.dtype, device: str = "cpu") -> None:
    """``v·z = 1``, and 0 for a row that has no such vector; or right to the dtype's range, or 0."""
    wide, few = (torch.float64, 64) if dtype == torch.float64 else (torch.float32, 2.02)
    by_kernel = ops.has_triton(device) and dtype != torch.float64
    for k in (1, 63, 2500):
        z = normal(seeded(k), 2, 2, k, dtype=dtype).to(device)
        z[1] = 0
        z[1, 1, k // 2] = torch.nan
        v, inverse, coeff = ops.read_direction(poisoned(z))
        norm2 = z.double().square().sum(-1, keepdim=True)
        expected = torch.where(norm2 == 0, 0.0, z.double() / norm2)
        assert v.dtype == inverse.dtype == wide
        assert not v[1].any() and inverse[1, 0] == 0 and inverse[1, 1].isnan()
        assert ((v - expected)[0].abs() <= few * UNIT[wide] * expected[0].abs()).all()
        assert ((inverse * norm2.squeeze(-1) - 1)[0].abs() <= few * UNIT[wide]).all()
        fine = ops.read_direction(z, torch.float64).v
        assert ((fine - expected)[0].abs() <= 64 * UNIT[fine.dtype] * expected[0].abs()).all()
        if coeff is not None:
            assert ((coeff.reshape(2, 2) - 1)[0].abs() <= 64 * UNIT[wide]).all()
            assert coeff.reshape(2, 2)[1, 0] == 0
        assert coeff is not None or not by_kernel
    for size in (1e-44, 1e-30, 1e-22, 1e-18, 1e17, 1e20, 1e38):
        z = (normal(seeded(1), 4, 63).clamp(-3, 3) * size).float().to(device)
        v, inverse, _ = ops.read_direction(z)
        product = (v.double() * z.double()).sum(-1)
        refused = (inverse == 0) & ~v.any(-1)
        assert (refused == (inverse == 0)).all()
        assert (refused | ((product - 1).abs() <= 64 * FP32)).all()
        assert refused.all() if size in (1e-44, 1e38) else not refused.any()


def check_extremes(dtype: torch.dtype, device: str = "cpu") -> None:
    """What torch's own modules give at the ends of the range."""
    largest = torch.finfo(dtype).max
    gate = [0.0, -0.0, 1e4, -1e4, largest, -largest, torch.inf, -torch.inf, torch.nan]
    gate = torch.tensor([gate]).to(device, dtype)
    modules = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
    for activation, module in modules.items():
        y, expected = ops.gated_product(gate, torch.ones_like(gate), activation), module(gate)
        assert torch.equal(y.isnan(), expected.isnan())
        assert same_bits(y.nan_to_num(7.0), expected.nan_to_num(7.0))
    sizes = (1e30, 1e-30) if dtype in (torch.float32, torch.bfloat16) else (6e4, 1e-7)
    for size, eps in itertools.product(sizes, (0.0, 1e-5)):
        x = (normal(seeded(0), 2, 65).clamp(-1, 1) * size).to(device, dtype)
        x[1] = 0
        y = ops.rms_norm(x, torch.ones(65, device=device), eps)
        expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.allclose(y.float(), expected, rtol=8 * unit(dtype), atol=0, equal_nan=True)


def check_all(dtype: torch.dtype, widths: tuple[int, ...] = WIDTHS, device: str = "cpu") -> None:
    for spec in NORMS:
        check_rms_norm(dtype, spec, widths, device)
        check_norm_pair(dtype, spec, widths, device)
    for activation in ("gelu_tanh", "silu"):
        check_gated_product(dtype, activation, widths, device)
    check_read_direction(dtype, device)
    if dtype != torch.float64:
        check_extremes(dtype, device)
