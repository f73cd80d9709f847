"""The noise floor: above what rounding does on this machine, below what a fault does."""

import dataclasses

import pytest
import torch
from support.models import case, tokens
from support.numeric import (
    UNIT,
    noise_limit,
    replay_limit,
)
from torch import Tensor, nn
from transformers import DynamicCache

from icl_patch import ContextPatcher, metrics
from icl_patch.evaluation import tiny_models

IDS = tokens(20, 3, 18)
MODELS = ("llama", "gemma3", "gpt2", "mixtral", "qwen3_next")


@torch.no_grad()
def other_ways(model: nn.Module) -> dict[str, Tensor]:
    """The untouched model row by row, token by token over a cache, and on other numbers of
    threads.
    """
    cache, threads = DynamicCache(config=model.config), torch.get_num_threads()
    found = {
        "by row": torch.cat([model(row[None]).logits for row in IDS]),
        "cached": torch.cat(
            [
                model(column[:, None], past_key_values=cache, use_cache=True).logits
                for column in IDS.T
            ],
            1,
        ),
    }
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found[f"{count} threads"] = model(IDS).logits
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("family", MODELS)
def test_what_rounding_does_is_below_the_limit(family: str) -> None:
    model = tiny_models.build(family)
    with torch.no_grad():
        expected = model(IDS).logits
    limit = noise_limit(model)
    assert 10 * UNIT[torch.float32] < limit < 1e-3
    for name, logits in other_ways(model).items():
        assert metrics.linf(logits, expected).max() <= limit, name


@pytest.mark.parametrize(
    ("family", "update"),
    [("llama", "direct"), ("gemma3", "direct"), ("gemma3", "stable"), ("mixtral", "direct")],
)
def test_what_a_small_fault_does_is_above_it(family: str, update: str) -> None:
    """One factor of one layer that is off by a thousandth."""
    model = tiny_models.build(family)
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(**case("prefix"))
        limit = replay_limit(patcher, patch)
        assert (
            metrics.linf(patcher.attached_model.replay(patch)[0], patch.logits)[
                patch.kept_mask
            ].max()
            <= limit
        )
        for name in patch.layers[1]:
            if name.endswith((".u", ".new_scale")):
                layer = {**patch.layers[1], name: 1.001 * patch.layers[1][name]}
                wrong = dataclasses.replace(
                    patch, layers=(patch.layers[0], layer, *patch.layers[2:])
                )
                assert (
                    metrics.linf(patcher.attached_model.replay(wrong)[0], patch.logits)[
                        patch.kept_mask
                    ].max()
                    > limit
                ), name
