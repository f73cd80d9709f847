"""The gated product before the last matrix of an MLP."""

from torch import Tensor

from icl_patch.checks import check_gated_product
from icl_patch.ops import reference
from icl_patch.ops.dispatch import Op, native_takes, triton_for


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) ⊙ up``. The activation is computed in fp32 and rounded to the model's dtype, as
    its module does. The product is rounded again.

    Args:
        gate, up: (M, N) float, both of one dtype, any strides. They may be the halves of one fused
            output.
        activation: ``"gelu_tanh"`` or ``"silu"``.

    Returns:
        (M, N) in gate's dtype; everything in fp64 for fp64.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or the activation does not fit.
    """
    return _gated_product(gate, up, activation)


_gated_product = Op("gated_product", check_gated_product, reference.gated_product)


def has_gated_product(gate: Tensor) -> bool:
    """Whether :func:`gated_product` of these tensors runs in one of our kernels."""
    return triton_for((gate,)) is not None or native_takes((gate,))
