"""A patch on other weights than its own, as those after fine-tuning."""

from dataclasses import replace

from icl_patch.errors import FingerprintMismatch
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.serialization import check_fit
from icl_patch.recording.attached_model import HasAttachedModel


def on_other_weights(patch: ContextPatch, patcher: HasAttachedModel) -> ContextPatch:
    """The same factors as a patch of the patcher's model, which may have other weights.

    The fingerprint prevents such a use elsewhere. The result can be replayed and applied, but it
    may not have the effect of the context. Its ``info.model`` says from which model it comes.
    ``patch`` itself stays as it is.

    Raises:
        FingerprintMismatch: the model's dtype is another.
        PatchFormatError: its blocks have another form, or the factors do not fit its parameters.
    """
    attached = patcher.attached_model
    attached.require_attached()
    model = attached.model
    if patch.info.dtype != str(model.dtype):
        raise FingerprintMismatch(
            f"expected a patch of a model in {model.dtype}, got one in {patch.info.dtype}: load the"
            " model in that dtype"
        )
    patch.check_blocks(attached.block_specs)
    check_fit(patch, model)
    own = model.config.name_or_path or type(model).__name__
    info = replace(
        patch.info,
        model=f"{own} (from {patch.info.model}, {patch.info.fingerprint[:12]})",
        revision=None,
        fingerprint=attached.weights.fingerprint,
    )
    return replace(patch, info=info, logits=None, digest=None, report=None, weights=None)
