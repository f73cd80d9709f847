"""A patch on other weights than its own, as those after fine-tuning."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from icl_patch.errors import FingerprintMismatch
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.serialization import check_fit
from icl_patch.recording.attached_model import HasAttachedModel
from icl_patch.recording.patch_assembly import layers_of_all


def on_other_weights(patch: ContextPatch, patcher: HasAttachedModel) -> ContextPatch:
    """The same changes as a patch of the patcher's model, which may have other weights: ``W + u
    vᵀ``, ``b + Δb`` and ``m + Δm`` of its own W, b and m.

    So ``norms`` and ``weight_changes`` stay as they are, up to rounding, and a norm's new scale
    becomes ``m + (m'_old - m_old)``. The fingerprint prevents such a use elsewhere. The result can
    be replayed and applied, but it may not have the effect of the context. Its ``info.model`` says
    from which model it comes. ``patch`` itself stays as it is. All ranks of a split model call this
    together.

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
    own_scales = tuple(
        {f"{name}.scale": norm.scale for name, norm in block.norms.items()}
        for block in attached.blocks
    )
    scales = layers_of_all(attached, own_scales, patch.kept_ids.device)
    layers = tuple(
        _on_other_scales(layer, scales[index])
        for index, layer in zip(patch.layer_indices, patch.layers, strict=True)
    )
    return replace(
        patch, info=info, layers=layers, logits=None, digest=None, report=None, weights=None
    )


def _on_other_scales(
    layer: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The factors of a block with ``m + (m' - m_old)`` in place of m'; the same bits where m is the
    same.
    """
    moved = dict(layer)
    for name in layer.keys() & scales.keys():
        norm = name.removesuffix(".scale")
        old, new_scale = layer[name], layer[f"{norm}.new_scale"]
        scale = scales[name].to(old)
        other = scale.double() + (new_scale.double() - old.double())
        moved[name] = scale
        moved[f"{norm}.new_scale"] = torch.where(scale == old, new_scale, other.to(new_scale))
    return moved
