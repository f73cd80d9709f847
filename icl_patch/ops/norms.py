"""RMSNorm: alone, with a scale per row, and for both streams of a recording."""

from typing import Any, NamedTuple

from torch import Tensor

from icl_patch.checks import check_eps, check_norm_pair, check_rms_norm
from icl_patch.dtypes import check_floating
from icl_patch.ops import reference
from icl_patch.ops.direction import Direction, read_direction
from icl_patch.ops.dispatch import Op


class NormPair(NamedTuple):
    """z_pair (2M, d), both streams' normed rows; delta (M, d), ``hidden_ctx - hidden`` in fp32; the
    direction of the reduced stream's z.
    """

    z_pair: Tensor
    delta: Tensor
    direction: Direction


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """``Norm(x) = x / sqrt(mean(x²) + eps)`` over the last dimension, without a scale; (..., n) ->
    (..., n) fp32 (fp64 for fp64).

    Raises:
        TypeError: x is not floating.
        ValueError: ``eps`` does not fit.
    """
    check_floating("x", x)
    check_eps(eps)
    return reference.rms_normalize(x, eps)


def rms_norm(
    x: Tensor, scale: Tensor, eps: float, *, scale_offset: float = 0.0, cast_first: bool = True
) -> Tensor:
    """``y = (o + m) ⊙ x / sqrt(mean(x²) + eps)``, row by row.

    Args:
        x: (M, d) float, any strides, d ≥ 1.
        scale: m, (d,) or a scale for every row (M, d), any float dtype.
        eps: the norm's.
        scale_offset: o; 1 for Gemma, 0 for Llama.
        cast_first: whether the normed row is rounded to x's dtype before scaling (Llama) or only
            after it (Gemma).

    Returns:
        (M, d) in x's dtype, computed in fp32 (fp64 if an input is fp64). A row's bits depend only
        on the row and its scale.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Lemma 10, with the scale per row.
    """
    return _rms_norm(x, scale, eps, scale_offset, cast_first)


def norm_pair(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    scale_offset: float = 0.0,
    cast_first: bool = True,
) -> NormPair:
    """The norm before the MLP for both streams. It also returns ``delta`` and the direction of z,
    which a recording needs.

    Args:
        hidden: (2M, d) float: the residual stream of M rows with the context, then of M without.
        weight: (d,), any float dtype.
        eps, scale_offset, cast_first: as for :func:`rms_norm`.

    Returns:
        NormPair(z_pair, delta, direction): :func:`rms_norm` of every row, ``hidden_ctx - hidden``
        in fp32 (fp64 for fp64 ``hidden``), and :func:`read_direction` of the reduced rows of
        z_pair.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Lemma 6 and Theorem 1.
    """
    z_pair, delta, *direction = _norm_pair(hidden, weight, eps, scale_offset, cast_first)
    return NormPair(z_pair, delta, Direction(*direction))


def _reference_norm_pair(hidden: Tensor, *norm: Any) -> tuple[Tensor | None, ...]:
    z_pair = reference.rms_norm(hidden, *norm)
    context, reduced = hidden.to(reference.accumulation_dtype(hidden)).chunk(2)
    return z_pair, context - reduced, *read_direction(z_pair[len(reduced) :])


_rms_norm = Op("rms_norm", check_rms_norm, reference.rms_norm)
_norm_pair = Op("norm_pair", check_norm_pair, _reference_norm_pair)
