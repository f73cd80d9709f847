"""The papers' update of a block for one token: each formula as a pure function of tensors.

A block computes ``hidden + writer(act(readers(z)))``, where ``z`` is made of ``hidden``, the
residual stream before the MLP. With the context it would see ``hidden_ctx = hidden + delta``. The
update changes its weights so that it gives the same output without the context. Line by line of
Table 1 and Appendix B of Goldwaser et al. (2025)::

    Lemmas 6, 7  a reader               u = W z_ctx - W z         reader_update
                                        v = z / ‖z‖²              read_direction
    Lemma 8      a writer's bias        Δb = delta                bias_update
    Lemma 9      a writer's matrix      u = delta, v = h / ‖h‖²   weight_update
    Lemma 10     a norm's scale         m' = m + delta ⊘ Norm(h)  direct_scale
    Lemma 11     experts' matrices      u = delta, v_j            expert_update
    Lemma 12     a parallel block       delta at its end alone    writer_target
    Appendix B   W_down, then a scale   u = h_target - h, m'      stable_scale
    ours         any writer, rounded    round(... + f ...) = T    close

:mod:`icl_patch.recording.algorithm_1` puts them together, with every matrix written out. The
recorders of a pass and of a decode step call them too, with vectors alone. In a decode step one op
may compute several of them, together with the norm or the product beside them::

    ops.norm_pair        context_change, read_direction
    ops.record_linear    reader_update, add_rank_one
    ops.record_norm      stable_scale, read_direction, add_rank_one

``tests/ops`` compares these ops with the ones that the functions call. Nothing else computes an
update. The patched modules (:mod:`icl_patch.layers`) apply it.

Shapes: ``...`` tokens, ``d`` residual width, ``K`` and ``N`` the features that a matrix takes and
gives, ``I`` inner width of the MLP, ``k`` active experts. Results are in the accumulation dtype,
fp32 or fp64 for fp64, if nothing else is said.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.patched_module import rows_of
from icl_patch.ops import Direction, read_direction

# A sum below this share of the residual is the rounding error of an exact zero.
_SUM_IS_ZERO = 2.0**-40


# -- what the context changes


def context_change(hidden_ctx: Tensor, hidden: Tensor) -> Tensor:
    """``delta = hidden_ctx - hidden``: what the context changes in the residual stream before the
    MLP.

    hidden_ctx, hidden: (..., d) in the accumulation dtype. In a decode step
    :func:`icl_patch.ops.norm_pair` computes it, with the norm.
    Source: ΔA_x(Y) of Goldwaser et al. (2025), Section 5.
    """
    return hidden_ctx - hidden


def writer_target(
    delta: Tensor, factor: float = 1.0, multiplier: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """``factor · weight ⊙ delta / multiplier``: the change of a writer's output in a block
    ``factor · weight ⊙ hidden + multiplier · MLP``.

    delta: (..., d); weight: (d,), 1 by default; multiplier: not 0. A parallel block has no reader
    to change, and its output takes up all of this.
    Source: Goldwaser et al. (2025), Theorem 1 and Lemma 12.
    """
    target = delta if factor == multiplier else delta * factor / multiplier
    return target if weight is None else target * weight.to(target.dtype)


# -- readers


def reader_update(y_ctx: Tensor, y: Tensor) -> Tensor:
    """``u = W z_ctx - W z`` as the difference of the module's own two outputs; with ``v = z/‖z‖²``,
    ``(W + u vᵀ) z = W z_ctx``.

    y_ctx, y: (..., N), any float dtype. In a decode step
    :func:`icl_patch.ops.record_linear` computes it, with both products and the patched output.
    Source: Goldwaser et al. (2025), Theorem 1 and Lemmas 6 and 7.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    return y_ctx.to(dtype) - y.to(dtype)


def scaled_reader_update(change: Tensor, share: Tensor) -> Tensor:
    """``u = change / s`` for an expert that reads ``s z``; 0 where s is 0. There ``v = z / ‖z‖²``
    gives ``v·(s z) = s``.

    change: :func:`reader_update` of its outputs, (..., N); share: s, (..., 1).
    Source: Goldwaser et al. (2025), Lemma 7.
    """
    return torch.where(share == 0, 0, change / share)


