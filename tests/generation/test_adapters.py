"""A model with PEFT's adapters, which choose other weights from one generation to the next."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generation import own_steps
from support.optional import imported
from support.random_models import shallow, tokens
from torch import Tensor

from icl_patch import ContextPatcher, metrics

STEPS = 18  # enough for a program


def adapted(model: Any, targets: list[str]) -> Any:
    """A PeftModel with two adapters on these matrices of the model."""
    peft = imported("peft")
    config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    result = peft.get_peft_model(model, config, "first")
    result.add_adapter("second", config)
    model.eval()
    return result


def of_the_model(model: Any, ids: Tensor) -> Tensor:
    return torch.stack([*own_steps(model, ids, torch.ones_like(ids), STEPS)])


def of_steps(patcher: ContextPatcher, ids: Tensor) -> Tensor:
    steps = patcher.generate(ids, max_new_tokens=STEPS, eos_token_id=None)
    return torch.stack([step.logits for step in steps])


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] *= 3


CHANGES: dict[str, Callable[[Any], None]] = {
    "another adapter": lambda model: model.set_adapter("second"),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "another scale": scale,
    "merged": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], ["gate_proj", "down_proj"]])
@pytest.mark.parametrize("change", CHANGES)
def test_steps_follow_the_adapters(change: str, targets: list[str]) -> None:
    """Also those within patched modules, and though the steps are a program from before."""
    model = shallow("llama")
    peft, ids = adapted(model, targets), tokens(0, 2, 9)
    with ContextPatcher(model, "stable") as patcher:
        before = of_steps(patcher, ids)
        assert patcher.step_source is not None
        CHANGES[change](peft)
        found = of_steps(patcher, ids)
        assert metrics.linf(found, of_the_model(model, ids)).max() < 1e-5
        if change != "merged":
            assert metrics.linf(found, before).max() > 1e-3


@pytest.mark.parametrize("way", ["unload", "merge_and_unload"])
def test_adapters_that_are_taken_away(way: str) -> None:
    """From matrices beside the patched ones while a patcher is attached, from these when it is
    detached.
    """
    model, ids = shallow("llama"), tokens(0, 2, 9)
    peft = adapted(model, ["q_proj"])
    with ContextPatcher(model, "stable") as patcher:
        of_steps(patcher, ids)
        getattr(peft, way)()
        found, expected = of_steps(patcher, ids), of_the_model(model, ids)
    assert metrics.linf(found, expected).max() < 1e-5
    peft = adapted(model, ["q_proj", "down_proj"])
    with ContextPatcher(model, "stable"):
        with pytest.raises(ValueError, match="detach the patcher"):
            getattr(peft, way)()
        with_adapters = of_the_model(model, ids)
    getattr(peft, way)()
    error = metrics.linf(of_the_model(model, ids), expected).max()
    assert (error < 1e-5) == (way == "unload") and metrics.linf(
        with_adapters, expected
    ).max() > 1e-3
    assert not any("lora" in name for name in model.state_dict())
