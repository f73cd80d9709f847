"""The other methods that replace a context: vectors in the residual stream, and PEFT's adapters.

A ``Run`` gives the fp32 logits (n, V) of each target of a batch at the tokens that it asks for.
Each method returns one, with the bytes that it stores.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor

from icl_patch.models.language_model import layers_of
from icl_patch.static import Example
from icl_patch.static.examples import pad
from icl_patch.static.student import Student
from icl_patch.static.targets import Target

Run = Callable[[Sequence[Target]], list[Tensor]]

_ROWS = 8  # of a batch that is measured
_TEXT_ROWS = 4  # preserved texts a step
_PROMPT_RATE = 3e-2  # of prompt tuning


def batched(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Batches of similar lengths."""
    ordered = sorted(targets, key=lambda target: len(target.ids))
    for start in range(0, len(ordered), _ROWS):
        yield ordered[start : start + _ROWS]


@torch.no_grad()
def plain(student: Student, batch: Sequence[Target]) -> list[Tensor]:
    """The run of the model as it is now."""
    return _logits(student, batch, _final(student, batch))


def _final(student: Student, batch: Sequence[Target]) -> Tensor:
    return student.final(pad([target.ids for target in batch], student.model.device))


def _logits(student: Student, batch: Sequence[Target], final: Tensor) -> list[Tensor]:
    asked = [row[target.asked] for row, target in zip(final, batch, strict=True)]
    return list(student.logits(torch.cat(asked)).split([len(x) for x in asked]))


def divergences(student: Student, targets: Sequence[Target], got: Sequence[Tensor]) -> Tensor:
    """KL(with context ‖ got) of each token, in nats."""
    with torch.no_grad():
        p = student.logits(torch.cat([target.hidden for target in targets])).log_softmax(-1)
    return (p.exp() * (p - torch.cat(list(got)).log_softmax(-1))).sum(-1)


@torch.no_grad()
def mean_kl(student: Student, targets: Sequence[Target], run: Run) -> float:
    """The mean over the tokens of the answers."""
    found = [divergences(student, batch, run(batch)) for batch in batched(targets)]
    return float(torch.cat(found).mean())


# -- vectors in the residual stream


@torch.no_grad()
def last_states(student: Student, rows: Sequence[Sequence[int]], blocks: Sequence[int]) -> Tensor:
    """The mean (blocks, d) of the residual stream behind blocks, at the last tokens of rows."""
    found = []
    for row in rows:
        ids = pad([row], student.model.device)
        states = student.model.base_model(ids, output_hidden_states=True, use_cache=False)
        found.append(torch.stack([states.hidden_states[block + 1][0, -1] for block in blocks]))
    return torch.stack(found).float().mean(0)


@torch.no_grad()
def adding(student: Student, block: int, vector: Tensor, batch: Sequence[Target]) -> list[Tensor]:
    """The run in which a vector is added behind a block at the question's last token and at those
    of the answer.
    """

    def hook(_module: Any, _args: Any, out: Any) -> Any:
        hidden = (out[0] if isinstance(out, tuple) else out).clone()
        for row, target in zip(hidden, batch, strict=True):
            row[target.asked] += vector.to(row.dtype)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    layer = list(layers_of(student.model).values())[block]
    handle = layer.register_forward_hook(hook)
    try:
        final = _final(student, batch)
    finally:
        handle.remove()
    return _logits(student, batch, final)


def steering_vector(
    student: Student,
    examples: Sequence[Example],
    targets: Sequence[Target],
    blocks: Sequence[int],
    factors: Sequence[float],
) -> tuple[Run, int, dict[str, Any]]:
    """The mean difference, with the context less without it, at the questions' last tokens; behind
    the block and with the factor that have the smallest KL divergence on some questions.
    """
    with_context = last_states(student, [x.with_context for x in examples], blocks)
    vectors = with_context - last_states(student, [x.without for x in examples], blocks)
    tries = {
        f"block {block}, factor {factor}": partial(adding, student, block, factor * vector)
        for block, vector in zip(blocks, vectors, strict=True)
        for factor in factors
    }
    best = min(tries, key=lambda name: mean_kl(student, targets, tries[name]))
    return tries[best], vectors[0].nbytes, {"chosen": best}


# -- PEFT


def logits_of(adapted: Any, virtual_tokens: int, batch: Sequence[Target]) -> list[Tensor]:
    """The run of a model of PEFT, behind its virtual tokens."""
    ids = pad([target.ids for target in batch], adapted.device)
    logits = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    rows = logits[:, virtual_tokens:]
    return [row[target.asked].float() for row, target in zip(rows, batch, strict=True)]


def train(
    student: Student,
    run: Run,
    parameters: Sequence[Tensor],
    data: tuple[Sequence[Target], Sequence[Target]],
    *,
    rate: float,
    batch_size: int,
    seed: int,
    steps: float = float("inf"),
    seconds: float = float("inf"),
) -> int:
    """The usual loop: AdamW on the mean KL divergence of a batch of questions plus that of a batch
    of preserved texts; the rate falls to 0 over the steps, or the seconds of the CPU. Returns the
    number of steps.
    """
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    draws = [
        _shuffled(*of) for of in zip(data, (batch_size, _TEXT_ROWS), (seed, seed + 1), strict=True)
    ]
    began, step = time.process_time(), 0
    while (done := max(step / steps, (time.process_time() - began) / seconds)) < 1:
        batches = [next(draw) for draw in draws]
        with torch.enable_grad():
            loss = sum(divergences(student, batch, run(batch)).mean() for batch in batches)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.param_groups[0]["lr"] = rate * (1 - done)
        optimizer.step()
        step += 1
    return step


def _shuffled(targets: Sequence[Target], size: int, seed: int) -> Iterator[list[Target]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(targets), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield [targets[i] for i in order[start : start + size]]


def adapted(student: Student, config: Any, seed: int) -> tuple[Any, list[Tensor]]:
    """The model in PEFT's hands, with the parameters to train."""
    torch.manual_seed(seed)
    model = get_peft_model(student.model, config).eval()
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def prompt_tuning(
    student: Student,
    data: tuple[Sequence[Target], Sequence[Target]],
    *,
    tokens: int,
    seconds: float,
    batch_size: int,
    seed: int,
) -> tuple[Run, int, dict[str, Any]]:
    """Virtual tokens in front, which start as tokens of the vocabulary; trained for so many seconds
    of the CPU.
    """
    config = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=tokens, prompt_tuning_init="SAMPLE_VOCAB"
    )
    model, parameters = adapted(student, config, seed)
    run = partial(logits_of, model, tokens)
    options = {"rate": _PROMPT_RATE, "batch_size": batch_size, "seed": seed}
    steps = train(student, run, parameters, data, seconds=seconds, **options)
    return torch.no_grad()(run), sum(x.nbytes for x in parameters), {"steps": steps}


def lora(
    student: Student,
    data: tuple[Sequence[Target], Sequence[Target]],
    *,
    rank: int,
    **options: Any,
) -> tuple[Run, int, Any]:
    """A LoRA on the MLPs of all blocks, trained with the options of :func:`train`. The last value
    is PEFT's model.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    )
    model, parameters = adapted(student, config, options["seed"])
    train(student, partial(logits_of, model, 0), parameters, data, **options)
    return partial(plain, student), sum(x.nbytes for x in parameters), model
