"""icl-patch: a context as a change of weights, computed, applied lazily and proven on real
transformer models.

``(W + u vᵀ) z = W z_ctx``: what a context does to a token is a rank-1 change of the MLP's input
matrices and a change of its output parameters. :class:`ContextPatcher` computes it,
:class:`ContextPatch` holds it.
"""

from icl_patch import ops
from icl_patch._version import __version__
from icl_patch.analysis.controllability import controllability
from icl_patch.errors import (
    ControllabilityError,
    FingerprintMismatch,
    PatchFormatError,
    UnsupportedModelError,
)
from icl_patch.evaluation.verify import verify
from icl_patch.layers.experts import PatchedExperts
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patcher import ContextPatcher
from icl_patch.recording.attached_block import detach

__all__ = [
    "ContextPatch",
    "ContextPatcher",
    "ControllabilityError",
    "FingerprintMismatch",
    "PatchFormatError",
    "PatchedExperts",
    "PatchedLinear",
    "PatchedRMSNorm",
    "UnsupportedModelError",
    "__version__",
    "controllability",
    "detach",
    "ops",
    "verify",
]
