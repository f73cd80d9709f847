"""Measures of logits: whether they are numbers, and the papers' distances between two sets."""

import torch
from torch import Tensor


def _check_shapes(logits: Tensor, reference: Tensor) -> None:
    if logits.shape != reference.shape:
        raise ValueError(
            f"expected logits of one shape, got {tuple(logits.shape)} and {tuple(reference.shape)}"
        )


def linf(logits: Tensor, reference: Tensor) -> Tensor:
    """``max |logits - reference| / max |reference|`` over the vocabulary: (..., V) -> (...) fp64.

    NaN or infinity on one side only gives infinity.

    Raises:
        ValueError: their shapes differ.
    """
    _check_shapes(logits, reference)
    difference = (logits.double() - reference.double()).abs()
    difference = torch.where(logits == reference, 0.0, difference).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )
    size = reference.double().abs().nan_to_num(0.0, 0.0).amax(-1)  # of finite logits
    return difference.amax(-1) / torch.where(size > 0, size, 1.0)


def replay_error(replayed: Tensor, expected: Tensor, valid: Tensor) -> float:
    """The largest :func:`linf` of all valid tokens; 0 without any.

    Args:
        replayed, expected: logits (B, T, V). valid: (B, T) bool.
    """
    return max(linf(replayed[valid], expected[valid]).tolist(), default=0.0)


def total_variation(logits: Tensor, reference: Tensor) -> Tensor:
    """``½ ‖softmax(logits) - softmax(reference)‖₁``: (..., V) -> (...) fp64, from 0 to 1.

    Raises:
        ValueError: their shapes differ.

    Source: Goldwaser et al. (2025), section 4.2.
    """
    _check_shapes(logits, reference)
    return 0.5 * (logits.double().softmax(-1) - reference.double().softmax(-1)).abs().sum(-1)


def same_argmax(logits: Tensor, reference: Tensor) -> Tensor:
    """Whether greedy decoding chooses the same token: (..., V) -> (...) bool."""
    return logits.argmax(-1) == reference.argmax(-1)


def all_finite(x: Tensor) -> Tensor:
    """Whether no element is NaN or infinite, () bool: one reduction, without a wait for the device.

    It is False too if the largest and the smallest element differ by more than the dtype's range.
    """
    low, high = torch.aminmax(x)
    return high - low < torch.inf


def bit_identical(x: Tensor, reference: Tensor) -> Tensor:
    """Whether all elements of the last dimension are equal numbers, 0 and -0 too: (..., V) -> (...)
    bool; a NaN is equal to nothing.
    """
    return (x == reference).all(-1)
