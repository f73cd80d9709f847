"""What forward hooks see in each run, as docs/activations.md says it, in its order."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support.random_models import tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, UnsupportedModelError
from icl_patch.evaluation import tiny_models
from icl_patch.models.forward import cache_in, cache_name

CONTEXT, KEPT = tokens(0, 2, 6) % 90, tokens(1, 2, 3) % 90
WHOLE = torch.cat([CONTEXT, KEPT], 1)
NEAR = 1e-5  # fp32's rounding through four blocks
FAR = 0.05
BLOCK = "model.layers.1"
Calls = dict[str, list[Tensor]]


@contextmanager
def watched(model: nn.Module) -> Iterator[Calls]:
    """The first output of every call of each module in a block, of the block and of the head."""
    calls: Calls = defaultdict(list)
    with ExitStack() as handles:
        for path, module in model.named_modules():
            if path.startswith((BLOCK, "lm_head", "model.norm")):

                def keep(_module: nn.Module, _args: Any, out: Any, path: str = path) -> None:
                    calls[path.removeprefix(f"{BLOCK}.")].append(
                        (out[0] if isinstance(out, tuple) else out).detach().clone()
                    )

                handles.enter_context(module.register_forward_hook(keep))
        yield calls


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((found - expected[:, -found.shape[1] :]).abs().max() / expected.abs().max())


# Where a run with the patch has other values than the context's, whenever the hook was set.
OTHER = {
    "llama": ["self_attn", "post_attention_layernorm"],
    "gemma3": ["self_attn", "pre_feedforward_layernorm"],
}
READERS = ["mlp.gate_proj", "mlp.up_proj"]


@pytest.mark.parametrize("update", ["exact", "stable"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_hooks_see_in_each_run(family: str, update: str) -> None:
    model: Any = tiny_models.build(family)
    with watched(model) as expected, torch.no_grad():  # attached to nothing, with the context
        model(WHOLE)
    with watched(model) as before, ContextPatcher(model, update) as patcher:
        # with the context: a call of the model, also with a patcher, and hooks set at any time
        before.clear()
        with watched(model) as after, torch.no_grad():
            model(WHOLE)
        for calls in (before, after):
            assert {path: len(seen) for path, seen in calls.items()} == dict.fromkeys(expected, 1)
            assert all(torch.equal(seen[0], expected[path][0]) for path, seen in calls.items())

        # compute: the context, the kept tokens behind it, the choice of the factors, the replay
        before.clear()
        with watched(model) as after:
            patch = patcher.compute(CONTEXT, KEPT)
        assert [seen.shape[1] for seen in after["mlp"]] == [6, 3, 3, 3]
        assert off(after["mlp"][1], expected["mlp"][0]) <= NEAR

        # forward: once, the patched run
        before.clear()
        with watched(model) as after:
            logits = patcher.forward(KEPT, patch)
        assert {len(seen) for seen in after.values()} == {1}
        assert torch.equal(after["lm_head"][0], logits)
        for path in (BLOCK, "model.norm", "lm_head", "mlp.act_fn"):
            for calls in (before, after):
                assert off(calls[path][0], expected[path][0]) <= NEAR, path
        for path in OTHER[family]:
            for calls in (before, after):
                assert off(calls[path][0], expected[path][0]) > FAR, path
        for path in READERS:
            assert off(after[path][0], expected[path][0]) <= NEAR, path
            assert off(before[path][0], expected[path][0]) > FAR, path
        assert off(after["mlp.down_proj"][0], expected["mlp.down_proj"][0]) > FAR
        assert off(before["mlp.down_proj"][0], expected["mlp.down_proj"][0]) <= NEAR
        norm = "post_feedforward_layernorm"
        if family == "gemma3":
            assert off(after[norm][0], expected[norm][0]) > FAR
            assert norm not in before


def test_tokens_that_stay_run_before_the_kept_ones() -> None:
    """Before the factors are chosen, and before each replay."""
    model = tiny_models.build("llama")
    with ContextPatcher(model) as patcher:
        with watched(model) as calls:
            patch = patcher.compute(CONTEXT, KEPT, keep_first=2)
        assert [seen.shape[1] for seen in calls["mlp"]] == [6, 3, 2, 3, 2, 3]
        with watched(model) as calls:
            patcher.forward(KEPT, patch)
        assert [seen.shape[1] for seen in calls["mlp"]] == [2, 3]


@pytest.mark.filterwarnings("ignore::icl_patch.errors.SlowerStepsWarning")
def test_generate_shows_each_step_three_times() -> None:
    """Its token behind the context, the choice of the factors, and the replay; the first exact step
    is replayed once more.
    """
    model = tiny_models.build("llama")
    with ContextPatcher(model) as patcher, watched(model) as calls:
        steps = patcher.generate(CONTEXT, max_new_tokens=2, eos_token_id=None)
        assert [seen.shape[1] for seen in calls["mlp"]] == [5]
        found = []
        for step in steps:
            found.append(len(calls["mlp"]))
            assert step.mode == "two_pass"
            # the last call is the replay
            assert torch.equal(calls["lm_head"][-1][:, -1], step.logits)
    assert found == [1 + 4, 1 + 4 + 3]


@pytest.mark.parametrize(("family", "keep_first"), [("llama", 0), ("gpt2", 2), ("mixtral", 2)])
def test_a_call_with_an_applied_patch_is_a_replay(family: str, keep_first: int) -> None:
    """For tools that call the model, and to read hidden states; what they change there changes no
    later replay.
    """
    model: Any = tiny_models.build(family)
    with ContextPatcher(model) as patcher, torch.no_grad():
        patch = patcher.compute(CONTEXT, KEPT, keep_first=keep_first)
        message = r"with patcher\.applied\(patch, token=None\): model\(patch\.kept_ids, .* returns"
        with pytest.raises(TypeError, match=message):
            patcher.forward(KEPT, patch, output_hidden_states=True)
        inputs: dict[str, Any] = {"position_ids": patch.position_ids, "output_hidden_states": True}
        if keep_first:
            front = model(patch.prefix_ids, use_cache=True)
            inputs[cache_name(model)] = cache_in(front)
        with patcher.applied(patch, token=None) as changed:
            out = changed(patch.kept_ids, **inputs)
        assert torch.equal(out.logits, patch.logits)
        with_context = model(WHOLE, output_hidden_states=True).hidden_states
        for found, expected in zip(out.hidden_states, with_context, strict=True):
            assert off(found, expected) <= NEAR

        def zero_logits() -> Any:
            return model.lm_head.register_forward_hook(lambda _module, _args, out: 0 * out)

        others = r"the patch was computed with, got others"
        refusal = pytest.raises(UnsupportedModelError, match=others)
        with zero_logits(), refusal, patcher.applied(patch, token=None):
            pass
        with patcher.applied(patch, token=None) as changed, zero_logits():
            assert not changed(KEPT, position_ids=patch.position_ids).logits.any()
        assert torch.equal(patcher.forward(KEPT, patch), patch.logits)


def test_where_a_call_is_no_replay_it_is_refused_with_what_to_do() -> None:
    """Gemma 3's window would reach the tokens that stay, which the context separates."""
    model = tiny_models.build("gemma3")
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(CONTEXT, KEPT, keep_first=1)
        part = patch.select(tokens=slice(1, None))
        call = r"such a call is off by .* Call patcher\.forward, with hooks to read activations"
        for given, error, message in (
            (patch, UnsupportedModelError, call),
            (part, ValueError, "with all its layers and its first tokens"),
        ):
            with pytest.raises(error, match=message), patcher.applied(given, token=None):
                pass
        with watched(model) as calls:
            patcher.forward(KEPT, patch)
        assert torch.equal(calls["lm_head"][-1], patch.logits)
