"""A model that changes while a patcher is attached: what its code reads, or its weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generation import own_steps
from support.numeric import normal, seeded
from support.patchers import IDS
from support.random_models import shallow, tokens
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from icl_patch import ContextPatcher, UnsupportedModelError, metrics
from icl_patch.generation.sampling_loop import GenerationStep
from icl_patch.models.execution_state import ModelWatch

STEPS = 18  # enough for a program
LIMIT = 1e-5


def steps_of(patcher: ContextPatcher, **options: Any) -> list[GenerationStep]:
    return list(patcher.generate(IDS, max_new_tokens=STEPS, eos_token_id=None, **options))


def logits_of(steps: list[GenerationStep]) -> Tensor:
    return torch.stack([step.logits for step in steps])


def set_all(name: str, value: float) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """A change of an attribute of all modules that have it."""

    def change(model: Any, _: pytest.MonkeyPatch) -> None:
        for module in model.modules():
            if name in vars(getattr(module, "base_layer", module)):
                setattr(module, name, value)

    return change


def twice_the_norms(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, x: 2 * forward(self, x)
    )


def half_the_angles(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin, *rest, **others: rotate(q, k, cos / 2, sin / 2, *rest, **others),
    )


def another_attention(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def twice_the_queries(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any
    ) -> Any:
        return attend(module, 2 * q, k, v, mask, **kw)

    table = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setitem(table, "sdpa", attend)  # and back
    AttentionInterface.register("sdpa", twice_the_queries)


CHANGES: dict[str, tuple[str, str, Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "a block's multiplier": ("granite", "exact", set_all("residual_multiplier", 1.7)),
    "eps of norms behind the MLP": ("olmo2", "stable", set_all("variance_epsilon", 0.3)),
    "eps by another name": ("gemma3", "exact", set_all("eps", 0.3)),
    "a class of norms": ("llama", "exact", twice_the_norms),
    "a function of the source file": ("llama", "stable", half_the_angles),
    "an attention that is registered": ("llama", "stable", another_attention),
}


@pytest.mark.parametrize("name", CHANGES)
def test_patches_and_steps_follow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program of before, without one, and in two passes; and a replay."""
    family, update, change = CHANGES[name]
    model: Any = shallow(family)
    kept = tokens(5, len(IDS), 3)
    with ContextPatcher(model, update) as patcher:
        before = logits_of(steps_of(patcher))
        change(model, monkeypatch)
        expected = torch.stack([*own_steps(model, IDS, torch.ones_like(IDS), STEPS)])
        assert metrics.linf(before, expected).max() > 0.01
        for options in ({}, {}, {"compile": False}, {"mode": "two_pass"}):
            found = logits_of(steps_of(patcher, **options))
            assert metrics.linf(found, expected).max() < LIMIT
        assert patcher.step_source is not None
        with torch.no_grad():
            whole = model(torch.cat([IDS, kept], 1)).logits[:, -kept.shape[1] :]
        replayed = patcher.forward(kept, patcher.compute(IDS, kept))
    assert metrics.linf(replayed, whole).max() < LIMIT


@pytest.mark.parametrize(
    "kind", [nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict]
)
def test_what_is_put_into_an_empty_container_is_a_change(kind: Any) -> None:
    """Its parent may read it."""
    model = nn.Module()
    model.extras = kind()
    watch = ModelWatch(model)
    watch.look()
    assert (watch.code, watch.weights) == (0, 0)
    part = nn.Parameter(torch.ones(2)) if "Parameter" in kind.__name__ else nn.Linear(2, 2)
    model.extras.update({"new": part}) if "Dict" in kind.__name__ else model.extras.append(part)
    watch.look()
    assert watch.code + watch.weights > 0


def test_blocks_of_another_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add something behind their sum, which no patch takes away."""
    layer = modeling_llama.LlamaDecoderLayer
    forward = layer.forward
    with ContextPatcher(shallow("llama")) as patcher:
        patch = patcher.compute(IDS, IDS[:, :2])
        monkeypatch.setattr(layer, "forward", lambda *args, **kw: 1.5 * forward(*args, **kw))
        for call in (
            lambda: patcher.compute(IDS, IDS[:, :2]),
            lambda: patcher.forward(IDS[:, :2], patch),
            lambda: steps_of(patcher),
        ):
            with pytest.raises(UnsupportedModelError, match="detach, and attach again"):
                call()


def test_a_step_belongs_to_the_weights_that_it_ran_with() -> None:
    """Also if they were others when the generation began, and are again when its patch is read."""
    model: Any = shallow("llama")
    kept = model.model.layers[0].self_attn.q_proj.weight
    other = nn.Parameter(normal(seeded(1), *kept.shape, dtype=torch.float32))
    with ContextPatcher(model, "stable") as patcher:
        steps = []
        for step in patcher.generate(IDS, max_new_tokens=STEPS, eos_token_id=None):
            steps.append(step)
            if len(steps) in (5, 6):
                model.model.layers[0].self_attn.q_proj.weight = other if len(steps) == 5 else kept
        for number, step in enumerate(steps):
            if number == 5:
                with pytest.raises(ValueError, match="expected the weights that the step ran with"):
                    _ = step.patch
                continue
            found = patcher.forward(step.patch.kept_ids, step.patch)[:, -1]
            assert metrics.linf(found, step.logits).max() < LIMIT


def test_the_tables_of_transformers_are_left_as_they_were() -> None:
    """An entry of their own would hide what somebody registers later."""
    tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    before = [dict(table._local_mapping) for table in tables]
    with ContextPatcher(shallow("llama")) as patcher:
        steps_of(patcher)
        patcher.compute(IDS, IDS[:, :2])
    assert [dict(table._local_mapping) for table in tables] == before
