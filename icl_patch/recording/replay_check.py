"""Is a replay the one that the patch had where it was made? Another processor, number of threads or
version of torch rounds otherwise.
"""

import warnings

import torch
from torch import Tensor

from icl_patch.errors import ExactnessWarning, ReplayMismatch
from icl_patch.patch.context_patch import ContextPatch


def check_replay(patch: ContextPatch, logits: Tensor) -> None:
    """Compare the logits (B, T, V) of a replay with the patch's digest, if it has one.

    A token is off if its error exceeds ``√eps`` of the dtype, see
    :func:`icl_patch.tolerances.rounding_limit`. Rounding moves few tokens as far as that. So the
    patch is refused if most tokens of a row are off; and with more digits than 16 bits hold, if
    another token is ahead of one by twice as much, because each of two logits may be off.

    Raises:
        ReplayMismatch: it has become another replay.
    """
    if (digest := patch.replay_digest) is None:
        return
    (errors, ahead), limit = digest.errors(logits), digest.limit
    off, other, known = errors > limit, digest.other_bits(logits), digest.known
    if not (off | other).any():
        return
    broken = 2 * off.sum(1) > known.sum(1)
    if limit < torch.finfo(torch.float16).eps:
        broken = broken | (ahead > 2 * limit).any(1)
    update, error = patch.info.update, float(errors.max())
    if broken.any():
        raise ReplayMismatch(
            f"expected a replay with the logits that this {update} patch had where it was made, up"
            f" to rounding ({limit:.1g} of the largest one), got others, off by at least"
            f" {error:.1g}, at {_places(off, known)}; {int((ahead > 2 * limit).sum())} of them are"
            " followed by another token. The model rounds differently here (another processor,"
            f" number of threads or version of torch, or a copy of the model){_ADVICE[update]}"
        )
    differs = "other bits" if other.any() else "other logits at some tokens"
    rest = "at the other tokens" if off.any() else "up to rounding"
    warnings.warn(
        f"this {update} patch has {differs} than where it was made, as on another processor, with"
        " another number of threads, or on a copy of the model: its replay differs at"
        f" {_places(other | off, known)}, by {error:.1g} of the largest logit or more. Take it as"
        f" right {rest}, or compute the patch again here",
        ExactnessWarning,
        stacklevel=2,
    )


_ADVICE = {
    "direct": ", which a direct patch magnifies where it divides by small activations. Compute it"
    " again here, or take update='stable' or 'exact'",
    "stable": ". Compute the patch again here, or take update='exact'",
    "exact": ". Compute the patch again here",
}


def _places(tokens: Tensor, known: Tensor) -> str:
    """How many tokens (B, T) bool of those that are known, and the first of them."""
    row, token = tokens.nonzero()[0].tolist()
    count = f"{int(tokens.sum())} of {int(known.sum())} tokens"
    return f"{count}, the first being row {row}, kept token {token}"
