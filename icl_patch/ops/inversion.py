"""The inversion of RMSNorm."""

from torch import Tensor

from icl_patch.checks import check_inversion
from icl_patch.ops import native, reference
from icl_patch.ops.dispatch import constants, native_serves
from icl_patch.ops.reference import RMSNormInverse

_invert_rmsnorm = native.op("invert_rmsnorm", check_inversion.results)


def invert_rmsnorm(
    target: Tensor,
    scale: Tensor,
    rms: Tensor,
    eps: float = 0.0,
    fallback: Tensor | None = None,
) -> RMSNormInverse:
    """The ``x`` with ``RMS(x) = C`` that minimises ``‖m ⊙ Norm(x) - g‖²``, and the scale ``m'``
    with ``m' ⊙ Norm(x) = g``.

    ``y_k = g_k m_k / (m_k² - μ)`` with μ below ``min m²`` such that ``mean(y²) = C²/(C² + eps)``;
    ``x = y sqrt(C² + eps)`` and ``m'_k = (m_k² - μ)/m_k``, so that ``m' ⊙ Norm(x) = g``.

    Args:
        target: g, (B, n) of any float dtype and strides. All arithmetic is fp64.
        scale: m, (n,) or (B, n).
        rms: C, (B,).
        eps: the norm's.
        fallback: (B, n), the direction for the coordinates at ``min m²`` if the secular equation
            has no root; usually the norm's current input.

    Returns:
        RMSNormInverse(hidden, shift, new_scale, status, evaluations). A row with bad input gets a
        status and does not affect other rows. A row's bits depend only on the row. The result is
        not differentiable.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Appendix B.2, with the hard case and the norm's eps added.
    """
    check_inversion(target, scale, rms, eps, fallback)
    args = constants(target, scale, rms, eps, fallback)
    if not native_serves(target.device.type):
        return reference.invert_rmsnorm(*args)
    return RMSNormInverse(*_invert_rmsnorm(*args))
