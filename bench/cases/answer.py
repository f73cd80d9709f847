"""A whole answer of a chat model: transformers' `generate` beside ours.

The prompt is a chat with a system message, the answer has 32 tokens, greedy. `model.generate` is
the unmodified model, with the system message in the prompt. `generate` gives each token a patch of
its own: by default in a program, with `compile=True` compiled, with `compile=False` in the model's
own code. `ask` returns one
patch for all of the question's and the answer's tokens as well, and `forward` computes the
answer's logits from that patch, without the system message. The error is the share of the answer's
tokens that are others than the model's: none in fp32; in bf16 two tokens that are nearly equal can
change places, and all behind them.

On a GPU without a saved model, 128 tokens after 1,024 random ones by random models of named shapes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import GPU_SHAPES, RandomModel, SavedModel, random_ids, twin
from icl_patch.bench.harness import Case, Comparison, dtype_name
from icl_patch.evaluation.demo import CHATS
from icl_patch.models.prompts import make_prompt, split_ids

NEW = 32
PLAIN = "model.generate"


def cases(device: torch.device, quick: bool, model: str | None = None) -> list[Case]:
    """A case for each dtype of a saved model, which has the tokenizer; without one, on a GPU, a
    case for each random model.
    """
    if model is None:
        return [
            Case(f"{shape.name} bf16 random", functools.partial(of_random_weights, shape, device))
            for shape in GPU_SHAPES
            if device.type == "cuda"
        ]
    saved = SavedModel(model)
    return [
        Case(
            f"{saved.name} {dtype_name(dtype)}",
            functools.partial(comparison, saved, dtype, device),
        )
        for dtype in (torch.float32, torch.bfloat16)[: 1 if quick else 2]
    ]


def comparison(saved: SavedModel, dtype: torch.dtype, device: torch.device) -> Comparison:
    """The calls of one case; each gives the answer's tokens (32,)."""
    model, tokenizer = saved.build(device, dtype), AutoTokenizer.from_pretrained(saved.folder)
    system, question = CHATS[0]
    prompt = make_prompt(tokenizer, question, system=system)
    ids = torch.cat(split_ids(tokenizer, prompt), 1).to(device)
    asking = ContextPatcher(twin(model), tokenizer=tokenizer)
    patch = asking.ask(question=question, system=system, **greedy(NEW)).patch

    def replayed() -> Tensor:
        logits = asking.forward(patch.kept_ids, patch)[0, -NEW:]
        assert model.generation_config is not None
        logits[:, model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
        return logits.argmax(-1)

    calls = _generations(model, ids, NEW)
    calls["ask"] = lambda: asking.ask(question=question, system=system, **greedy(NEW)).token_ids[0]
    calls["forward"] = replayed
    check = tokens_check(own_tokens(model, ids, NEW), dtype)
    notes = {"prompt tokens": float(ids.shape[1])}
    return Comparison(ours=PLAIN, calls=calls, check=check, notes=notes)


def of_random_weights(
    shape: RandomModel, device: torch.device, context: int = 1024, new: int = 128
) -> Comparison:
    """The calls of a random model in bf16; every call makes as many tokens.

    Its logits are nearly equal, so only the step's benchmark can check them.
    """
    model = shape.build(device, torch.bfloat16)
    ids = random_ids(model, 1, context)

    def check(_name: str, tokens: Any) -> float:
        if tokens.shape != (new,):
            raise AssertionError(f"expected {new} tokens, got {tuple(tokens.shape)}")
        return 0.0

    return Comparison(ours=PLAIN, calls=_generations(model, ids, new), check=check)


def _generations(model: PreTrainedModel, ids: Tensor, new: int) -> dict[str, Callable[[], Tensor]]:
    """The model's own generation of ``new`` tokens after ids (1, C), and ours."""
    calls: dict[str, Callable[[], Tensor]] = {PLAIN: lambda: own_tokens(model, ids, new)}
    forms: dict[str, bool | str] = {"": "auto", ", compile=True": True, ", compile=False": False}
    for update in ("exact", "stable"):
        patcher = ContextPatcher(twin(model), update)
        for name, compile in forms.items():
            calls[f"generate, {update}{name}"] = functools.partial(
                our_tokens, patcher, ids, new, compile=compile
            )
    return calls


def greedy(new: int) -> dict[str, Any]:
    """The arguments of a generation of ``new`` tokens."""
    return {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}


def own_tokens(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    """The tokens (new,) of ``model.generate`` after ids (1, C)."""
    generate: Any = model.generate
    tokens: Tensor = generate(ids, attention_mask=torch.ones_like(ids), **greedy(new))[0, -new:]
    return tokens


def our_tokens(
    patcher: ContextPatcher, ids: Tensor, new: int, *, compile: bool | str = False
) -> Tensor:
    """The same of the patcher's steps."""
    mask = torch.ones_like(ids)  # the padding id may be among random ones
    made = patcher.generate(ids, context_mask=mask, compile=compile, **greedy(new))
    return torch.stack([step.token_ids[0] for step in made])


def tokens_check(expected: Tensor, dtype: torch.dtype) -> Callable[[str, Any], float]:
    """A check of tokens: the share that are others than expected. In fp32, and of the first token,
    another one is an error.
    """

    def check(_name: str, tokens: Any) -> float:
        others = float((tokens != expected).float().mean())
        if tokens[0] != expected[0] or (others and dtype == torch.float32):
            raise AssertionError(
                f"expected the model's own tokens {expected.tolist()}, got {tokens.tolist()}"
            )
        return others

    return check
