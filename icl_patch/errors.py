"""What can go wrong, by name."""


class UnsupportedModelError(ValueError):
    """The model, or its attention implementation, has a form for which no update is known."""


class ControllabilityError(ValueError):
    """No change of the weights can have the wanted effect: an input is zero where the update divides by it."""


class PatchFormatError(ValueError):
    """A patch file, or a patch, that is not well formed: missing, extra, wrong-shape, non-finite or truncated tensors."""


class FingerprintMismatch(ValueError):
    """A well-formed patch that was computed on another model, revision or tokenizer."""