def add_rank_one(y: Tensor, z: Tensor, u: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``(W + u vᵀ) z = y + (v·z) u`` for ``y = W z``: (..., N), rounded once to ``out_dtype``.

    y, u: (..., N); z, v: (..., K). In a decode step :func:`icl_patch.ops.record_linear` and
    :func:`icl_patch.ops.record_norm` compute it too.
    """
    return ops.add_low_rank(*map(rows_of, (y, z, u, v)), out_dtype=out_dtype).reshape(y.shape)


# -- writers


def bias_update(delta: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``Δb = delta``, (..., d), in ``dtype`` or delta's.

    Source: Goldwaser et al. (2025), Lemma 8; Dherin et al. (2025), Theorem B.2.
    """
    return delta if dtype is None else delta.to(dtype)


def weight_update(
    delta: Tensor, h: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Direction]:
    """``u = delta`` and ``v = h / ‖h‖²``, so that ``(W + u vᵀ) h = W h + delta``.

    delta: (..., d); h: (..., K), the input of W; dtype: of u and v, fp32 or fp64. Where h is 0,
    so are v and ``1/‖h‖²``, and no change of W has an effect.
    Source: Goldwaser et al. (2025), Lemma 9.
    """
    direction = read_direction(h, dtype)
    return delta.to(direction.v.dtype), direction


def direct_scale(delta: Tensor, normalized: Tensor, scale: Tensor) -> Tensor:
    """``m' = m + delta ⊘ Norm(h_down)``: the direct update of a scale writer.

    delta, normalized (..., d), scale (d,). Returns m' (..., d). Where both delta and Norm(h_down)
    are 0, the scale stays; where only Norm(h_down) is 0, the result is infinite (no scale can
    produce delta).
    Source: Goldwaser et al. (2025), Theorem 1 and Lemma 10.
    """
    return torch.where(delta == 0, scale.expand_as(delta), scale + delta / normalized)


class StableScale(NamedTuple):
    """The stable update of a scale writer: u (..., d) of W_down, m' (..., d) in fp64, and the
    inversion's status (...), an :class:`icl_patch.ops.InversionStatus`.
    """

    u: Tensor
    new_scale: Tensor
    status: Tensor


def stable_scale(delta: Tensor, scale: Tensor, hidden_down: Tensor, eps: float) -> StableScale:
    """``u = h_target - h_down`` and ``m'`` with ``m' ⊙ Norm(h_target) = delta + m ⊙ Norm(h_down)``:
    the stable update of a scale writer. W_down changes by ``u vᵀ`` as in :func:`weight_update`.

    delta, hidden_down: (..., d), any float dtype; scale: m, (d,) or one for each row; eps: the
    norm's. ``m' = m̃ - μ ⊘ m̃`` with each ``|m_k|`` raised to at least ``0.25 rms m`` in m̃; how
    h_target and μ are found is in :mod:`icl_patch.ops.stable_update`. In a decode step
    :func:`icl_patch.ops.record_norm` computes it, with the norm.
    Source: Goldwaser et al. (2025), Appendix B.
    """
    shape = hidden_down.shape
    scale = scale if scale.dim() == 1 else rows_of(scale)
    stable = ops.stable_scale(rows_of(delta), scale, rows_of(hidden_down), eps)
    status = stable.status.reshape(shape[:-1])
    return StableScale(stable.u.reshape(shape), stable.new_scale.reshape(shape), status)


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


def move_off_zero(
    u: Tensor,
    v: Tensor,
    hidden_down: Tensor,
    h: Tensor,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
) -> Tensor:
    """u (..., d) of a stable update, from which an exact scale writer starts: moved by
    :func:`off_zero` where the patched output, rounded to ``out_dtype``, would be 0.

    u, hidden_down, addend: (..., d); v, h: (..., K), h the input of W_down.
    """
    return u + off_zero(add_rank_one(hidden_down, h, u, v, out_dtype), hidden_down, addend)


def scale_off_zero(new_scale: Tensor, scaled: Tensor, addend: Tensor) -> Tensor:
    """m' (..., d) of an inner norm, moved by 2⁻¹² or two spacings of the output where its output
    ``scaled = m' ⊙ Norm(h)`` and ``addend`` cancel: :func:`off_zero` for a norm that reads their
    sum.

    scaled, addend: (..., d).
    """
    moved = new_scale * (1 + max(2.0**-12, 2 * torch.finfo(scaled.dtype).eps))
    return torch.where(addend + scaled == 0, moved, new_scale)


class ExpertUpdate(NamedTuple):
    """The update of the active experts' output matrices, or of their biases.

    u: (..., d), which they share; v: (..., k, I), or None for biases.
    total: S (..., 1) fp64, the sum of the weights of the experts that can change; share: 1/S in u's
    dtype. Where S is 0, so is 1/S, and no change has an effect.
    """

    u: Tensor
    v: Tensor | None
    total: Tensor
    share: Tensor


def expert_update(
    delta: Tensor, weights: Tensor, h: Tensor, dtype: torch.dtype, *, bias: bool = False
) -> ExpertUpdate:
    """``u = delta`` and ``v_j = h_j / (‖h_j‖² S)``, ``S = Σ_j s_j``, so that the experts together
    give ``Σ_j s_j (v_j·h_j) u = delta``; with ``bias`` the biases' ``Δb = delta / S``.

    Args:
        delta: (..., d).
        weights: s_j (..., k), of the active experts; an expert with ``h_j = 0`` takes no share.
        h: h_j (..., k, I), the inputs of their output matrices.
        dtype: of u and v, fp32 or fp64.

    Source: Goldwaser et al. (2025), Lemma 11.
    """
    shares, v = weights.double(), None
    if not bias:
        v, inverse, _ = read_direction(h, dtype)
        shares = torch.where(inverse != 0, shares, 0)
    total, delta = shares.sum(-1, keepdim=True), delta.to(dtype)
    share = torch.where(total == 0, 0, 1 / total).to(dtype)
    if v is None:
        return ExpertUpdate(delta * share, None, total, share)
    return ExpertUpdate(delta, v * share.unsqueeze(-1), total, share)


# -- closing: the exact update


def weight_gain(h: Tensor, v: Tensor) -> Tensor:
    """``κ = v·h`` (..., 1) of an exact weight writer, with the bits that a replay multiplies u by.
    It is 1 but for fp64's rounding, and the misses that are counted have to be those of the replay.

    h, v: (..., K), v in fp64.
    """
    return (h.double() * v).sum(-1, keepdim=True)


def written(base: Tensor, gain: Tensor, factor: Tensor, branch: float = 1.0) -> Tensor:
    """``branch (base + gain f)``: what a writer adds to the block's sum; see :func:`close`."""
    return branch * (base + factor * gain)


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
    total = residual64 + written(base64, gain64, factor, branch)
    output = round_sum(total, residual, target.dtype)
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
    size = residual.double().abs() + written(base, gain, factor, branch).abs()
    size = torch.maximum(size, size.sqrt().mean(-1, keepdim=True).square())
    return (change / torch.where(size > 0, size, 1.0)).square().mean(-1).sqrt()
