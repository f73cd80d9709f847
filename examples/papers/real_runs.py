"""The stages of the measurement on a pretrained model. Each result is a file as soon as it is
measured, so that a stopped run goes on.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from goldwaser_experiments import INSTRUCTIONS
from real_changes import attention_on_first, growth, sensitivity, spans
from real_fidelity import NOISE, Arrays, attached, measure
from real_prompts import KINDS, Prompt, read
from real_protocol import protocol
from real_subject import Store, Subject
from rich.console import Console
from rich.progress import track

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

    def _stage(
        self,
        title: str,
        cases: Mapping[str, Any],
        load: Callable[[], AbstractContextManager[Any]],
        result: Callable[[Any, Any], Arrays],
    ) -> None:
        """Save the result of each case that has none: of the loaded model and the case."""
        if missing := self.store.missing(list(cases)):
            with load() as loaded:
                for name in track(missing, title, console=Console(stderr=True)):
                    self.store.save(name, result(loaded, cases[name]))

    def _model(self, dtype: str = "float32") -> AbstractContextManager[Any]:
        return nullcontext(self.subject.load(dtype))

    def _patcher(self) -> ContextPatcher:
        return ContextPatcher(self.subject.load("float32"))

    def answers(self) -> None:
        """The model's own greedy answers in fp32, without the token that ends them."""

        @torch.no_grad()
        def answer(model: Any, prompt: Prompt) -> Arrays:
            ids = _ids(prompt.context + prompt.question)
            config = {"max_new_tokens": prompt.answer, "do_sample": False}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **config)
            answer = out[0, ids.shape[1] :]
            ends = model.generation_config.eos_token_id
            ended = torch.isin(answer, torch.tensor(ends if ends is not None else []))
            return {"answer": answer[~ended].numpy()}

        named = {f"answers/{prompt.name}": prompt for prompt in self.subject.prompts}
        self._stage("answers", named, self._model, answer)

    def tokens(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """The context (1, C) of a prompt, and its kept tokens (1, T): the question and the model's
        answer.
        """
        kept = list(prompt.question)
        if prompt.answer:
            kept += self.store.load(f"answers/{prompt.name}")["answer"].tolist()
        return _ids(prompt.context), _ids(kept)

    def fidelity(self, dtype: str) -> None:
        """Every prompt and every excerpt."""
        prompts, often = [*self.subject.prompts, *self.subject.excerpts(dtype)], NOISE[:2]
        cases = {
            f"{dtype}/{prompt.name}": (prompt, often if i % self.subject.sizes.stepwise else NOISE)
            for i, prompt in enumerate(prompts)
        }
        self._stage(
            f"fidelity, {dtype}",
            cases,
            lambda: attached(self.subject.load(dtype)),
            lambda models, case: measure(models, *self.tokens(case[0]), case[1]),
        )

    def protocol(self, dtype: str) -> None:
        """The paper's own protocol."""
        sizes, tokenizer = self.subject.sizes, self.subject.tokenizer
        texts = enumerate(INSTRUCTIONS[: sizes.instructions])
        self._stage(
            f"the paper's protocol, {dtype}",
            {f"protocol-{dtype}/{i}": text for i, text in texts},
            lambda: self._model(dtype),
            lambda model, text: protocol(model, tokenizer, text, sizes.instruction_tokens),
        )

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
        """The space that the changes of a context's tokens span, in fp32; the weights' norms."""
        groups = self.groups().items()
        cases = {f"spans-{k}/{name}": (group, k) for k in (0, 1) for name, group in groups}

        def spanned(patcher: ContextPatcher, case: tuple[list[Prompt], int]) -> Arrays:
            return spans(patcher.attached_model, [self.tokens(x) for x in case[0]], case[1])

        self._stage("spans", cases, self._patcher, spanned)
        self._stage("weights", {"weights": None}, self._model, lambda model, _: _norms(model))

    def growth(self) -> None:
        """Few-shot contexts that grow, in fp32."""
        sizes, tokenizer = self.subject.sizes, self.subject.tokenizer
        self._stage(
            "growing contexts",
            {
                f"growth-{how}/{task['name'].replace(' ', '-')}": (task, how == "shuffled")
                for how in ("right", "shuffled")
                for task in read("few_shot")[: sizes.tasks]
            },
            lambda: ContextPatcher(self.subject.load("float32"), "stable"),
            lambda patcher, case: growth(patcher, tokenizer, *case, sizes.shots),
        )

    def sensitivity(self) -> None:
        """A disturbance in fp32."""
        chosen = enumerate(self.subject.prompts[:: self.subject.sizes.disturbed])
        self._stage(
            "sensitivity",
            {f"sensitivity/{prompt.name}": (prompt, seed) for seed, prompt in chosen},
            self._patcher,
            lambda patcher, case: sensitivity(
                patcher.attached_model, *self.tokens(case[0]), case[1]
            ),
        )

    def attention(self) -> None:
        """The attention on the first token, in fp32."""
        chosen = self.subject.prompts[:: self.subject.sizes.disturbed]

        def on_first(model: Any, prompt: Prompt) -> Arrays:
            model.set_attn_implementation("eager")
            return attention_on_first(model, *self.tokens(prompt))

        named = {f"attention/{prompt.name}": prompt for prompt in chosen}
        self._stage("attention", named, self._model, on_first)


def _norms(model: Any) -> Arrays:
    """``‖W‖_F`` of every parameter."""
    return {name: x.detach().double().norm().numpy() for name, x in model.named_parameters()}
