"""Models whose rows do not depend on their batch."""

import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import realistic_weights
from support.copies import COPIES, check_plain, pickled
from support.random_models import VOCABULARY
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from icl_patch import ContextPatcher, UnsupportedModelError, batch_invariant
from icl_patch.evaluation.tiny_models import build
from icl_patch.models.forward import cache_name

WIDTH = 40
LENGTHS = [WIDTH, 4, WIDTH, 29, WIDTH, 2, 17] * 5  # of the prompts, 35 rows


def prompts(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, model.config.vocab_size, (len(LENGTHS), WIDTH), generator=generator)
    return ids, torch.arange(WIDTH) >= WIDTH - torch.tensor(LENGTHS).unsqueeze(1)


@torch.no_grad()
def in_calls(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The logits (B, T, V) of calls with ids and mask (B, T) each."""
    cache, mask, logits = DynamicCache(config=model.config), calls[0][1][:, :0], []
    for ids, part in calls:
        mask = torch.cat([mask, part], 1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"attention_mask": mask.long(), "position_ids": positions}
        logits.append(model(ids, **{cache_name(model): cache}, **given).logits)
    return logits


def log_probabilities(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Of the token after a prompt and of two more, (B, 3, V)."""
    last = ids[:, -1:]
    more = [((last + n) % model.config.vocab_size, torch.ones_like(last).bool()) for n in (0, 1)]
    logits = in_calls(model, [(ids, mask), *more])
    return torch.stack([x[:, -1].log_softmax(-1) for x in logits], 1)


def rows_alone(model: PreTrainedModel, ids: Tensor, rows: list[int]) -> Tensor:
    parts = [ids[row : row + 1, WIDTH - LENGTHS[row] :] for row in rows]
    return torch.cat([log_probabilities(model, x, torch.ones_like(x).bool()) for x in parts])


PADDED = {
    "left": lambda n: range(WIDTH - n, WIDTH),
    "right": range,
    "both sides": lambda n: range((WIDTH - n) // 2, (WIDTH - n) // 2 + n),
    "between": lambda n: sorted(random.Random(n).sample(range(WIDTH), n)),
}
PARTS = [(WIDTH, 1, 3), (1, 1, 1), (38, 1, 2), (17, 1, 1), (2, 1, 3), (29, 1, 2)]
"""The tokens of a row's three calls: a prompt, a step and several more tokens."""


def check_padding(model: PreTrainedModel, calls: int, kinds: Iterable[str]) -> None:
    """Rows with padding of these kinds in their prompts, and behind the tokens of later calls, have
    the bits of the rows alone.
    """
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, VOCABULARY, (sum(x),), generator=generator) for x in PARTS]
    alone = []
    for row, parts in zip(rows, PARTS, strict=True):
        split = [x[None] for x in row.split(parts)[:calls]]
        alone.append(in_calls(model, [(x, torch.ones_like(x).bool()) for x in split]))

    def batch(call: int, places: Callable[[int], Iterable[int]]) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(rows), PARTS[0][call], dtype=torch.long)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for number, (row, parts) in enumerate(zip(rows, PARTS, strict=True)):
            mask[number, list(places(parts[call]))] = True
            ids[number, mask[number]] = row.split(parts)[call]
        return ids, mask

    for kind in kinds:
        batches = [batch(0, PADDED[kind]), *(batch(call, range) for call in range(1, calls))]
        for call, logits in enumerate(in_calls(model, batches)):
            for number, mask in enumerate(batches[call][1]):
                assert torch.equal(logits[number, mask], alone[number][call][0]), kind


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("llama", torch.float32), ("llama", torch.bfloat16), ("gemma3", torch.bfloat16)),
        *(("qwen3_moe", torch.float16), ("phi3", torch.float32)),
    ],
    ids=str,
)
def test_a_prompt_has_the_same_bits_alone_and_in_a_batch(family: str, dtype: torch.dtype) -> None:
    model, features = realistic_weights.build(family, 0, dtype)
    ids, mask = prompts(model)
    ids = features.mark({"context_ids": ids, "context_mask": mask})["context_ids"]
    rows = [0, 1, 5, 17, 34]
    with batch_invariant(model):
        alone = rows_alone(model, ids, rows)
        together = log_probabilities(model, ids, mask)
        assert torch.equal(together[rows], alone)
        for place in (0, 13, 31):  # one prompt among 32
            order = [row for row in range(32) if row != 1]
            order.insert(place, 1)
            assert torch.equal(log_probabilities(model, ids[order], mask[order])[place], alone[1])
        if (family, dtype) == ("llama", torch.bfloat16):
            check_padding(model, 3, PADDED)
        elif family == "gemma3":  # windows count slots
            check_padding(model, 1, ("left", "right", "both sides"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_without_positions_a_rows_tokens_are_counted_by_its_mask(family: str) -> None:
    """Of a prompt, as ids or embeddings, and of the token after it."""
    model = build(family)
    ids, mask = (x[:2] for x in prompts(model))
    row, length = 1, LENGTHS[1]
    further, token = torch.cat([mask, mask[:, -1:]], 1).long(), ids[:, :1]
    for embeds in (None, model.get_input_embeddings()(ids)):
        together, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)

        def call(cache: DynamicCache, places: Any, **inputs: Tensor) -> Tensor:
            given = {name: x[places] for name, x in inputs.items() if x is not None}
            return model(**given, **{cache_name(model): cache}).logits

        prompt = {"input_ids": ids if embeds is None else None, "inputs_embeds": embeds}
        own = slice(row, row + 1), slice(WIDTH - length, None)
        with batch_invariant(model):
            logits = call(together, slice(None), **prompt, attention_mask=mask.long())
            assert torch.equal(logits[row, mask[row]], call(alone, own, **prompt)[0])
            logits = call(together, slice(None), input_ids=token, attention_mask=further)
            assert torch.equal(logits[row], call(alone, own[:1], input_ids=token)[0])


def test_generation_within_it_and_the_model_afterwards() -> None:
    model = build("llama")
    ids, mask = prompts(model)
    before = log_probabilities(model, ids, mask)
    with batch_invariant(model):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        together = model.generate(ids[:7], attention_mask=mask[:7].long(), **options)
        alone = model.generate(ids[:1], **options)
    assert torch.equal(together[:1], alone)
    assert "forward" not in vars(model)
    assert torch.equal(log_probabilities(model, ids, mask), before)


@pytest.mark.parametrize("attached", [False, True])
def test_a_copy_made_within_is_a_plain_model(attached: bool) -> None:
    """Of a call too, which replaces the norms' forwards."""
    model: Any = build("llama")
    ids, copies = prompts(model)[0][:2], list[Any]()
    expected = model(ids).logits
    with ContextPatcher(model) if attached else nullcontext(), batch_invariant(model):
        copies += [copied(model) for copied in COPIES]
        hook = model.model.norm.register_forward_hook(
            lambda *_: copies.append(pickled(model.lm_head))
        )
        with torch.no_grad(), hook:
            model(ids)
    for twin in copies[:-1]:
        check_plain(twin)
        twin.lm_head.weight.data.mul_(2)
        logits = twin(ids).logits
        assert torch.equal(logits, 2 * expected)
        logits.sum().backward()
        assert twin.lm_head.weight.grad is not None and model.lm_head.weight.grad is None


class _MixesRows(nn.Module):
    """A projection that lets rows see each other."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x - 1e-3 * x.mean(0, keepdim=True))


def test_calls_and_models_that_are_refused() -> None:
    def refused(model: PreTrainedModel, message: str) -> None:
        with pytest.raises(UnsupportedModelError, match=message):
            batch_invariant(model).__enter__()
        assert "forward" not in vars(model)

    model = build("llama")
    ids = torch.tensor([[3, 4]])
    with batch_invariant(model):
        with pytest.raises(ValueError, match="gradients enabled"):
            model(ids)
        with torch.no_grad(), torch.autocast("cpu"), pytest.raises(ValueError, match="autocast"):
            model(ids)
        with pytest.raises(ValueError, match="attach first"):
            ContextPatcher(model)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = _MixesRows(mlp.down_proj)
    refused(model, "rows that depend on their batch")
    refused(build("llama", attention_dropout=0.5).train(), "rows that depend on their batch")
    refused(build("llama").double(), "float64")
    for family in ("mamba", "qwen3_next"):
        refused(build(family), "recurrent layers, which see padding")
    eager = build("llama")
    eager.set_attn_implementation("eager")
    refused(eager, "attn_implementation='sdpa'")


class _WithBias(LlamaRMSNorm):
    """An RMSNorm of a form that no op of ours has."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.bias


def test_a_norm_with_a_bias_keeps_it() -> None:
    """Also if that of the first one is 0."""
    model = build("llama")
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm = _WithBias(32)
        layer.input_layernorm.bias.data.fill_(number)
    ids, mask = prompts(model)
    expected = log_probabilities(model, ids[:1], mask[:1])
    with batch_invariant(model):
        assert torch.allclose(log_probabilities(model, ids[:1], mask[:1]), expected, atol=1e-3)


def test_two_threads_at_once() -> None:
    """Their contexts begin and end in turns; both have the bits of one alone, in every call."""
    model = build("llama", dtype=torch.bfloat16)
    ids, mask = prompts(model)
    ids, mask = ids[:3], mask[:3]
    with batch_invariant(model):
        expected = log_probabilities(model, ids, mask)
    turn = threading.Barrier(2, timeout=60)

    def run(first: bool) -> list[Tensor]:
        if not first:
            turn.wait()
        with batch_invariant(model):
            if first:
                turn.wait()
            turn.wait()
            found = [log_probabilities(model, ids, mask) for _ in range(3)]
            if not first:
                turn.wait()  # for the end of the other's
                found.append(log_probabilities(model, ids, mask))
        if first:
            turn.wait()
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, (True, False)):
            assert all(torch.equal(x, expected) for x in found)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_call_takes_turns_with_the_passes_of_a_patcher() -> None:
    model = build("llama")
    ids, mask = prompts(model)
    with ContextPatcher(model) as patcher, batch_invariant(model), ThreadPoolExecutor(1) as other:
        lock, free = patcher.attached_model.attachment.lock, list[bool]()

        def is_free() -> bool:
            if not lock.acquire(blocking=False):
                return False
            lock.release()
            return True

        norm = model.get_submodule("model.norm")
        handle = norm.register_forward_hook(lambda *_: free.append(other.submit(is_free).result()))
        log_probabilities(model, ids[:2], mask[:2])
        handle.remove()
        assert other.submit(is_free).result()
    assert free and not any(free)
