"""The main job on the embedded model: answer with the context, without it, and with its patch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.evaluation import embedded
from icl_patch.evaluation.embedded import Prompt
from icl_patch.evaluation.embedded.scoring import (
    LONGEST_ANSWER,
    answers,
    decode_answers,
)
from icl_patch.evaluation.loading import encode_contexts
from icl_patch.evaluation.verify import VerifyReport, verify
from icl_patch.patch.serialization import UPDATES
from icl_patch.patcher import ContextPatcher

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Answers:
    """One held-out prompt and the three answers to it."""

    prompt: Prompt
    with_context: str
    without: str
    patched: str

    def texts(self) -> dict[str, str]:
        """The three answers by name."""
        return {"with_context": self.with_context, "without": self.without, "patched": self.patched}


@torch.no_grad()
def patched_answers(
    patcher: ContextPatcher, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> list[str]:
    """Greedy answers in which every token comes from a replay on the current token alone."""
    ids, mask = (x.to(patcher.model.device) for x in encode_contexts(tokenizer, texts))
    generated: list[Tensor] = []
    for step in patcher.generate(ids, context_mask=mask, max_new_tokens=LONGEST_ANSWER):
        replayed = patcher.forward(step.patch.kept_ids, step.patch)[:, -1]
        if not torch.equal(replayed.argmax(-1)[step.live], step.token_ids[step.live]):
            raise RuntimeError("the replay chose another token than the stream it was recorded in")
        generated.append(step.token_ids)
    return decode_answers(tokenizer, torch.stack(generated, 1))


def three_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts_per_kind: int
) -> list[Answers]:
    """The answers to ``prompts_per_kind`` held-out prompts of every kind; the patch is exact."""
    groups = [embedded.held_out_prompts(kind, prompts_per_kind) for kind in embedded.KINDS]
    texts = [[prompt.context + prompt.question for prompt in group] for group in groups]
    with_context = [answers(model, tokenizer, of_kind) for of_kind in texts]
    without = [answers(model, tokenizer, [prompt.question for prompt in each]) for each in groups]
    with ContextPatcher(model, "exact", tokenizer=tokenizer) as patcher:
        patched = [patched_answers(patcher, tokenizer, of_kind) for of_kind in texts]
    return [
        Answers(*row)
        for of_kind in zip(groups, with_context, without, patched, strict=True)
        for row in zip(*of_kind, strict=True)
    ]


def verify_grid(
    prompts: int, max_new_tokens: int, progress: Callable[[int, int], None] | None = None
) -> list[VerifyReport]:
    """Verify the embedded model for every update and dtype, on held-out prompts of all kinds."""
    per_kind = -(-prompts // len(embedded.KINDS))
    chosen = [
        prompt for kind in embedded.KINDS for prompt in embedded.held_out_prompts(kind, per_kind)
    ][:prompts]
    contexts = [prompt.context + prompt.question for prompt in chosen]
    grid = [(dtype, update) for dtype in DTYPES for update in UPDATES]
    reports = []
    for done, (dtype, update) in enumerate(grid, 1):
        reports.append(
            verify(context=contexts, max_new_tokens=max_new_tokens, update=update, dtype=dtype)
        )
        if progress is not None:
            progress(done, len(grid))
    return reports
