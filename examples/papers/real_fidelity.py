"""How faithful replays are on a pretrained model: every update and the model's own noise, token by
token and block by block, beside the unmodified model with its context.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icl_patch import ContextPatch, ContextPatcher, metrics
from icl_patch.errors import ControllabilityError
from icl_patch.models.block_spec import Writer
from icl_patch.patch.serialization import UPDATES
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import BlockActivations
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.passes import Computation, observe, run_closing_pass
from icl_patch.recording.patch_assembly import Violations
from icl_patch.recording.sequences import Sequences, assemble

KEPT, KEPT_DIRECT = "stable, first token kept", "direct, first token kept"
"""These updates of all of the context but its first token, which stays."""
REPLAYS = (*reversed(UPDATES), KEPT, KEPT_DIRECT)
"""The last one only of blocks that end in a scale: at others direct is stable."""
STEPWISE = "token by token"
NOISE = ("no cache", STEPWISE)
"""The unmodified model against itself: one pass over everything, and one token a call."""
RUNS = (*REPLAYS, *NOISE)

Arrays = dict[str, np.ndarray]
Outcome = tuple[Tensor, Sequence[BlockActivations]]


@contextmanager
def attached(model: Any) -> Iterator[dict[str, AttachedModel]]:
    """A copy of the model for each update, attached."""
    with ExitStack() as stack:
        yield {
            update: stack.enter_context(ContextPatcher(copy.deepcopy(model), update)).attached_model
            for update in UPDATES
        }


@torch.no_grad()
def measure(
    models: dict[str, AttachedModel],
    context: Tensor,
    kept: Tensor,
    stepwise: bool = True,
    first_kept: bool = True,
) -> Arrays:
    """One sequence, context (1, C) and kept tokens (1, T): for every run the errors of each token,
    (T,), and of each block's output, (L, T); and the sizes of the changes.

    A run whose update has no patch of some token has only the block and the token at which it has
    none. stepwise: also run the unmodified model token by token. first_kept: also keep the first
    token.
    """
    sequences, exact = assemble(context, kept), models["exact"]
    first = assemble(context, kept, keep_first=1)
    cache = exact.prefill(sequences)
    two_updates = any(block.spec.writer is Writer.SCALE for block in exact.blocks)
    runs = [run for run in REPLAYS if first_kept or run not in (KEPT, KEPT_DIRECT)]
    computations = {"exact": exact.compute_from(copy.deepcopy(cache), sequences)}
    refused: Arrays = {}
    for run in runs:
        attached = models[run.split(",")[0]]
        if run == "exact" or (run == KEPT_DIRECT and not two_updates):
            continue
        try:
            computations[run] = (
                attached.compute_from(copy.deepcopy(cache), first)
                if run in (KEPT, KEPT_DIRECT)
                # the pass with the context is that of exact
                else closing_pass(attached, computations["exact"], sequences)
            )
        except ControllabilityError as error:
            refused |= uncontrollable(run, error.violations, kept.shape[1])
    reference = computations["exact"].patch.logits
    assert reference is not None
    blocks = _blocks(computations["exact"].activations, len(exact.blocks), kept.shape[1])
    top = reference[0].float().topk(2, -1).values
    found: Arrays = {
        "margin": ((top[:, 0] - top[:, 1]) / reference[0].float().abs().amax(-1)).numpy()
    }
    outcomes = {
        run: models[run.split(",")[0]].replay(made.patch) for run, made in computations.items()
    }
    outcomes |= _noise(exact, cache, sequences, stepwise)
    for run, (logits, activations) in outcomes.items():
        own = _blocks(activations, len(exact.blocks), kept.shape[1])
        found |= {
            f"{run}/match": metrics.same_argmax(logits[0], reference[0]).numpy(),
            f"{run}/identical": metrics.bit_identical(logits[0], reference[0]).numpy(),
            f"{run}/linf": metrics.linf(logits[0], reference[0]).float().numpy(),
            f"{run}/tvd": metrics.total_variation(logits[0], reference[0]).float().numpy(),
            f"{run}/blocks": ((own - blocks).norm(dim=-1) / blocks.norm(dim=-1)).numpy(),
        }
    for run, made in computations.items():
        found |= {f"{run}/{key}": value for key, value in conditions(made).items()}
        found |= uncontrollable(run, made.violations, kept.shape[1])
    return found | refused


def closing_pass(attached: AttachedModel, other: Computation, sequences: Sequences) -> Computation:
    """The computation of a model's update from the pass with the context of another update's."""
    patch = replace(attached.empty_patch(sequences, passes=2), logits=other.patch.logits)
    with attached.attachment.exclusive():
        return run_closing_pass(attached, other.activations, patch, attached.update)


def _blocks(activations: Sequence[BlockActivations], blocks: int, width: int) -> Tensor:
    """The blocks' outputs (L, width, d) in fp32 at a run's last tokens, in one or more calls."""
    outputs = [entry.output[0].float() for entry in activations]
    calls = [torch.stack(outputs[at : at + blocks]) for at in range(0, len(outputs), blocks)]
    return torch.cat(calls, 1)[:, -width:]


def _noise(
    model: AttachedModel, cache: Any, sequences: Sequences, stepwise: bool
) -> dict[str, Outcome]:
    """The unmodified model on the same tokens in other calls, see :data:`NOISE`."""
    width, found = sequences.ids.shape[1] - sequences.head, {}
    with observe(model.blocks) as activations:
        logits = model.model(input_ids=sequences.ids, use_cache=False, logits_to_keep=width).logits
    found["no cache"] = logits, activations
    if not stepwise:
        return found
    with observe(model.blocks) as activations:
        steps = [slice(column, column + 1) for column in range(width)]
        copied = copy.deepcopy(cache)
        logits = torch.cat(
            [forward_passes.run_tail(model.model, sequences, copied, at) for at in steps], 1
        )
    found[STEPWISE] = logits, activations
    return found


def conditions(made: Computation) -> Arrays:
    """What the patch says of itself: the changes' sizes (L, T) by module; how unequal the new
    scales are, see :func:`scales`; elements that exact missed, (L, T).
    """
    patch = made.patch
    assert patch.report is not None
    found = {f"norm/{name}": x[:, 0].float().numpy() for name, x in patch.norms().items()}
    found |= scales(patch)
    found["misses"] = patch.report.misses[:, 0].int().numpy()
    return found


def uncontrollable(run: str, violations: Violations, width: int) -> Arrays:
    """Where a block is not controllable, (L, T), in each way."""
    none, found = torch.zeros(1, width, dtype=torch.bool), {}
    for side in ("input", "output"):
        rows = [
            torch.stack([none, *(x.always for x in block if x.side == side)]).any(0)[0]
            for block in violations
        ]
        found[f"{run}/not {side}-controllable"] = torch.stack(rows).numpy()
    return found


def scales(patch: ContextPatch) -> Arrays:
    """Of blocks that end in a scale m: ``max_k |m'_k| / RMS(m)``, the channel k, and how many
    channels hold 90 % of ``‖m' - m‖²``, each (L, T). Nothing of other models.
    """
    rows = []
    for layer in patch.layers:
        for name in (name for name in layer if name.endswith(".new_scale")):
            new = layer[name][0].double()
            own = layer[name.replace(".new_scale", ".scale")].double()
            largest, channel = new.abs().max(-1)
            parts = (new - own).square().sort(-1, descending=True).values
            held = parts.cumsum(-1) / parts.sum(-1, keepdim=True)
            channels = (held < 0.9).sum(-1) + 1
            rows.append(torch.stack([largest / own.square().mean().sqrt(), channel, channels]))
    names = ("scale/largest", "scale/channel", "scale/channels")
    return dict(zip(names, torch.stack(rows, 1).float().numpy(), strict=True)) if rows else {}
