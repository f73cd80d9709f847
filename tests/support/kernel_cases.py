"""Arguments for the Triton kernels with what they should give, in fp64; on the CPU where the
kernels are interpreted, else on the GPU.
"""

from dataclasses import dataclass, replace

import torch
from support import interpreter
from support.numeric import UNIT, normal, seeded
from torch import Tensor

from icl_patch.kernels import INTERPRETED

if INTERPRETED:
    interpreter.prepare()
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("row", "row-rank", "shared", "pool")
POOL = 5


@dataclass
class Case:
    """Arguments of ``patched_linear``, and the factors that each row should get as (M, R, ·) in
    fp64.
    """

    z: Tensor
    weight: Tensor
    u: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    index: Tensor | None
    row_u: Tensor
    row_v: Tensor

    @property
    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("z", "weight", "u", "v", "bias", "index")}

    @property
    def plain(self) -> dict:
        return {name: getattr(self, name) for name in ("z", "weight", "bias")}

    def expected(self) -> Tensor:
        """``(W + Σ_r u_r v_rᵀ) z + b`` without a matrix for every row."""
        coeff = torch.einsum("mk,mrk->mr", self.z.double(), self.row_v)
        bias = 0 if self.bias is None else self.bias.double()
        return (
            self.z.double() @ self.weight.double().T
            + bias
            + torch.einsum("mr,mrn->mn", coeff, self.row_u)
        )

    def magnitude(self) -> Tensor:
        """The sum of the absolute values of all that is added up."""
        coeff = torch.einsum("mk,mrk->mr", self.z.double().abs(), self.row_v.abs())
        bias = 0 if self.bias is None else self.bias.double().abs()
        return (
            self.z.double().abs() @ self.weight.double().abs().T
            + bias
            + torch.einsum("mr,mrn->mn", coeff, self.row_u.abs())
        )


def linear_case(
    layout: str,
    sizes: tuple[int, int, int],
    rank: int = 1,
    dtype: torch.dtype = torch.float32,
    factor_dtype: torch.dtype = torch.float32,
    bias: bool = True,
    seed: int = 0,
) -> Case:
    rows, n, k = sizes
    generator = seeded(seed)
    leading = {"row": (rows,), "row-rank": (rows, rank), "shared": (1, rank), "pool": (POOL, rank)}[
        layout
    ]
    z, weight = normal(generator, rows, k, dtype=dtype), normal(generator, n, k, dtype=dtype)
    u, v = (
        normal(generator, *leading, n, dtype=factor_dtype),
        normal(generator, *leading, k, dtype=factor_dtype),
    )
    added = normal(generator, n, dtype=dtype) if bias else None
    index = None
    if layout == "pool":
        index = torch.randint(-1, POOL, (rows,), generator=generator)
        index[1::3] = -1
        row_u, row_v = (
            torch.stack([f[i] if i >= 0 else 0 * f[0] for i in index]) if rows else f[:0]
            for f in (u, v)
        )
    else:
        row_u, row_v = (
            f.unsqueeze(1) if layout == "row" else f.expand(rows, -1, -1) for f in (u, v)
        )
    case = Case(z, weight, u, v, added, index, row_u.double(), row_v.double())
    return replace(
        case,
        **{name: None if value is None else value.to(DEVICE) for name, value in vars(case).items()},
    )


def rounding(dtype: torch.dtype) -> float:
    """The relative error of one rounding: twice as large in Triton's interpreter, which cuts bf16
    off.
    """
    return UNIT[dtype] * (2 if INTERPRETED and dtype == torch.bfloat16 else 1)


def check_linear(case: Case, out: Tensor, out_dtype: torch.dtype) -> None:
    """One rounding to out_dtype on top of sums in fp32."""
    expected = case.expected()
    assert (out.dtype, out.shape) == (out_dtype, expected.shape)
    # Matrix units cut off what falls below the running sum's last digit, 8 or 16 products at a
    # time: such errors do not cancel.
    sums = max(32, case.z.shape[1] / 256)
    bound = rounding(out_dtype) * expected.abs() + sums * UNIT[torch.float32] * case.magnitude()
    assert (
        (out.double() - expected).abs() <= 1.01 * bound + torch.finfo(out_dtype).smallest_normal
    ).all()
