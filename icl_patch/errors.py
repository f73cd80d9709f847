"""The package's own exceptions."""

from typing import Any


class UnsupportedModelError(ValueError):
    """The package does not support the model, or its attention implementation."""


class ControllabilityError(ValueError):
    """No change of the weights can have the context's effect: an input is zero where the update
    divides by it.

    violations: all that were found, by block; see :func:`icl_patch.controllability`.
    """

    def __init__(self, message: str, violations: tuple[tuple[Any, ...], ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations


class NonFiniteError(ValueError):
    """The model, or a replay of a patch, gave logits with NaN or infinity: its dtype cannot hold
    all outputs of the block that the message names, or the weight named holds such numbers itself.
    """


class PatchFormatError(ValueError):
    """A patch or its file is not well formed: it is damaged, tensors are missing, extra or not
    finite, or they do not fit the model.
    """


class FingerprintMismatch(ValueError):
    """A well-formed patch was computed with other weights, another dtype or another tokenizer."""


class ExactnessWarning(UserWarning):
    """A patch was replayed, and its logits differ from those that it promises: of an exact patch by
    some bits, of another one by more than rounding at some tokens.
    """


class ReplayMismatch(ValueError):
    """A patch is replayed where numbers round otherwise than where it was made, as on another
    processor, and has become another change: its logits differ by more than rounding explains.
    """


class SlowerStepsWarning(UserWarning):
    """The faster mode of an update's decode steps does not work for this model."""


class HarmfulPatchError(ValueError):
    """A fitted static patch is worse than no patch, or changes texts that it should preserve.

    report: its measurements, an :class:`icl_patch.static.StaticReport`.
    """

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class StaticPatchWarning(UserWarning):
    """A static patch lacks information, or prompts differ from those of its fit."""


class RankError(RuntimeError):
    """The processes that run one model together cannot go on: one has ended or does not answer, or
    they were given different things. It is raised on all of them.
    """
