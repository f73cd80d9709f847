"""With the baseline's history forced, the exact step chooses what the model chooses; running free,
where generations part.
"""

import pytest
import torch
from support.generation import prefilled
from support.models import build
from torch import Tensor, nn
from transformers import DynamicCache

from icl_patch import ContextPatcher, embedded
from icl_patch.generation.decode_state import DecodeMode
from icl_patch.generation.decode_step import decode_one_token

MODELS = ("embedded", "gemma3", "llama")


def model_of(name: str) -> nn.Module:
    if name == "embedded":
        return embedded.load(torch.bfloat16)[0]
    return build(name, 0, torch.bfloat16, max_position_embeddings=2048)


def baseline(model: nn.Module, ids: Tensor, steps: int) -> Tensor:
    """The model's own cached greedy choices, (B, steps); its end of text is not heeded."""
    cache, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        token = ids[:, -1:]
        for _ in range(steps):
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            found.append(token)
    return torch.cat(found, 1)


def forced_matches(name: str, steps: int) -> int:
    model = model_of(name)
    ids = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(3))
    said = baseline(model, ids, steps)
    with ContextPatcher(model, "exact") as patcher:
        state = prefilled(
            patcher,
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            ids.shape[1] + steps,
            DecodeMode.TWO_PASS,
        )
        token, matches = ids[:, -1], 0
        for column in range(steps):
            matches += int(
                torch.equal(decode_one_token(state, token).logits.argmax(-1), said[:, column])
            )
            token = said[:, column]
    return matches


@pytest.mark.parametrize("name", MODELS)
def test_the_same_choice_at_every_step(name: str) -> None:
    assert forced_matches(name, 20) == 20


@pytest.mark.stress
@pytest.mark.parametrize("name", MODELS)
def test_the_same_choice_at_a_thousand_steps(name: str) -> None:
    assert forced_matches(name, 1000) == 1000


def first_difference(one: Tensor, other: Tensor) -> int | None:
    different = (one != other).any(0).nonzero()
    return int(different[0]) if len(different) else None


@pytest.mark.stress
@pytest.mark.parametrize("name", MODELS)
def test_where_free_generations_part(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged, but for exact, which must not part: batching alone makes the model part
    from itself in bf16.
    """
    model, steps = model_of(name), 300
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(3))
    plain = baseline(model, ids, steps)
    parts = {
        "the model at 2B rows": first_difference(
            baseline(model, ids.repeat(2, 1), steps)[:2], plain
        )
    }
    for update in ("exact", "stable"):
        with ContextPatcher(model, update) as patcher:
            said = torch.stack(
                [
                    step.token_ids
                    for step in patcher.generate(ids, max_new_tokens=steps, eos_token_id=None)
                ],
                1,
            )
        parts[update] = first_difference(said, plain)
    with capsys.disabled():
        print(f"\n{name}, first step of {steps} that differs from the model at B rows: {parts}")
    assert parts["exact"] is None
