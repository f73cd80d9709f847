"""The updates as pure functions of tensors: the change of a block's parameters for one token.

Shapes: ``M`` rows (one a token), ``d`` residual width, ``I`` inner width. ``delta = hidden_ctx -
hidden`` is the context's change of the residual stream before the MLP; a reader is a linear map of
the MLP's input, the writer is the last module of the MLP. The stable update of a scale writer is in
:mod:`icl_patch.ops.stable_update`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# A sum below this share of the residual is the rounding error of an exact zero.
_SUM_IS_ZERO = 2.0**-40


def reader_update(y_ctx: Tensor, y: Tensor) -> Tensor:
    """``u = W z_ctx - W z`` as the difference of the module's own two outputs; with ``v = z/‖z‖²``,
    ``(W + u vᵀ) z = W z_ctx``.

    y_ctx, y: (..., I), the model's dtype. Returns (..., I) in the accumulation dtype.
    Source: Goldwaser et al. (2025), Lemmas 6 and 7.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    return y_ctx.to(dtype) - y.to(dtype)


def direct_scale(delta: Tensor, normalized: Tensor, scale: Tensor) -> Tensor:
    """``m' = m + delta ⊘ Norm(h_down)``: the direct update of a scale writer.

    delta, normalized (M, d), scale (d,). Returns m' (M, d). Where both delta and Norm(h_down) are
    0, the scale stays; where only Norm(h_down) is 0, the result is infinite (no scale can produce
    delta).
    Source: Goldwaser et al. (2025), Theorem 1 and Lemma 10.
    """
    return torch.where(delta == 0, scale.expand_as(delta), scale + delta / normalized)


def off_zero(patched: Tensor, hidden_down: Tensor, addend: Tensor | None = None) -> Tensor:
    """A small number to add to the patched output where the norm behind it reads nearly 0, because
    no scale changes a 0; 0 elsewhere.

    The number is 2⁻¹⁶ of the RMS of ``h_down``, or 1.5 times the smallest number of the output's
    dtype if that is more: in fp16 a smaller change may round to 0. Where an addend cancels the
    output, it is at least two spacings of the output.

    patched, hidden_down, addend: (..., d); the norm reads ``patched + addend``. The inversion asked
        for a number below the rounding of ``h_down`` there, so any small number serves.
    """
    rms = hidden_down.to(torch.promote_types(patched.dtype, torch.float32)).square().mean(-1, True)
    rms, limits = rms.sqrt(), torch.finfo(patched.dtype)
    small = (2.0**-16 * rms).clamp(min=1.5 * limits.smallest_normal * limits.eps)
    total = patched
    if addend is not None:
        total, small = patched + addend, torch.maximum(small, 2 * limits.eps * patched.abs())
    return torch.where(total.abs() <= 2.0**-24 * rms, small, 0)


class Closed(NamedTuple):
    """An exact writer's factor (fp64), the rounded output it gives, and each row's misses of the
    target.
    """

    # (M, d): u of a weight or experts writer, Δb of a bias writer, m' of a scale writer
    factor: Tensor
    output: Tensor  # (M, d) the target's dtype
    misses: Tensor  # (M,) int64


def round_sum(total: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """The block's output: the fp64 ``residual + writer`` rounded to the model's dtype, once.

    A sum below 2⁻⁴⁰ of the residual is an exact zero that fp64 could not cancel to the last bit,
    and becomes 0.
    """
    negligible = total.abs() < _SUM_IS_ZERO * residual.double().abs()
    return torch.where(negligible, 0.0, total).to(dtype)


def close(
    target: Tensor,
    residual: Tensor,
    base: Tensor,
    gain: Tensor,
    started_from: Tensor,
    branch: float = 1.0,
) -> Closed:
    """The factor ``f`` for which ``round(residual + branch (base + gain f))`` is the target,
    element by element.

    Args:
        target: T (M, d), the block's output in the model's dtype.
        residual: (M, d), all that the block adds up apart from its writer's output.
        base: (M, d), the writer's output without the factor (0 for a scale writer).
        gain: (M, d) or (M, 1), the multiplier of the factor: ``κ = v·h ≈ 1`` or ``Norm(h)``.
        started_from: (M, d), the factor of the direct or stable update.
        branch: the multiplier of the writer's output, see ``BlockSpec.residual_multiplier``.

    Misses are counted: elements where the gain is 0, or where the target is so far below the
    residual that fp64 does not resolve it.
    """
    residual64, base64, gain64 = residual.double(), base.double(), gain.double()
    reachable = gain64 * branch != 0
    needed = (target.double() - residual64) / (branch or 1.0) - base64
    factor = torch.where(
        reachable, needed / torch.where(reachable, gain64, 1.0), started_from.double()
    )
    output = round_sum(residual64 + branch * (base64 + factor * gain64), residual, target.dtype)
    return Closed(factor, output, (output != target).sum(-1))


def correction(
    factor: Tensor,
    residual: Tensor,
    base: Tensor,
    gain: Tensor,
    started_from: Tensor,
    branch: float = 1.0,
) -> Tensor:
    """The size (M,) of what :func:`close` changed: the root mean square of the changes of the
    block's output, each relative to the terms of its own element or the row's typical size. In a
    norm over the row one very large element would hide the others.

    factor: that :func:`close` chose from the other arguments.
    """
    change = ((factor - started_from) * gain * branch).abs()
    size = residual.double().abs() + (branch * (base + factor * gain)).abs()
    size = torch.maximum(size, size.sqrt().mean(-1, keepdim=True).square())
    return (change / torch.where(size > 0, size, 1.0)).square().mean(-1).sqrt()
