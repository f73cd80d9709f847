"""The ops in plain torch: their specification, and the implementation if there is no kernel.

No function loops over rows or blocks. All compute in fp64 if they are given fp64.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch.activation_functions import activation_named

ULP = 2.0**-52
BISECTION_STEPS = 64


class InversionStatus(IntEnum):
    """The outcome of an RMSNorm inversion, per row."""

    EASY = 0  # a root of the secular equation
    HARD = 1  # no root: the shift is 0 and the coordinates at min m² take up the missing norm
    UNREACHABLE = 2  # some m_k = 0, g_k ≠ 0 and y_k = 0: no change of the scale can produce g_k
    NONFINITE = 3  # NaN or infinity in m or g
    BAD_RADIUS = 4  # not 0 < C²/(C² + eps) < inf
    NO_CONVERGENCE = 5  # or a result beyond the range of its dtype


@dataclass(frozen=True)
class RMSNormInverse:
    """Result of :func:`icl_patch.ops.invert_rmsnorm` for ``B`` rows of ``n`` coordinates.

    hidden: (B, n) fp32 (fp64 for fp64 targets), of the given RMS.
    shift: (B,) fp64, ``min m² - μ``.
    new_scale: (B, n) fp64, ``m - μ ⊘ m``.
    status: (B,) int8, an :class:`InversionStatus`.
    evaluations: (B,) int32, the number of evaluations of the secular function.
    """

    hidden: Tensor
    shift: Tensor
    new_scale: Tensor
    status: Tensor
    evaluations: Tensor


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if any of the tensors is fp64, else fp32."""
    return (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    )


def low_rank_term(z: Tensor, u: Tensor, v: Tensor, index: Tensor | None = None) -> Tensor:
    """``Σ_r (z·v_r) u_r`` for every row, (M, N) in the accumulation dtype.

    z (M, K); per row u (M, N), v (M, K) or u (M, R, N), v (M, R, K); shared u (1, R, N), v (1, R,
    K); with ``index`` (M,), u and v are pools (P, R, ·) and a row of index -1 gets zero.
    """
    dtype = accumulation_dtype(z, u, v)
    z, u, v = z.to(dtype), u.to(dtype), v.to(dtype)
    if index is None and u.dim() == 3 and len(u) == 1:
        return z @ v[0].T @ u[0]
    if u.dim() == 2:
        u, v = u.unsqueeze(1), v.unsqueeze(1)
    if index is not None:
        if not len(u):  # an empty pool: no row has a patch
            return z.new_zeros(len(z), u.shape[-1])
        index = index.long()  # an unsigned one would be taken for a mask
        u, v = u[index.clamp(min=0)], v[index.clamp(min=0)]
    coeff = (z.unsqueeze(1) * v).sum(-1)  # (M, R)
    if index is not None:
        coeff = coeff.masked_fill((index < 0).unsqueeze(1), 0)
    return (coeff.unsqueeze(-1) * u).sum(1)


