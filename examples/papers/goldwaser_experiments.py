"""The measurements behind Figure 5 of Goldwaser et al., and of the influences on their bf16
numbers, as plain numbers.
"""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import goldwaser_shapes as shapes
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoProcessor

from icl_patch import ContextPatch, ContextPatcher, embedded, metrics
from icl_patch.evaluation.baseline import BaselineRun, baseline, in_one_pass
from icl_patch.evaluation.loading import encode_inputs, load_model
from icl_patch.models.forward import over_columns
from icl_patch.patch.serialization import UPDATES
from icl_patch.recording.passes import prefix_cache, run_kept
from icl_patch.recording.sequences import absorb_all_but_last


@dataclass(frozen=True)
class Sizes:
    """How large the experiments are.

    dtypes: of everything; tokens, scenes: of Figure 5's generation, at most, and its held-out
    scenes; held, prompt_tokens: generations for how a patch is held, all together, and their
    length; training: of the vision model.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    tokens: int = 36
    prompt_tokens: int = 24
    scenes: int = 40
    held: int = 8
    training: shapes.Training = field(default_factory=lambda: shapes.FULL)


FULL = Sizes()
QUICK = Sizes(("bfloat16",), 2, 2, 2, 1, shapes.QUICK)


# -- one generation of the untouched model, and its tokens by patches that are held in several ways


@torch.no_grad()
def untouched(
    model: Any, tokenizer: Any, context: Any, count: int, chat: bool = False
) -> tuple[BaselineRun, Tensor]:
    """The greedy run of ``count`` tokens, and which of them (B, count) count: those up to the first
    end of sequence, as the later ones would flatter the agreement.
    """
    ids, mask, further = encode_inputs(model, tokenizer, context, chat)
    run = baseline(model, ids, mask, count, inputs=further)
    ends = torch.tensor(model.generation_config.eos_token_id).flatten()
    ended = torch.isin(run.tokens, ends).long().cumsum(1)
    return run, F.pad(ended, (1, 0))[:, :-1] == 0


def measure(
    model: Any,
    update: str,
    run: BaselineRun,
    variants: Mapping[str, "Variant"],
    keep_first: int = 0,
) -> dict[str, Tensor]:
    """Match, L∞ and TVD (B, N, 3) of the tokens of ``run``, by how their patches are held.

    keep_first: how many of the context's first tokens stay.
    """
    plain, errors = copy.deepcopy(model), {name: [] for name in variants}
    with ContextPatcher(model, update) as patcher:
        attached = patcher.attached_model
        sequences = absorb_all_but_last(run.ids, run.mask, keep_first)
        cache = attached.prefill(sequences, **over_columns(run.inputs, run.ids.shape[1] - 1))
        for tokens, logits in zip(run.tokens.unbind(1), run.logits.unbind(1), strict=True):
            patch = attached.compute_from(cache, sequences).patch
            for name, variant in variants.items():
                errors[name].append(errors_of(variant(patcher, plain, patch), logits))
            head = sequences.ids.shape[1]
            absorbed = sequences.absorbed.index_fill(1, torch.tensor(head - 1), True)
            sequences = replace(
                sequences,
                ids=torch.cat([sequences.ids, tokens.unsqueeze(1)], 1),
                mask=F.pad(sequences.mask, (0, 1), value=True),
                absorbed=F.pad(absorbed, (0, 1)),
                head=head,
            )
    return {name: torch.stack(found, 1) for name, found in errors.items()}


def errors_of(logits: Tensor, reference: Tensor) -> Tensor:
    """Match, L∞ and TVD: (..., V) -> (..., 3) fp64."""
    measures = (metrics.same_argmax, metrics.linf, metrics.total_variation)
    return torch.stack([measure(logits, reference).double() for measure in measures], -1)


def rounded(patch: ContextPatch, endings: tuple[str, ...]) -> ContextPatch:
    """The patch with the factors with such names rounded to the model's dtype."""
    assert patch.logits is not None
    dtype = patch.logits.dtype
    layers = tuple(
        {name: x.to(dtype).to(x.dtype) if name.endswith(endings) else x for name, x in own.items()}
        for own in patch.layers
    )
    return replace(patch, layers=layers)


@torch.no_grad()
def merged_logits(plain: Any, patch: ContextPatch, dtype: torch.dtype | None = None) -> Tensor:
    """The logits (B, V) of one token a row under the materialised ``W + ΔW``, rounded to the
    weights' dtype, or ``ΔW`` alone to ``dtype`` first; the weights are put back.
    """
    parameters, logits = dict(plain.named_parameters()), []
    for row in range(len(patch.kept_ids)):
        part = patch.select(rows=slice(row, row + 1))
        before, cache = {}, prefix_cache(plain, part)
        for name, change in part.weight_changes(0, 0):
            weight = parameters[name].data
            before[name] = weight.clone()
            weight.copy_(weight + change.to(dtype))
        logits.append(run_kept(plain, part, cache)[:, -1])
        for name, weight in before.items():
            parameters[name].data.copy_(weight)
    return torch.cat(logits)


Variant = Callable[[ContextPatcher, Any, ContextPatch], Tensor]


