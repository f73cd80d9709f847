"""The product before an MLP's last matrix."""

from torch import Tensor

from icl_patch.activations import activation_named
from icl_patch.ops import reference
from icl_patch.ops.checks import check_floats
from icl_patch.ops.dispatch import Op


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) ⊙ up``: the activation in fp32, rounded to the model's dtype as its module does,
    then the product, rounded again.

    Args:
        gate, up: (M, N) float, both of one dtype, any strides: the halves of one fused output are
            fine.
        activation: ``"gelu_tanh"`` or ``"silu"``.

    Returns:
        (M, N) in gate's dtype; everything in fp64 for fp64.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or the activation does not fit.
    """
    return _gated_product.native_first(gate, up, activation)


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    activation_named(activation)
    if gate.dim() != 2 or gate.shape != up.shape:
        raise ValueError(
            f"expected gate and up (M, N), got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    check_floats(gate=gate, up=up)
    if up.dtype != gate.dtype:
        raise TypeError(f"expected up in gate's dtype {gate.dtype}, got {up.dtype}")


_gated_product = Op("gated_product", _check, reference.gated_product)