def add_low_rank(
    y: Tensor, z: Tensor, u: Tensor, v: Tensor, index: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``y + Σ_r (z·v_r) u_r``, accumulated in fp32 (fp64 if an input is fp64) and rounded once.
    Rows without a patch stay ``y``.
    """
    patched = (y + low_rank_term(z, u, v, index)).to(out_dtype)
    return (
        patched
        if index is None
        else torch.where((index < 0).unsqueeze(1), y.to(out_dtype), patched)
    )


def expert_linear(
    x: Tensor,
    weight: Tensor,
    expert: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    gather: bool = False,
) -> Tensor:
    """``W_e x + b_e`` for the experts (M, k), in the accumulation dtype and rounded once: x (M, K)
    or (M, k, K) -> (M, k, N).

    It computes expert by expert. With ``gather``, for a choice that the host cannot read, it
    gathers a matrix for every slot, (M, k, N, K).
    """
    wide, expert = accumulation_dtype(x), expert.long()
    rows = (x.unsqueeze(1) if x.dim() == 2 else x).to(wide).expand(*expert.shape, -1)
    if gather:
        there = (expert >= 0) & (expert < len(weight))
        expert = torch.where(there, expert, 0)
        y = (weight[expert].to(wide) @ rows.unsqueeze(-1)).squeeze(-1)
    else:
        y = rows.new_zeros(*expert.shape, weight.shape[1])
        for number in expert.unique().tolist():
            slots = expert == number
            y[slots] = F.linear(rows[slots], weight[number].to(wide))
    y = y if bias is None else y + bias[expert].to(wide)
    return (torch.where(there.unsqueeze(-1), y, 0) if gather else y).to(out_dtype)


def read_direction(z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``v = z/‖z‖²`` and ``1/‖z‖²``; both are 0 if v does not exist or overflows the dtype."""
    wide = z.double()
    norm2 = wide.square().sum(-1, keepdim=True)
    limits = torch.finfo(dtype)
    largest = wide.abs().amax(-1, keepdim=True) / norm2 if z.shape[-1] else norm2
    none = (norm2 == 0) | (largest < limits.tiny) | (largest > limits.max)
    norm2 = torch.where(none, 1.0, norm2)  # a quotient that is not used has a derivative too
    v = torch.where(none | norm2.isnan(), 0.0, wide / norm2).to(dtype)
    # 0 says that there is no v
    return v, torch.where(none, 0.0, (1 / norm2).clamp(min=limits.tiny)).squeeze(-1).to(dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last dimension, in the accumulation dtype."""
    x = x.to(accumulation_dtype(x))
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(
    x: Tensor, scale: Tensor, eps: float, scale_offset: float = 0.0, cast_first: bool = True
) -> Tensor:
    """``(o + m) x / sqrt(mean(x²) + eps)``. With ``cast_first`` the normed row is rounded to x's
    dtype before scaling too.
    """
    normed = rms_normalize(x, eps)
    if cast_first:
        normed = normed.to(x.dtype)
    wide = accumulation_dtype(x, scale)
    return (normed.to(wide) * (scale.to(wide) + scale_offset)).to(x.dtype)


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) ⊙ up``, the activation rounded to the dtype of both before the product."""
    wide = gate.to(accumulation_dtype(gate))
    return activation_named(activation)(wide).to(gate.dtype) * up


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``x cos + (-x₂, x₁) sin`` of query and key (B, ·, T, D), where x₁ and x₂ are the halves."""

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)

    return rotated(query), rotated(key)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """``softmax(scale · q Kᵀ) V`` (B, H, E) of queries (B, H, D); 0 for a row without keys."""
    (rows, heads, width), (groups, keys) = query.shape, key.shape[1:3]
    q, k, v = (x.to(accumulation_dtype(query)) for x in (query, key, value))
    shared = heads // groups if groups else 0
    q = q.reshape(rows, groups, shared, width)
    if mask is None:
        weights = (scale * q @ k.mT).softmax(-1)
    else:
        mask = mask.reshape(rows, 1, 1, keys)
        blind = ~mask.any(-1, keepdim=True)  # without a number, whose softmax has no derivatives
        k, v = (x.masked_fill(~mask.mT, 0) for x in (k, v))  # a hidden NaN times 0 would be NaN
        scores = torch.where(mask, scale * q @ k.mT, torch.where(blind, 0, -torch.inf))
        weights = scores.softmax(-1).masked_fill(blind, 0)
    return (weights @ v).reshape(rows, heads, v.shape[-1]).to(query.dtype)


def attention_pair(
    query: Tensor, key: Tensor, value: Tensor, slot: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """:func:`decode_attention`, and behind it the value (B, G, E) in column ``slot`` for each head,
    (2B, H, E).
    """
    y = decode_attention(query, key, value, scale, mask)
    return _with_own_values(y, value.index_select(2, slot.long()))


def _with_own_values(y: Tensor, own: Tensor) -> Tensor:
    """y (B, H, E), and behind it the values (B, G, 1, E) for each head."""
    heads = y.shape[1] // own.shape[1] if own.shape[1] else 0
    return torch.cat([y, own.expand(-1, -1, heads, -1).reshape(y.shape)])


def write_and_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """:func:`attention_pair` (2B, H E) of queries (B, H, 1, D), after key (B, G, 1, D) and the
    first B rows of value (B or 2B, G E) were written into column ``slot`` of ``keys`` and
    ``values``; its own values are the last B rows.
    """
    rows, groups, _, width = values.shape
    value = value.reshape(-1, groups, 1, width)
    keys.index_copy_(2, slot.long(), key)
    values.index_copy_(2, slot.long(), value[:rows])
    y = decode_attention(query.squeeze(2), keys, values, scale, mask)
    return _with_own_values(y, value[len(value) - rows :]).flatten(1)


def _missing_norm(g: Tensor, m: Tensor, pole: Tensor, fallback: Tensor | None) -> Tensor:
    """A unit vector on the pole's coordinates, for the norm that the other coordinates leave over:
    along ``fallback`` there, else along ``g``, else the first coordinate.
    """
    on_pole = torch.where(pole, g, 0.0)
    first = torch.zeros_like(g).scatter(1, pole.to(torch.int8).argmax(1, keepdim=True), 1.0)
    direction = torch.where((on_pole != 0).any(1, keepdim=True), on_pole, first)
    if fallback is not None:
        share = torch.where(pole, fallback.to(g.dtype), 0.0)
        needed = pole & (m == 0) & (g != 0) & (share == 0)
        usable = share.isfinite().all(1) & (share != 0).any(1) & ~needed.any(1)
        direction = torch.where(usable.unsqueeze(1), share, direction)
    direction = direction / direction.abs().amax(1, keepdim=True)
    return direction / direction.norm(dim=1, keepdim=True)


def invert_rmsnorm(
    target: Tensor, scale: Tensor, rms: Tensor, eps: float = 0.0, fallback: Tensor | None = None
) -> RMSNormInverse:
    """The ``x`` of RMS ``C`` that minimises ``‖m ⊙ x/sqrt(C² + eps) - g‖``; see
    :func:`icl_patch.ops.invert_rmsnorm`.

    The secular equation ``φ(s) = Σ (p/(e + s))² = n r²`` is shifted to the nearest pole and solved
    by geometric bisection.
    """
    batch, n = target.shape
    m, g, c = scale.double().expand(batch, n), target.double(), rms.double()
    nonfinite = ~(m.isfinite().all(1) & g.isfinite().all(1))
    radius2 = torch.where(c > 0, c.square() / (c.square() + eps), 0.0)
    bad_radius = ~((radius2 > 0) & radius2.isfinite()) & ~nonfinite
    skip = (nonfinite | bad_radius).unsqueeze(1)
    m, g = torch.where(skip, 1.0, m), torch.where(skip, 1.0, g)
    norm2 = n * torch.where(skip.squeeze(1), 1.0, radius2)

    power = _power_of_two(m, g)
    m, g = m * power, g * power  # y stays as it is
    a = m.abs()
    smallest = a.amin(1, keepdim=True)
    e, p = (a - smallest) * (a + smallest), a * g.abs()
    pole = e == 0
    weight = torch.where(pole & (p.square() == 0), 0.0, p)  # one that underflows makes no pole

    def phi(s: Tensor) -> Tensor:
        return torch.where(weight > 0, weight / (e + s.unsqueeze(1)), 0.0).square().sum(1)

    hi = p.square().sum(1).sqrt() / norm2.sqrt() * (1 + 16 * ULP)
    hard = phi(torch.zeros_like(hi)) <= norm2 * (1 + 8 * ULP)  # no root
    lo = (hi * 2.0**-900).clamp(min=torch.finfo(hi.dtype).tiny)
    for _ in range(BISECTION_STEPS):
        s = lo.sqrt() * hi.sqrt()
        left = phi(s) > norm2
        lo, hi = torch.where(left, s, lo), torch.where(left, hi, s)
    s = torch.where(hard, 0.0, hi)

    shifted = e + s.unsqueeze(1)
    y = torch.sign(m) * torch.sign(g) * p / torch.where(shifted > 0, shifted, 1.0)
    hard_pole = hard.unsqueeze(1) & pole
    rest = torch.where(hard_pole, 0.0, y).square().sum(1)
    left_over = (norm2 - rest).clamp(min=0).sqrt().unsqueeze(1)
    y = torch.where(hard_pole, left_over * _missing_norm(g, m, pole, fallback), y)
    y = y * (norm2 / y.square().sum(1)).sqrt().unsqueeze(1)
    quotient = torch.where(y != 0, g / torch.where(y != 0, y, 1.0), m)
    new_scale = torch.where(hard_pole | (m == 0), quotient, shifted / torch.where(m == 0, 1.0, m))

    hidden = y * (c.square() + eps).sqrt().unsqueeze(1)
    new_scale, s = new_scale / power, s / power.squeeze(1) / power.squeeze(1)
    hidden = torch.where(bad_radius.unsqueeze(1), 0.0, hidden)
    new_scale = torch.where(bad_radius.unsqueeze(1), scale.double().expand(batch, n), new_scale)
    shift = torch.where(bad_radius, 0.0, s)
    hidden, new_scale = (
        x.masked_fill(nonfinite.unsqueeze(1), torch.nan) for x in (hidden, new_scale)
    )
    evaluations = torch.where(hard | skip.squeeze(1), 0, BISECTION_STEPS).to(torch.int32)
    hidden = hidden.to(accumulation_dtype(target))
    beyond = ~(hidden.isfinite().all(1) & new_scale.isfinite().all(1) & shift.isfinite())
    status = hard.to(torch.int8)  # EASY or HARD
    for rows, value in (
        (((m == 0) & (g != 0) & (y == 0)).any(1), InversionStatus.UNREACHABLE),
        (beyond, InversionStatus.NO_CONVERGENCE),
        (bad_radius, InversionStatus.BAD_RADIUS),
        (nonfinite, InversionStatus.NONFINITE),
    ):
        status = status.masked_fill(rows, int(value))
    return RMSNormInverse(
        hidden, shift.masked_fill(nonfinite, torch.nan), new_scale, status, evaluations
    )


def _power_of_two(m: Tensor, g: Tensor) -> Tensor:
    """(B, 1) powers of two that keep the squares and cubes of fp64 data in range; 1 for data in the
    range of fp32, which need no scaling.
    """
    exponent = torch.frexp(torch.maximum(m.abs(), g.abs()).amax(1, keepdim=True)).exponent
    return torch.ldexp(
        torch.ones_like(m[:, :1]),
        torch.where(exponent.abs() > 160, -exponent.clamp(-1000, 1000), 0),
    )
