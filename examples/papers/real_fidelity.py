"""How faithful replays are on a pretrained model: every update and the model's own noise, token by
token and block by block, beside the unmodified model with its context; and the paper's protocol.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import goldwaser_experiments as goldwaser
import numpy as np
import torch
from goldwaser_experiments import LAZY, MERGED, VARIANTS
from torch import Tensor

from icl_patch import ContextPatcher, metrics
from icl_patch.evaluation.baseline import in_one_pass
from icl_patch.patch.serialization import UPDATES
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import BlockActivations
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.passes import Computation, observe
from icl_patch.recording.sequences import Sequences, assemble

KEPT = "stable, first token kept"
"""The stable update of all of the context but its first token, which stays."""
REPLAYS = (*reversed(UPDATES), KEPT)
NOISE = ("no cache", "token by token")
"""The unmodified model against itself: one pass over everything, and one token a call."""
RUNS = (*REPLAYS, *NOISE)

HELD = {"exact": (LAZY,), "stable": (LAZY, MERGED)}
CURVES = tuple(
    (update, how, keep) for keep in (0, 1) for update, held in HELD.items() for how in held
)
"""Of the paper's protocol: the update, how its patches are held, and how many of the context's
first tokens stay.
"""

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
def measure(models: dict[str, AttachedModel], context: Tensor, kept: Tensor) -> Arrays:
    """One sequence, context (1, C) and kept tokens (1, T): for every run the errors of each token,
    (T,), and of each block's output, (L, T); and the sizes of the changes.
    """
    sequences, exact = assemble(context, kept), models["exact"]
    first = assemble(context, kept, keep_first=1)
    cache = exact.prefill(sequences)
    computations = {
        run: models[run.split(",")[0]].compute_from(
            copy.deepcopy(cache), first if run == KEPT else sequences
        )
        for run in REPLAYS
    }
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
    outcomes |= _noise(exact, cache, sequences)
    for run, (logits, activations) in outcomes.items():
        own = _blocks(activations, len(exact.blocks), kept.shape[1])
        found |= {
            f"{run}/match": metrics.same_argmax(logits[0], reference[0]).numpy(),
            f"{run}/identical": metrics.bit_identical(logits[0], reference[0]).numpy(),
            f"{run}/linf": metrics.linf(logits[0], reference[0]).float().numpy(),
            f"{run}/blocks": ((own - blocks).norm(dim=-1) / blocks.norm(dim=-1)).numpy(),
        }
    for run, made in computations.items():
        found |= {f"{run}/{key}": value for key, value in conditions(made).items()}
    return found


def _blocks(activations: Sequence[BlockActivations], blocks: int, width: int) -> Tensor:
    """The blocks' outputs (L, width, d) in fp32 at a run's last tokens, in one or more calls."""
    outputs = [entry.output[0].float() for entry in activations]
    calls = [torch.stack(outputs[at : at + blocks]) for at in range(0, len(outputs), blocks)]
    return torch.cat(calls, 1)[:, -width:]


def _noise(model: AttachedModel, cache: Any, sequences: Sequences) -> dict[str, Outcome]:
    """The unmodified model on the same tokens in other calls, see :data:`NOISE`."""
    width, found = sequences.tail_ids.shape[1], {}
    with observe(model.blocks) as activations:
        logits = model.model(input_ids=sequences.ids, use_cache=False).logits[:, -width:]
    found["no cache"] = logits, activations
    with observe(model.blocks) as activations:
        steps = [slice(column, column + 1) for column in range(width)]
        copied = copy.deepcopy(cache)
        logits = torch.cat(
            [forward_passes.run_tail(model.model, sequences, copied, at) for at in steps], 1
        )
    found["token by token"] = logits, activations
    return found


def conditions(made: Computation) -> Arrays:
    """What the patch says of itself: the changes' sizes (L, T) by module; where a block is not
    controllable, (L, T); elements that exact missed, (L, T).
    """
    patch, none = made.patch, torch.zeros_like(made.patch.kept_mask)
    assert patch.report is not None
    found = {f"norm/{name}": x[:, 0].float().numpy() for name, x in patch.norms().items()}
    for side in ("input", "output"):
        rows = [
            torch.stack([none, *(x.always for x in block if x.side == side)]).any(0)[0]
            for block in made.violations
        ]
        found[f"not {side}-controllable"] = torch.stack(rows).numpy()
    found["misses"] = patch.report.misses[:, 0].int().numpy()
    return found


def protocol(model: Any, tokenizer: Any, text: str, count: int) -> Arrays:
    """The paper's own protocol, one token at a time, each with its own patch, in one greedy
    generation of ``count`` tokens: match and L∞ of every token for each of :data:`CURVES`,
    (curves, N, 2); and of the unpatched model in one pass, (N, 2).
    """
    chat = bool(tokenizer.chat_template)
    run, counted = goldwaser.untouched(model, tokenizer, [text], count, chat)
    found = {}
    for keep in (0, 1):
        for update, held in HELD.items():
            variants = {how: VARIANTS[how] for how in held}
            errors = goldwaser.measure(model, update, run, variants, keep)
            found |= {(update, how, keep): errors[how][counted].numpy() for how in held}
    at_once = goldwaser.errors_of(in_one_pass(model, run), run.logits)[counted]
    tokens = [tokenizer.decode([token]) for token in run.tokens[counted].tolist()]
    curves = np.stack([found[curve] for curve in CURVES])
    return {"tokens": np.array(tokens), "curves": curves, "one pass": at_once.numpy()}
