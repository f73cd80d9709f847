"""icl-patch: a context as a change of weights, computed, applied lazily and proven on real models.

A transformer block that reads a context computes, for each token, exactly as if its weights had
been changed. :class:`ContextPatcher` computes that change, :class:`ContextPatch` holds it::

    with ContextPatcher(model) as patcher:
        patch = patcher.compute(context_ids, kept_ids)  # one change of weights for each kept token
        logits = patcher.forward(kept_ids, patch)  # the kept tokens alone, without the context
        patch.save("patch.safetensors")

:class:`PatchedLinear` and :class:`PatchedRMSNorm` apply such changes in any loop of one's own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from icl_patch._version import __version__

if TYPE_CHECKING:
    from icl_patch import ops, static
    from icl_patch.analysis.controllability import controllability
    from icl_patch.errors import (
        ControllabilityError,
        FingerprintMismatch,
        NonFiniteError,
        PatchFormatError,
        RankError,
        ReplayMismatch,
        UnsupportedModelError,
    )
    from icl_patch.evaluation import embedded
    from icl_patch.evaluation.verify import verify
    from icl_patch.invariance.batch_invariant import batch_invariant
    from icl_patch.layers.experts import PatchedExperts
    from icl_patch.layers.linear import PatchedLinear
    from icl_patch.layers.rms_norm import PatchedRMSNorm
    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.patcher import ContextPatcher
    from icl_patch.recording.attached_block import detach

# Imported when first used (PEP 562), so that `icl-patch --help` does not wait for torch.
_HOMES = {
    "ContextPatch": "icl_patch.patch.context_patch",
    "ContextPatcher": "icl_patch.patcher",
    "ControllabilityError": "icl_patch.errors",
    "FingerprintMismatch": "icl_patch.errors",
    "NonFiniteError": "icl_patch.errors",
    "PatchFormatError": "icl_patch.errors",
    "PatchedExperts": "icl_patch.layers.experts",
    "PatchedLinear": "icl_patch.layers.linear",
    "PatchedRMSNorm": "icl_patch.layers.rms_norm",
    "RankError": "icl_patch.errors",
    "ReplayMismatch": "icl_patch.errors",
    "UnsupportedModelError": "icl_patch.errors",
    "batch_invariant": "icl_patch.invariance.batch_invariant",
    "controllability": "icl_patch.analysis.controllability",
    "detach": "icl_patch.recording.attached_block",
    "embedded": "icl_patch.evaluation",
    "ops": "icl_patch",
    "static": "icl_patch",
    "verify": "icl_patch.evaluation.verify",
}

__all__ = [
    "ContextPatch",
    "ContextPatcher",
    "ControllabilityError",
    "FingerprintMismatch",
    "NonFiniteError",
    "PatchFormatError",
    "PatchedExperts",
    "PatchedLinear",
    "PatchedRMSNorm",
    "RankError",
    "ReplayMismatch",
    "UnsupportedModelError",
    "__version__",
    "batch_invariant",
    "controllability",
    "detach",
    "embedded",
    "ops",
    "static",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if name in ("embedded", "ops", "static"):
        value: Any = import_module(f"{home}.{name}")
    else:
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
