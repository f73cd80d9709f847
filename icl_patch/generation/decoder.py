"""Decoder: an attached model with everything that generation caches for it."""

from dataclasses import dataclass, field
from typing import Any

from icl_patch.generation.fused_modules import FusedModules
from icl_patch.generation.shared_cache import SharedCacheStreams
from icl_patch.layers.attachment import Attachment
from icl_patch.recording.attached_model import AttachedModel


@dataclass(eq=False)
class Decoder:
    """An attached model, with the caches of its decode steps.

    Attributes:
        attached: the model.
        shared_cache: how its blocks run both streams over one cache; None before it is first used.
        fused_modules: its norms and gated MLPs as single operations; None before the first step.
        compiled_steps: the last compiled steps, by everything that they depend on.
        warned_slower: whether a warning has said that steps run in a slower mode.
    """

    attached: AttachedModel
    shared_cache: SharedCacheStreams | None = None
    fused_modules: FusedModules | None = None
    compiled_steps: dict[Any, Any] = field(default_factory=dict)
    warned_slower: bool = False

    @property
    def attachment(self) -> Attachment:
        """The model's lock, for :func:`icl_patch.layers.attachment.one_pass`."""
        return self.attached.attachment

    def clear(self) -> None:
        """Forget everything about the model."""
        self.shared_cache = self.fused_modules = None
        self.compiled_steps.clear()
