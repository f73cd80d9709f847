"""The measurements behind Figure 5 of Goldwaser et al., and of the influences on their bf16
numbers, as plain numbers.
"""

import copy
import math
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

from icl_patch import ContextPatch, ContextPatcher, embedded, metrics, verify
from icl_patch.evaluation.baseline import baseline, over_columns
from icl_patch.evaluation.loading import MARS_PROMPT, encode_inputs, load_model
from icl_patch.evaluation.verify import VerifiedToken
from icl_patch.patch.serialization import UPDATES
from icl_patch.recording.passes import prefix_cache, run_kept
from icl_patch.recording.sequences import absorb_all_but_last

# Contexts for models that follow instructions, that of the paper's Figure 3 first.
INSTRUCTIONS = (
    MARS_PROMPT,
    "Write a two-line poem about a lighthouse that is afraid of the dark.",
    "Explain to a child why the sky is blue, in two sentences.",
    "List three uses for a paperclip that is too long.",
    "Write the first sentence of a detective story set in a bakery.",
    "Give a recipe for pancakes in at most forty words.",
    "Translate into French: the train leaves at seven in the morning.",
    "What would a cat write in its diary on a rainy day?",
)
IMAGE_QUESTION = "Describe the image in one sentence."
Inputs = Mapping[str, Tensor]


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
QUICK = Sizes(
    ("bfloat16",),
    tokens=2,
    prompt_tokens=2,
    scenes=2,
    held=1,
    training=shapes.QUICK,
)


