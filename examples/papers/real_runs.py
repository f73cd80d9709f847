"""The stages of the measurement on a pretrained model. Each result is a file as soon as it is
measured, so that a stopped run goes on.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from goldwaser_experiments import INSTRUCTIONS
from real_changes import attention_on_first, growth, sensitivity, spans
from real_fidelity import NOISE, Arrays, attached, measure
from real_prompts import KINDS, Prompt, read
from real_protocol import protocol
from real_subject import Store, Subject

from icl_patch import ContextPatcher


def _ids(ids: Any) -> torch.Tensor:
    return torch.tensor([list(ids)], dtype=torch.int64)


@dataclass(frozen=True)
class Runs:
    """All stages, in order."""

    subject: Subject
    store: Store

    def run(self) -> None:
        """Measure all that is missing."""
        self.answers()
        self.spans()
        self.growth()
        self.sensitivity()
        self.attention()
        for dtype in self.subject.sizes.dtypes:
            self.fidelity(dtype)
            self.protocol(dtype)

    def _progress(self, stage: str, names: list[str]) -> Iterator[str]:
        """The missing results, with a line on each."""
        started, missing = time.process_time(), self.store.missing(names)
        for done, name in enumerate(missing):
            yield name
            spent = time.process_time() - started
            if sys.stderr.isatty() or done + 1 == len(missing):
                line = f"\r{stage}: {done + 1} of {len(missing)}, {spent:.0f} s"
                print(line, end="", file=sys.stderr, flush=True)
        if missing:
            print(file=sys.stderr)

    @torch.no_grad()
    def answers(self) -> None:
        """The model's own greedy answers in fp32, without the token that ends them."""
        prompts = {f"answers/{prompt.name}": prompt for prompt in self.subject.prompts}
        names = list(prompts)
        model = self.subject.load("float32") if self.store.missing(names) else None
        for name in self._progress("answers", names):
            prompt = prompts[name]
            ids = _ids(prompt.context + prompt.question)
            config = {"max_new_tokens": prompt.answer, "do_sample": False}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **config)
            answer = out[0, ids.shape[1] :]
            ends = model.generation_config.eos_token_id
            ended = torch.isin(answer, torch.tensor(ends if ends is not None else []))
            self.store.save(name, {"answer": answer[~ended].numpy()})

    def kept(self, prompt: Prompt) -> torch.Tensor:
        """The kept tokens (1, T) of a prompt: the question and the model's answer."""
        if not prompt.answer:
            return _ids(prompt.question)
        answer = self.store.load(f"answers/{prompt.name}")["answer"]
        return _ids((*prompt.question, *answer.tolist()))

    def fidelity(self, dtype: str) -> None:
        """Every prompt and every excerpt."""
        cases = [*self.subject.prompts, *self.subject.excerpts(dtype)]
        named = {f"{dtype}/{prompt.name}": prompt for prompt in cases}
        if not self.store.missing(list(named)):
            return
        with attached(self.subject.load(dtype)) as models:
            stepwise = set(list(named)[:: self.subject.sizes.stepwise])
            for name in self._progress(f"fidelity, {dtype}", list(named)):
                context, kept = _ids(named[name].context), self.kept(named[name])
                noise = NOISE if name in stepwise else NOISE[:2]
                arrays = measure(models, context, kept, noise)
                self.store.save(name, arrays)

    def protocol(self, dtype: str) -> None:
        """The paper's own protocol."""
        sizes = self.subject.sizes
        texts = {f"protocol-{dtype}/{i}": x for i, x in enumerate(INSTRUCTIONS)}
        names = list(texts)[: sizes.instructions]
        model = self.subject.load(dtype) if self.store.missing(names) else None
        for name in self._progress(f"the paper's protocol, {dtype}", names):
            arrays = protocol(model, self.subject.tokenizer, texts[name], sizes.instruction_tokens)
            self.store.save(name, arrays)

    def groups(self) -> dict[str, list[Prompt]]:
        """The prompts by their context."""
        found: dict[str, list[Prompt]] = {}
        for kind in KINDS:
            of_kind = [prompt for prompt in self.subject.prompts if prompt.kind == kind]
            for group in dict.fromkeys(prompt.group for prompt in of_kind):
                found[f"{kind}-{group}".replace(" ", "-")] = [
                    prompt for prompt in of_kind if prompt.group == group
                ]
        return found

    def spans(self) -> None:
        """The space that the changes of a context's tokens span, in fp32."""
        groups = self.groups()
        names = [f"spans-{prefix}/{group}" for prefix in (0, 1) for group in groups]
        names.append("weights")
        if not self.store.missing(names):
            return
        with ContextPatcher(self.subject.load("float32")) as patcher:
            for name in self._progress("spans", names):
                model = patcher.attached_model
                if name == "weights":
                    self.store.save(name, _weight_norms(patcher.model))
                    continue
                prefix, group = name.removeprefix("spans-").split("/")
                tokens = [(_ids(prompt.context), self.kept(prompt)) for prompt in groups[group]]
                self.store.save(name, spans(model, tokens, int(prefix)))

    def growth(self) -> None:
        """Few-shot contexts that grow, in fp32."""
        sizes = self.subject.sizes
        tasks = {task["name"].replace(" ", "-"): task for task in read("few_shot")[: sizes.tasks]}
        names = [f"growth-{how}/{task}" for how in ("right", "shuffled") for task in tasks]
        if not self.store.missing(names):
            return
        with ContextPatcher(self.subject.load("float32"), "stable") as patcher:
            for name in self._progress("growing contexts", names):
                how, task = name.removeprefix("growth-").split("/")
                shuffled, tokenizer = how == "shuffled", self.subject.tokenizer
                arrays = growth(patcher, tokenizer, tasks[task], shuffled, sizes.shots)
                self.store.save(name, arrays)

    def sensitivity(self) -> None:
        """A disturbance in fp32."""
        chosen = self.subject.prompts[:: self.subject.sizes.disturbed]
        named = {f"sensitivity/{prompt.name}": prompt for prompt in chosen}
        if not self.store.missing(list(named)):
            return
        with ContextPatcher(self.subject.load("float32")) as patcher:
            for seed, name in enumerate(self._progress("sensitivity", list(named))):
                context, kept = _ids(named[name].context), self.kept(named[name])
                arrays = sensitivity(patcher.attached_model, context, kept, seed)
                self.store.save(name, arrays)

    def attention(self) -> None:
        """The attention on the first token, in fp32."""
        chosen = self.subject.prompts[:: self.subject.sizes.disturbed]
        named = {f"attention/{prompt.name}": prompt for prompt in chosen}
        if not self.store.missing(list(named)):
            return
        model = self.subject.load("float32")
        model.set_attn_implementation("eager")
        for name in self._progress("attention", list(named)):
            context, kept = _ids(named[name].context), self.kept(named[name])
            self.store.save(name, attention_on_first(model, context, kept))


def _weight_norms(model: Any) -> Arrays:
    """``‖W‖_F`` of every parameter."""
    return {name: x.detach().double().norm().numpy() for name, x in model.named_parameters()}
