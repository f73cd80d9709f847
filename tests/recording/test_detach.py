"""Models that are put back without their patcher: one that nobody refers to any more, one of
somebody else, none at all.
"""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from support.copies import COPIES, Copy, check_plain
from support.patchers import IDS, KEPT, Snapshot, plain_logits, works
from support.random_models import build, tokens
from torch import nn

import icl_patch
from icl_patch import ContextPatcher, PatchedLinear
from icl_patch.layers.patched_module import PatchedModule


def used(model: Any, what: str) -> None:
    """Attach, use the patcher for something that it keeps, and let go of it."""
    patcher = ContextPatcher(model, "exact" if what == "compute" else "stable")
    if what == "compute":
        works(patcher)
    elif what == "generate":
        list(patcher.generate(IDS, max_new_tokens=2, mode="shared_cache"))
    elif what == "a generation that is left":
        next(patcher.generate(IDS, max_new_tokens=2))
    elif what == "a cycle":
        patcher.plans.reusable_steps["me"] = patcher  # type: ignore[assignment]


@pytest.mark.parametrize(
    "what", ["nothing", "compute", "generate", "a generation that is left", "a cycle"]
)
def test_a_patcher_that_is_collected_detaches(what: str) -> None:
    model = build("llama")
    with Snapshot(model):
        used(model, what)
        gc.collect()
    with ContextPatcher(model) as patcher:
        works(patcher)


def test_a_patcher_that_is_referred_to_stays() -> None:
    """By a generation that goes on, if by nothing else; and what has been detached is not put back
    a second time.
    """
    model = build("llama")
    with Snapshot(model):
        steps = ContextPatcher(model, "stable").generate(IDS, max_new_tokens=3, eos_token_id=None)
        gc.collect()
        assert len(list(steps)) == 3
        del steps
        gc.collect()
    patcher = ContextPatcher(model)
    patcher.detach()
    with ContextPatcher(model) as other:
        del patcher
        gc.collect()
        works(other)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_detach_whoever_attached(family: str) -> None:
    """The patcher knows of it, and the model is what it was, with a patch applied too; where there
    is nothing to detach nothing happens.
    """
    model = build(family)
    before = Snapshot(model)
    icl_patch.detach(model)
    before.check(model)
    patcher = ContextPatcher(model, "stable")
    steps = patcher.generate(IDS, max_new_tokens=3, eos_token_id=None)
    next(steps)
    patch = patcher.compute(IDS, KEPT)
    icl_patch.detach(model)
    icl_patch.detach(model)
    before.check(model)
    assert not patcher.attached
    for call in (lambda: next(steps), lambda: patcher.forward(KEPT, patch)):
        message = "expected an attached patcher, this one has been detached"
        with pytest.raises(ValueError, match=message):
            call()
    other = ContextPatcher(model)
    patcher.detach()  # it has been: the other one stays
    works(other)
    with other.applied(other.compute(IDS, KEPT)):
        icl_patch.detach(model)
        assert torch.equal(plain_logits(model), before.logits)
    before.check(model)


@pytest.mark.parametrize("place", ["mlp.gate_proj", ""])
def test_a_module_that_is_replaced_while_it_is_patched(place: str) -> None:
    """The cure that the error names is one."""
    model: Any = build("llama")
    patcher = ContextPatcher(model)
    path = f"model.layers.1.{place}".rstrip(".")
    model.set_submodule(path, build("llama", 3).get_submodule(path))
    for call in (lambda: patcher.compute(IDS, KEPT), lambda: next(patcher.generate(IDS))):
        with pytest.raises(ValueError, match=rf"expected {path}\S* as it was .* call detach\(\)"):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one that its block does not hold any more
        patcher.detach()
    expected = plain_logits(model)
    with ContextPatcher(model) as patcher:
        works(patcher)
        assert torch.equal(plain_logits(model), expected)


def test_detach_layers_that_somebody_swapped() -> None:
    """One in a model, one within a module of one's own, beside a patcher; a wrapper is taken for
    the model in it.
    """
    model: Any = build("llama")
    before = Snapshot(model)
    u, v = torch.ones(1, 1, 97), torch.ones(1, 1, 48)
    model.lm_head = PatchedLinear(model.lm_head)
    model.lm_head.set_patch(u, v)
    with pytest.raises(ValueError, match=r"or call icl_patch\.detach\(model\)"):
        ContextPatcher(model)
    icl_patch.detach(model)
    before.check(model)
    patcher = ContextPatcher(model)
    model.model.layers[1].mlp.gate_proj = nn.Sequential(model.model.layers[1].mlp.gate_proj)
    model.lm_head = PatchedLinear(model.lm_head)
    icl_patch.detach(nn.Sequential(model))
    assert not patcher.attached
    assert not any(isinstance(module, PatchedModule) for module in model.modules())
    assert torch.equal(plain_logits(model), before.logits)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_an_attached_model_is_a_plain_model(copied: Copy) -> None:
    """It runs its own weights, and waits for no pass of the other."""
    model: Any = build("llama")
    ids = tokens(90, 2, 9)
    with Snapshot(model) as before, ContextPatcher(model) as patcher:
        twin = copied(model)
        check_plain(twin)
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
            assert torch.equal(twin(ids).logits, 2 * before.logits)
            assert torch.equal(model(ids).logits, before.logits)
        with ContextPatcher(twin) as another:
            works(another)
        works(patcher)
        with pytest.raises(TypeError, match="copy the model, and attach another patcher"):
            copy.deepcopy(patcher)


def test_a_copy_of_a_model_in_a_pass_or_with_an_applied_patch_is_refused() -> None:
    """It would keep the hooks and factors; the cure is a copy afterwards."""
    model: Any = build("llama")
    refused = pytest.raises(ValueError, match="copy the model before or")
    with Snapshot(model), ContextPatcher(model) as patcher:
        patch = patcher.compute(IDS, KEPT)
        for copied in COPIES:
            with patcher.applied(patch), refused:
                copied(model)

        def copy_it(*_: object) -> None:
            with refused:
                copy.deepcopy(model.model.layers[1])

        with model.lm_head.register_forward_hook(copy_it):
            patcher.compute(IDS, KEPT)
        check_plain(copy.deepcopy(model))
        works(patcher)
