"""What the papers' discussions leave open, on a pretrained model: a page with its numbers.

    python examples/papers/discussion.py FOLDER --out docs/papers    # this repository's page
    python examples/papers/discussion.py --redraw --out docs/papers  # from its numbers
    python examples/papers/discussion.py FOLDER --quick              # few prompts

The folder holds a causal language model and its tokenizer. Steering vectors, and what is measured
with them, are left out where blocks do not end in a matrix or a bias. The page is on all models in
``--out``, each measured by a call of its own. fp32 on the CPU; minutes.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from pages import Page, parse
from real_prompts import Prompt, ids_of, programs_and_chats, prompts
from torch import Tensor
from transformers import DynamicCache

from icl_patch import ContextPatch, ContextPatcher, metrics
from icl_patch.analysis.attribution import attribution
from icl_patch.analysis.composition import additivity
from icl_patch.analysis.steering import (
    in_rome_form,
    input_covariances,
    steered,
    steering_vectors,
)
from icl_patch.analysis.transfer import on_other_weights
from icl_patch.evaluation.loading import load_model
from icl_patch.models.block_detection import blocks_of
from icl_patch.models.block_spec import Writer
from icl_patch.models.forward import cache_name

STEPS = (0, 1, 4, 16, 64)
"""Steps of fine-tuning after which the patches are tried."""
RATE, CHUNK, SPAN = 1e-5, 256, 4
COVARIANCE_TOKENS = 4096


def _ids(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Discussion:
    """The four measurements on one model.

    chosen: the prompts, one a context. steps: of fine-tuning. steers: whether its patches have
    steering vectors. update: of the patches.
    """

    def __init__(self, folder: Path, quick: bool) -> None:
        self.model, self.tokenizer = load_model(folder, None, torch.float32)
        groups = 1 if quick else 6
        sizes = {"passage": (groups, 1, 0), "few-shot": (groups, 1, 0)}
        self.chosen = prompts(self.tokenizer, sizes)
        self.steers = all(
            block.spec.writer in (Writer.WEIGHT, Writer.BIAS) for block in blocks_of(self.model)
        )
        # Where blocks end in a scale, a direct patch divides by small outputs. It then fails if a
        # replay rounds in another way, and most of its change is in few channels.
        self.update = "direct" if self.steers else "stable"
        # attention rests on the first token: without it all sums would be of that effect alone
        bos = self.tokenizer.bos_token_id
        self.first = [self.chosen[0].context[0] if bos is None else bos]
        self.steps = STEPS[:2] if quick else STEPS
        self.text_tokens = COVARIANCE_TOKENS // 16 if quick else COVARIANCE_TOKENS

    def text(self) -> Tensor:
        """Text beside all prompts: chats and programs, (1, T)."""
        text = "\n\n".join(programs_and_chats())
        return _ids(ids_of(self.tokenizer, text, first=True)[: self.text_tokens])

    @torch.no_grad()
    def logits(self, model: Any, prompt: Prompt, *contexts: Sequence[int]) -> Tensor:
        """Of the question behind the first token and the contexts: (T, V)."""
        ids = _ids([token for part in (self.first, *contexts, prompt.question) for token in part])
        return model(ids, use_cache=False).logits[0, -len(prompt.question) :]

    @torch.no_grad()
    def alone(self, model: Any, patch: ContextPatch, vectors: Tensor | None = None) -> Tensor:
        """Of a patch's question at its positions behind the first token alone, steered or not:
        (T, V).
        """
        given = {cache_name(model): DynamicCache(config=model.config)}
        model(patch.prefix_ids, **given)
        with steered(model, patch.blocks, vectors) if vectors is not None else nullcontext():
            out = model(patch.kept_ids, **given, position_ids=patch.position_ids)
        return out.logits[0]

    def patch(self, prompt: Prompt, *contexts: Sequence[int]) -> ContextPatch:
        """The patch of a question for the contexts in front of it; the first token stays."""
        context = _ids([token for part in (self.first, *contexts) for token in part])
        with ContextPatcher(self.model, self.update) as patcher:
            return patcher.compute(context, _ids(prompt.question), keep_first=1)

    # steering vectors and rank-1 edits

    def steering(self) -> dict[str, Any]:
        """A patch, its steering vectors and its form as ROME's edit: their effect on the token that
        they are for, and on other text.
        """
        text = self.text()
        half = text.shape[1] // 2
        seen, unseen = text[:, :half], text[:, half : half + CHUNK]
        with torch.no_grad():
            plain = self.model(unseen, use_cache=False).logits[0]
        errors: dict[str, list[float]] = {"patch": [], "steering": [], "rome": []}
        side: dict[str, list[float]] = {"patch": [], "rome": []}
        covariances = None
        for prompt in self.chosen:
            expected = self.logits(self.model, prompt, prompt.context)
            patch = self.patch(prompt, prompt.context)
            if covariances is None:
                covariances = input_covariances(self.model, patch.blocks, seen)
            got = {"steering": self.alone(self.model, patch, steering_vectors(patch))}
            with ContextPatcher(self.model, self.update) as patcher:
                for name, form in (("patch", patch), ("rome", in_rome_form(patch, covariances))):
                    got[name] = patcher.forward(form.kept_ids, form)[0]
                    with patcher.applied(form) as changed, torch.no_grad():
                        edited = changed(unseen, use_cache=False).logits[0]
                    side[name].append(float(metrics.total_variation(edited, plain).mean()))
            for name, found in got.items():
                errors[name].append(float(metrics.linf(found, expected).max()))
        return {
            "covariance_tokens": half,
            "other_tokens": unseen.shape[1],
            "error": {name: max(x) for name, x in errors.items()},
            "side_effect": {name: _mean(x) for name, x in side.items()},
            "less_in": sum(b < a for a, b in zip(side["patch"], side["rome"], strict=True)),
        }

    # fine-tuning

    def _tuned(self) -> Iterator[tuple[int, Any]]:
        """The model after each number of steps of AdamW on the text, a chunk a step."""
        model, chunks = copy.deepcopy(self.model), self.text().split(CHUNK, dim=1)
        optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        for step in range(self.steps[-1] + 1):
            if step in self.steps:
                yield step, model
            chunk = chunks[step % len(chunks)]
            model(chunk, labels=chunk).loss.backward()
            optimiser.step()
            optimiser.zero_grad()

    def transfer(self) -> list[dict[str, Any]]:
        """Patches and steering vectors of the model on the fine-tuned ones."""
        patches = [self.patch(prompt, prompt.context) for prompt in self.chosen]
        rows = []
        before = [x.detach().clone() for x in self.model.parameters()]
        for step, model in self._tuned():
            distance: dict[str, list[float]] = {}
            changed = [x.detach() - y for x, y in zip(model.parameters(), before, strict=True)]
            size = torch.stack([x.norm() for x in changed]).norm()
            whole = torch.stack([x.norm() for x in before]).norm()
            with ContextPatcher(model, self.update) as patcher:
                replays = [
                    patcher.forward(patch.kept_ids, on_other_weights(patch, patcher))[0]
                    for patch in patches
                ]
            for prompt, patch, replayed in zip(self.chosen, patches, replays, strict=True):
                got = {"patch": replayed, "none": self.alone(model, patch)}
                if self.steers:
                    got["steering"] = self.alone(model, patch, steering_vectors(patch))
                expected = self.logits(model, prompt, prompt.context)
                for name, found in got.items():
                    value = float(metrics.total_variation(found, expected).mean())
                    distance.setdefault(name, []).append(value)
            means = {name: _mean(x) for name, x in distance.items()}
            rows.append({"steps": step, "weights": float(size / whole), **means})
        return rows

    def direct_on_a_copy(self) -> dict[str, float]:
        """The TVD of direct patches on this model and on a copy of it, whose weights lie elsewhere
        in memory, so that torch's products of one row may round in another way.
        """
        found: dict[str, list[float]] = {"here": [], "elsewhere": []}
        copied = copy.deepcopy(self.model)
        for prompt in self.chosen:
            expected = self.logits(self.model, prompt, prompt.context)
            context = _ids([*self.first, *prompt.context])
            with ContextPatcher(self.model, "direct") as patcher:
                patch = patcher.compute(context, _ids(prompt.question), keep_first=1)
                replays = {"here": patcher.forward(patch.kept_ids, patch)[0]}
            with ContextPatcher(copied, "direct") as patcher:
                moved = on_other_weights(patch, patcher)  # as it is, a replay is refused
                replays["elsewhere"] = patcher.forward(patch.kept_ids, moved)[0]
            for name, replayed in replays.items():
                found[name].append(float(metrics.total_variation(replayed, expected).mean()))
        return {name: _mean(values) for name, values in found.items()}

    # attribution

    def attribution(self) -> dict[str, Any]:
        """Whether the tokens without which the patch changes are those that the answer needs: rank
        correlations over the spans of a context.
        """
        found: dict[str, list[float]] = {}
        spans_in_all = 0
        for prompt in self.chosen:
            context = [*self.first, *prompt.context]
            ends = range(1, len(context), SPAN)  # the first token stays
            spans = [(at, min(at + SPAN, len(context))) for at in ends]
            with ContextPatcher(self.model, self.update) as patcher:
                changes = attribution(patcher, _ids(context), _ids(prompt.question), spans).mean(1)
            expected = self.logits(self.model, prompt, prompt.context)
            effects = []
            for first, stop in spans:
                rest = [*context[1:first], *context[stop:]]
                got = self.logits(self.model, prompt, rest)
                effects.append(float(metrics.total_variation(got, expected).mean()))
            ranks = torch.stack([changes, torch.tensor(effects)]).argsort(1).argsort(1).double()
            found.setdefault(prompt.kind, []).append(float(torch.corrcoef(ranks)[0, 1]))
            spans_in_all += len(spans)
        return {
            "spans": spans_in_all,
            "span": SPAN,
            "correlation": {
                kind: {"least": min(x), "mean": _mean(x), "most": max(x)}
                for kind, x in found.items()
            },
        }

    # two contexts

    def composition(self) -> dict[str, Any]:
        """Two contexts one after the other, beside the sum of what each does alone."""
        rest: dict[str, dict[str, list[float]]] = {"sum": {}, "its own": {}}
        distance: dict[str, list[float]] = {}
        others = [*self.chosen[1:], self.chosen[0]]
        for prompt, other in zip(self.chosen, others, strict=True):
            first, second = other.context, prompt.context
            whole = self.patch(prompt, first, second)
            parts = [self.patch(prompt, first), self.patch(prompt, second)]
            for key, chosen in (("sum", parts), ("its own", parts[1:])):
                for name, value in additivity(whole, chosen).items():
                    kind, changed = ".".join(name.split(".")[-2:]), value[value.isfinite()]
                    if len(changed):  # elsewhere the whole context changes nothing
                        rest[key].setdefault(kind, []).append(float(changed.mean()))
            expected = self.logits(self.model, prompt, first, second)
            found = {
                "none": self.alone(self.model, whole),
                "its own": self.logits(self.model, prompt, second),
                "the other": self.logits(self.model, prompt, first),
                "swapped": self.logits(self.model, prompt, second, first),
            }
            if self.steers:
                vectors = steering_vectors(parts[0]) + steering_vectors(parts[1])
                found["sum"] = self.alone(self.model, whole, vectors)
            for name, got in found.items():
                value = float(metrics.total_variation(got, expected).mean())
                distance.setdefault(name, []).append(value)
        return {
            "pairs": len(self.chosen),
            "rest": {
                key: {name: _mean(values) for name, values in missed.items()}
                for key, missed in rest.items()
            },
            "distance": {name: _mean(values) for name, values in distance.items()},
        }


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    """All numbers of the page."""
    found = Discussion(folder, quick)
    return {
        "model": folder.resolve().name,
        "prompts": len(found.chosen),
        "kept_tokens": sum(len(prompt.question) for prompt in found.chosen),
        "rate": RATE,
        "chunk": CHUNK,
        **(
            {"steering": found.steering()}
            if found.steers
            else {"direct_on_a_copy": found.direct_on_a_copy()}
        ),
        "transfer": found.transfer(),
        "attribution": found.attribution(),
        "composition": found.composition(),
    }


def page(out: Path, *further: str) -> Page:
    """The page on the models whose numbers are in a folder, and on further ones."""
    found = {path.stem for path in out.glob("discussion-*.json")} | {*further}
    return Page("discussion", sorted(found), {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, unless asked to redraw, and write numbers and page."""
    options = parse("The papers' discussion items on a model.", arguments, of_model=True)
    name = () if options.redraw else (f"discussion-{options.folder.resolve().name}",)
    page(options.out, *name).run(
        options, lambda _: measure(options.folder, options.quick), only=name
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
