"""What can go wrong, by name."""

from typing import Any


class UnsupportedModelError(ValueError):
    """The model, or its attention implementation, has a form that is not known to be covered."""


class ControllabilityError(ValueError):
    """No change of the weights can have the wanted effect: an input is zero where the update
    divides by it.

    ``violations``: everything that was found on the way, by block, see
        :func:`icl_patch.controllability`.
    """

    def __init__(self, message: str, violations: tuple[tuple[Any, ...], ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations


class PatchFormatError(ValueError):
    """A patch file, or a patch, that is not well formed: missing, extra, wrong-shape, non-finite or
    truncated tensors.
    """


class FingerprintMismatch(ValueError):
    """A well-formed patch that was computed with other weights, another dtype or another
    tokenizer.
    """
