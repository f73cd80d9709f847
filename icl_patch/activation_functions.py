"""The activation functions of a gated product ``act(gate) ⊙ up``: the one table of their names.

A new one is added here, and computed in ``triton_kernels/ops/gated_product.py`` and
``csrc/cpu/gated_product.cpp``, which ``csrc/bindings/gated_product.cpp`` calls with a ``Gated`` of
``csrc/common/calls.h``.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """The activation as a function of torch.

    Raises:
        ValueError: the name is not in the table.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"expected activation {' or '.join(map(repr, ACTIVATIONS))}, got {name!r}")
    return ACTIVATIONS[name]


def activation_code(name: str) -> int:
    """The activation's position in the table: a kernel is compiled for this number.

    Raises:
        ValueError: the name is not in the table.
    """
    activation_named(name)
    return list(ACTIVATIONS).index(name)