def _lazy(*endings: str) -> Variant:
    """A replay, with these factors rounded."""

    def logits(patcher: ContextPatcher, _plain: Any, patch: ContextPatch) -> Tensor:
        held = rounded(patch, endings) if endings else patch
        return patcher.forward(patch.kept_ids, held)[:, -1]

    return logits


LAZY, MERGED = "lazy, as recorded", "merged, W + ΔW rounded"
LAZY_SCALE, LAZY_FACTORS = "lazy, only m′ rounded", "lazy, only u and v rounded"
VARIANTS: dict[str, Variant] = {
    LAZY: _lazy(),
    LAZY_SCALE: _lazy("new_scale"),
    LAZY_FACTORS: _lazy(".u", ".v"),
    "lazy, all factors rounded": _lazy(""),
    MERGED: lambda _, plain, patch: merged_logits(plain, patch),
    "merged, ΔW rounded before it is added": lambda _, plain, patch: merged_logits(
        plain, patch, plain.dtype
    ),
}
"""How a patch is held: logits (B, V) from a patcher, an untouched copy of its model, and a patch of
one token a row.
"""


# -- the experiments


def figure_5(sizes: Sizes) -> dict[str, Any]:
    """An image in the context: L∞ at every token of one generation, for every update and dtype; and
    answers on held-out scenes, with the image and by patches without it.
    """
    folder = Path("build/papers") / f"shapes-{sizes.training.steps}"
    right = shapes.score(*shapes.trained(folder, sizes.training), sizes.scenes)
    processor: Any = AutoProcessor.from_pretrained(folder)
    scenes, rng = shapes.held_out_scenes(sizes.scenes), random.Random(0)
    images = [scene.draw(rng) for scene in scenes]
    wanted = [scene.answer(shapes.EVERYTHING) for scene in scenes]
    inputs = shapes.encode(processor, images, [shapes.EVERYTHING] * len(scenes))
    first = {name: x[:1] for name, x in inputs.items()}
    curves, groups = [], []
    for dtype in sizes.dtypes:
        model, tokenizer = load_model(folder, processor.tokenizer, getattr(torch, dtype))
        run, counted = untouched(model, tokenizer, first, sizes.tokens)
        noise = errors_of(in_one_pass(model, run), run.logits)[counted][:, 1]
        answers, _ = untouched(model, tokenizer, inputs, len(wanted[0].split()))
        given = tokenizer.batch_decode(answers.tokens)
        for update in UPDATES:
            held = (LAZY,) if update == "exact" else (LAZY, MERGED)
            for how, errors in measure(model, update, run, {x: VARIANTS[x] for x in held}).items():
                match, linf, _ = errors[counted].unbind(1)
                about = {"dtype": dtype, "update": update, "held": how}
                about["tokens"] = [tokenizer.decode([x]) for x in run.tokens[counted].tolist()]
                about["noise_floor"] = {"linf_max": float(noise.max())}
                curves.append(about | {"match": match.bool().tolist(), "linf": linf.tolist()})
            errors = measure(model, update, answers, {LAZY: VARIANTS[LAZY]})[LAZY]
            same = errors[..., 0].bool().all(1).tolist()
            share = sum(
                ok and text == answer for ok, text, answer in zip(same, given, wanted, strict=True)
            ) / len(wanted)
            about = {"dtype": dtype, "update": update, "replay_right": share}
            groups.append(about | summary(errors.flatten(0, 1)))
    shown = {"image": images[0].tolist(), "question": shapes.EVERYTHING}
    return {**shown, "answers_right": right, "curves": curves, "groups": groups}


def how_held(sizes: Sizes) -> dict[str, Any]:
    """The same patches in bf16 held in several ways: as vectors or merged into the weights, rounded
    or not.
    """
    model, tokenizer = load_model("embedded", None, torch.bfloat16)
    # the order decides which prompts the committed numbers are of
    kinds = sorted(embedded.KINDS, key=lambda kind: kind != "language")
    prompts = [embedded.held_out_prompts(kind, -(-sizes.held // len(kinds))) for kind in kinds]
    contexts = [x.context + x.question for row in zip(*prompts, strict=True) for x in row]
    run, counted = untouched(model, tokenizer, contexts[: sizes.held], sizes.prompt_tokens)
    groups = [
        {"dtype": "bfloat16", "update": update, "held": name, **summary(errors[counted])}
        for update in UPDATES
        for name, errors in measure(model, update, run, VARIANTS).items()
    ]
    at_once = summary(errors_of(in_one_pass(model, run), run.logits)[counted])
    same = [{"dtype": "bfloat16", **at_once}]
    return {"generations": sizes.held, "groups": groups, "untouched": same}


def summary(errors: Tensor) -> dict[str, Any]:
    """Of match, L∞ and TVD, (N, 3): the share of matches, and L∞'s median and share of zeros."""
    match, linf, _ = errors.unbind(1)
    zero = float((linf == 0).double().mean())
    found = {"median": float(linf.median()), "zero": zero}
    return {"tokens": len(errors), "token_match": float(match.mean()), "linf": found}


EXPERIMENTS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "goldwaser-5": figure_5,
    "goldwaser-held": how_held,
}