@dataclass(frozen=True)
class Subject:
    """The setting of a measurement: the models of this repository ("embedded"), or a folder or hub
    id; on which device, and the prompts' seed.
    """

    model: str = "embedded"
    device: str = "cpu"
    seed: int = 0

    @property
    def own(self) -> bool:
        """Whether the models are this repository's."""
        return self.model == "embedded"

    def load(self, dtype: str, where: str | None = None, tokenizer: Any = None) -> tuple[Any, Any]:
        """The model (or that of another folder) and its tokenizer."""
        return load_model(where or self.model, tokenizer, getattr(torch, dtype), self.device)

    def contexts(self, tokenizer: Any, count: int) -> tuple[list[str], bool]:
        """Prompts, and whether they go through the chat template."""
        if not self.own:
            return list(INSTRUCTIONS[:count]), bool(tokenizer.chat_template)
        # the order decides which prompts the committed numbers are of
        kinds = sorted(embedded.KINDS, key=lambda kind: kind != "language")
        prompts = [
            embedded.held_out_prompts(kind, -(-count // len(kinds)), self.seed) for kind in kinds
        ]
        return [
            prompt.context + prompt.question for row in zip(*prompts, strict=True) for prompt in row
        ][:count], False


def generation(model: Any, tokenizer: Any, inputs: Inputs, tokens: int) -> list[dict[str, Any]]:
    """A curve for every update of one generation, and those of the two closed forms merged into the
    weights.
    """
    end, run, curves = ends(model), untouched(model, tokenizer, inputs, tokens), []
    for update in UPDATES:
        report = verify(model, tokenizer, context=inputs, max_new_tokens=tokens, update=update)
        steps = until_end(report.steps, end)
        about = {
            "dtype": report.dtype,
            "update": update,
            "tokens": [tokenizer.decode([step.token_id]) for step in steps],
            "noise_floor": report.noise_floor,
        }
        curves.append({**about, "held": LAZY, **_columns(_errors(steps))})
        if update != "exact":
            errors = measure(model, update, run, {MERGED: VARIANTS[MERGED]})[MERGED]
            curves.append({**about, "held": MERGED, **_columns(errors)})
    return curves


def _errors(steps: list[VerifiedToken]) -> Tensor:
    """Match, L∞ and TVD of the steps of a report, (N, 3) fp64."""
    return torch.tensor([[step.match, step.linf, step.tvd] for step in steps], dtype=torch.float64)


def _columns(errors: Tensor) -> dict[str, Any]:
    """(N, 3) of match, L∞ and TVD as lists; None for values that are not finite."""
    match, *others = errors.unbind(1)
    linf, tvd = (
        [value if math.isfinite(value) else None for value in other.tolist()] for other in others
    )
    return {"match": match.bool().tolist(), "linf": linf, "tvd": tvd}


def figure_5(subject: Subject, sizes: Sizes) -> dict[str, Any]:
    """An image in the context: L∞ and TVD at every token of one generation, for every update and
    dtype; and, on the model trained here, answers on held-out scenes.
    """
    found: dict[str, Any] = {}
    where, question = subject.model, IMAGE_QUESTION
    if subject.own:
        folder = Path("build/papers") / f"shapes-{sizes.training.steps}-{subject.seed}"
        found["answers_right"] = shapes.score(
            *shapes.trained(folder, sizes.training, subject.seed), sizes.scenes, subject.seed
        )
        where, question = str(folder), shapes.EVERYTHING
    processor: Any = AutoProcessor.from_pretrained(where)
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"expected a model that takes images, got {subject.model}")
    [scene], rng = shapes.held_out_scenes(1, subject.seed), random.Random(subject.seed)
    image = scene.draw(rng)
    shown = image if subject.own else image.repeat(20, 0).repeat(20, 1)
    inputs = shapes.encode(processor, [shown], [question])
    found |= {
        "image": image.tolist(),
        "scene": scene.answer(shapes.EVERYTHING),
        "question": question,
        "curves": [],
    }
    for dtype in sizes.dtypes:
        model, tokenizer = subject.load(dtype, where, processor.tokenizer)
        found["curves"] += generation(model, tokenizer, inputs, sizes.tokens)
        if subject.own:
            found.setdefault("groups", []).extend(_answers(model, processor, dtype, sizes, subject))
    return found


def _answers(
    model: Any, processor: Any, dtype: str, sizes: Sizes, subject: Subject
) -> list[dict[str, Any]]:
    """Whole answers about held-out scenes, every token of them replayed without the image."""
    scenes, rng = shapes.held_out_scenes(sizes.scenes, subject.seed), random.Random(subject.seed)
    wanted = [scene.answer(shapes.EVERYTHING) for scene in scenes]
    inputs = shapes.encode(
        processor, [scene.draw(rng) for scene in scenes], [shapes.EVERYTHING] * len(scenes)
    )
    length = len(wanted[0].split())
    groups = []
    for update in UPDATES:
        report = verify(
            model, processor.tokenizer, context=inputs, max_new_tokens=length, update=update
        )
        rows = [report.steps[row * length :][:length] for row in range(len(scenes))]
        right = [
            all(step.match for step in row)
            and processor.tokenizer.decode([step.token_id for step in row]) == answer
            for row, answer in zip(rows, wanted, strict=True)
        ]
        shares = {**summary(_errors(report.steps)), "replay_right": sum(right) / len(right)}
        groups.append({"dtype": dtype, "update": update, **shares})
    return groups


# -- how a patch is held


def rounded(patch: ContextPatch, chosen: Callable[[str], bool] = lambda _: True) -> ContextPatch:
    """The patch with the factors of the chosen names rounded to the model's dtype."""
    assert patch.logits is not None
    dtype = patch.logits.dtype
    layers = tuple(
        {name: x.to(dtype).to(x.dtype) if chosen(name) else x for name, x in layer.items()}
        for layer in patch.layers
    )
    return replace(patch, layers=layers)


@torch.no_grad()
def merged_logits(plain: Any, patch: ContextPatch, round_change: bool = False) -> Tensor:
    """The logits (B, V) of one token a row under the materialised ``W + ΔW``, rounded to the
    weights' dtype; the weights are put back.

    ``round_change``: round ΔW first, and add it in that dtype.
    """
    parameters, logits = dict(plain.named_parameters()), []
    for row in range(len(patch.kept_ids)):
        part = patch.select(rows=slice(row, row + 1))
        before, cache = {}, prefix_cache(plain, part)
        for name, change in part.weight_changes(0, 0):
            weight = parameters[name].data
            before[name] = weight.clone()
            weight.copy_(
                weight + change.to(weight.dtype)
                if round_change
                else weight.to(change.dtype) + change
            )
        logits.append(run_kept(plain, part, cache)[:, -1])
        for name, weight in before.items():
            parameters[name].data.copy_(weight)
    return torch.cat(logits)


def _replayed(patcher: ContextPatcher, patch: ContextPatch) -> Tensor:
    return patcher.forward(patch.kept_ids, patch)[:, -1]


Variant = Callable[[ContextPatcher, Any, ContextPatch], Tensor]
LAZY, MERGED = "lazy, as recorded", "merged, W + ΔW rounded"
VARIANTS: dict[str, Variant] = {
    LAZY: lambda patcher, _, patch: _replayed(patcher, patch),
    "lazy, only m′ rounded": lambda patcher, _, patch: _replayed(
        patcher, rounded(patch, lambda name: name.endswith("new_scale"))
    ),
    "lazy, only u and v rounded": lambda patcher, _, patch: _replayed(
        patcher, rounded(patch, lambda name: name.endswith((".u", ".v")))
    ),
    "lazy, all factors rounded": lambda patcher, _, patch: _replayed(patcher, rounded(patch)),
    MERGED: lambda _, plain, patch: merged_logits(plain, patch),
    "merged, ΔW rounded before it is added": lambda _, plain, patch: merged_logits(
        plain, patch, True
    ),
}
"""How a patch is held: logits (B, V) from a patcher, an untouched copy of its model, and a patch of
one token a row.
"""
IN_FP32 = (LAZY, MERGED)  # there is nothing else to round


@dataclass(frozen=True, eq=False)
class Run:
    """Greedy generations of the untouched model: contexts and their mask (B, T), the model's
    further inputs, and the results.

    tokens (B, N); logits (B, N, V), context first and token by token; counted (B, N), up to the
    first end of sequence; at_once (M, 3), the errors of one pass over everything at the tokens that
    count.
    """

    ids: Tensor
    mask: Tensor
    further: Inputs
    tokens: Tensor
    logits: Tensor
    counted: Tensor
    at_once: Tensor


@torch.no_grad()
def untouched(model: Any, tokenizer: Any, context: Any, count: int, chat: bool = False) -> Run:
    """Generate ``count`` tokens."""
    ids, mask, further = encode_inputs(model, tokenizer, context, chat)
    run = baseline(model, ids, mask, count, inputs=further)
    logits, tokens = run.logits, run.tokens
    ended = (
        torch.isin(tokens, torch.tensor(sorted(ends(model)), device=tokens.device)).long().cumsum(1)
    )
    counted = F.pad(ended, (1, 0))[:, :-1] == 0
    whole, seen = (
        torch.cat([ids, tokens[:, :-1]], 1),
        torch.cat([mask, torch.ones_like(tokens[:, :-1], dtype=torch.bool)], 1),
    )
    positions = (seen.long().cumsum(1) - 1).clamp(min=0)
    every = model(
        input_ids=whole,
        attention_mask=seen.long(),
        position_ids=positions,
        **over_columns(further, whole.shape[1]),
    ).logits
    return Run(
        ids, mask, further, tokens, logits, counted, errors_of(every[:, -count:], logits)[counted]
    )


def measure(
    model: Any, update: str, run: Run, variants: Mapping[str, Variant], keep_first: int = 0
) -> dict[str, Tensor]:
    """Match, L∞ and TVD (M, 3) of the tokens of ``run`` that count, by how their patches are
    held.

    keep_first: columns of the context that stay, from the first on.
    """
    plain, errors = copy.deepcopy(model), {name: [] for name in variants}
    with ContextPatcher(model, update) as patcher:
        attached, sequences = patcher.attached_model, absorb_all_but_last(run.ids, run.mask)
        absorbed = sequences.head_absorbed.clone()
        absorbed[:, :keep_first] = False
        sequences = replace(sequences, head_absorbed=absorbed)
        cache = attached.prefill(sequences, **over_columns(run.further, run.ids.shape[1] - 1))
        for tokens, logits in zip(run.tokens.unbind(1), run.logits.unbind(1), strict=True):
            patch = attached.compute_from(cache, sequences).patch
            for name, variant in variants.items():
                errors[name].append(errors_of(variant(patcher, plain, patch), logits))
            sequences = replace(
                sequences,
                head_ids=sequences.ids,
                head_mask=sequences.mask,
                head_absorbed=torch.nn.functional.pad(sequences.head_absorbed, (0, 1), value=True),
                tail_ids=tokens.unsqueeze(1),
                tail_mask=torch.ones_like(sequences.tail_mask),
            )
    return {name: torch.stack(found, 1)[run.counted] for name, found in errors.items()}


def errors_of(logits: Tensor, reference: Tensor) -> Tensor:
    """Match, L∞ and TVD: (..., V) -> (..., 3) fp64."""
    measures = (metrics.same_argmax, metrics.linf, metrics.total_variation)
    return torch.stack([measure(logits, reference).double().cpu() for measure in measures], -1)


def how_held(subject: Subject, sizes: Sizes) -> dict[str, Any]:
    """The same patches held in several ways: as vectors or merged into the weights, rounded or
    not.
    """
    groups, same = [], []
    for dtype in sizes.dtypes:
        model, tokenizer = subject.load(dtype)
        contexts, chat = subject.contexts(tokenizer, sizes.held)
        run = untouched(model, tokenizer, contexts, sizes.prompt_tokens, chat)
        same.append({"dtype": dtype, **summary(run.at_once)})
        names = VARIANTS if dtype != "float32" else IN_FP32
        for update in UPDATES:
            errors = measure(model, update, run, {name: VARIANTS[name] for name in names})
            groups += [
                {"dtype": dtype, "update": update, "held": name, **summary(errors[name])}
                for name in names
            ]
    return {"generations": len(contexts), "groups": groups, "untouched": same}


# -- numbers about numbers


def ends(model: Any) -> set[int]:
    """The ids that end a sequence."""
    found = model.generation_config.eos_token_id
    return set(found if isinstance(found, list) else [found])


def until_end(steps: list[VerifiedToken], end: set[int]) -> list[VerifiedToken]:
    """The steps up to the first end of sequence: tokens that a model is forced to give after it
    would flatter the agreement.
    """
    last = next((place for place, step in enumerate(steps) if step.token_id in end), len(steps))
    return steps[: last + 1]


def summary(errors: Tensor) -> dict[str, Any]:
    """Of match, L∞ and TVD, (N, 3): the share of matches, and of L∞ the median and the largest
    finite value, and the shares that are exactly 0 and that are not finite.
    """
    match, linf, _ = errors.double().unbind(1)
    finite = linf[linf.isfinite()]
    return {
        "tokens": len(errors),
        "token_match": float(match.mean()),
        "linf": {
            "median": float(finite.quantile(0.5)) if len(finite) else None,
            "max": float(finite.max()) if len(finite) else None,
            "zero": float((linf == 0).double().mean()),
            "not_finite": 1 - len(finite) / len(linf),
        },
    }


EXPERIMENTS: dict[str, Callable[[Subject, Sizes], dict[str, Any]]] = {
    "5": figure_5,
    "held": how_held,
}
