"""Forward hooks on an attached model: what they do is in the patch, to the bit where it is exact,
or it is refused by name.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.generation import own_steps
from support.patchers import works
from support.random_models import build, shallow, tokens
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from icl_patch import (
    ContextPatch,
    ContextPatcher,
    ControllabilityError,
    UnsupportedModelError,
    metrics,
)
from icl_patch.evaluation import tiny_models
from icl_patch.models.forward import cache_in, cache_name
from icl_patch.tolerances import noise_limit

CONTEXT, KEPT = tokens(0, 2, 6), tokens(1, 2, 2)
IDS = torch.cat([CONTEXT, KEPT], 1)
NEAR = noise_limit(0.0)  # of direct and stable replays in fp32, as `verify` promises

Register = Callable[[nn.Module], AbstractContextManager]  # until the context ends


def silent(module: nn.Module) -> RemovableHandle:
    return module.register_forward_hook(lambda *_: None)


def first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def after(change: Callable[[Tensor], Tensor], **options: bool) -> Register:
    """A hook that changes the first thing that a module returns; it may be given the module's
    keyword arguments too.
    """
    return lambda module: module.register_forward_hook(
        lambda *given: first(given[-1], change), **options
    )


def before(change: Callable[[Tensor], Tensor]) -> Register:
    """A hook that changes a module's first input."""

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return lambda module: module.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def another_forward(module: nn.Module) -> Iterator[None]:
    own = module.forward
    module.forward = lambda *args, **kwargs: first(own(*args, **kwargs), lambda x: 1.5 * x)
    try:
        yield
    finally:
        del module.forward


KINDS: dict[str, Register] = {
    "watches": after(lambda x: x),
    "adds a vector": after(lambda x: x + 0.3),
    "scales": after(lambda x: 1.5 * x, with_kwargs=True, always_call=True),
    "cuts off": after(torch.relu),
    "rounds": after(lambda x: (x.float() + 0.3).to(x.dtype)),
    "scales the input": before(lambda x: 1.5 * x),
    "tells the first row apart": after(lambda x: torch.cat([x[:1] + 0.3, x[1:]])),
    "tells the last row apart": after(lambda x: torch.cat([x[:-1], x[-1:] + 0.3])),
    "scales long inputs": after(lambda x: 1.5 * x if x.shape[-2] < 5 else x),
    "another forward": another_forward,
}
FEW = ("watches", "adds a vector", "scales", "tells the last row apart")


def paths_in(model: nn.Module) -> list[str]:
    """A block in the middle, its attention, all of its MLP and its norms; and what stands around
    the blocks.
    """
    block = next(path for path, _ in model.named_modules() if path.endswith(".1"))
    inside = [path for path, _ in model.named_modules() if path.startswith(f"{block}.")]
    attention = [path for path in inside if path.endswith("attn")]
    norms = tuple(f"{block}.{name}_" for name in ("ln", "input", "post", "pre"))
    inside = [path for path in inside if ".mlp" in path or path.startswith(norms)]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    around = [path for path, module in model.named_modules() if module in ends]
    return [block, *attention, *inside, *around]


@torch.no_grad()
def with_context(model: Any, register: Register, path: str) -> Tensor:
    """The logits of a model that is attached to nothing, with the hook: the context, then the kept
    tokens in one call.
    """
    ids = IDS % model.config.get_text_config().vocab_size
    with register(model.get_submodule(path)):
        cache = cache_in(model(ids[:, : CONTEXT.shape[1]], use_cache=True))
        return model(ids[:, CONTEXT.shape[1] :], **{cache_name(model): cache}).logits


def right_or_refused(patcher: ContextPatcher, expected: Tensor, path: str) -> bool:
    """Whether a patch was right; if it was not, it was refused, and the module named."""
    vocabulary = expected.shape[-1]
    try:
        patch = patcher.compute(CONTEXT % vocabulary, KEPT % vocabulary)
        logits = patcher.forward(patch.kept_ids, patch)
    except UnsupportedModelError as error:
        assert path in str(error), error
        return False
    except ControllabilityError:  # what the hook cuts off cannot be changed
        return False
    off = metrics.linf(logits, expected).max()
    assert off <= (0 if patcher.update == "exact" else NEAR), (path, off)
    return True


# One before the block that gets the hook and one after it.
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
THREE_BLOCKS = {"gemma3": {"num_hidden_layers": 3, "layer_types": TYPES}, "gpt2": {"n_layer": 3}}
# By update: what is right on every module beside the writer's and its readers' input.
RIGHT = {"exact": ("adds a vector",), "stable": ("adds a vector", "scales", "cuts off", "rounds")}


WATCHED = {("llama", "stable"): KINDS, ("llama", "exact"): KINDS}
WATCHED |= dict.fromkeys([("gemma3", "exact"), ("gpt2", "exact"), ("qwen2_moe", "stable")], FEW)


@pytest.mark.parametrize(("family", "update"), WATCHED)
def test_hooks_that_are_set_after_attaching(family: str, update: str) -> None:
    """All of these kinds on the MLP, and one on each other module in turn: right, or refused by
    name; without it the patcher gives the bits that it gave. Those that watch are on all modules at
    once: none of them may change anything.
    """
    model = tiny_models.build(family, **THREE_BLOCKS.get(family, {"num_hidden_layers": 3}))
    stock, ids = copy.deepcopy(model), IDS % tiny_models.VOCABULARY
    kinds = WATCHED[family, update]
    with ContextPatcher(model, update) as patcher:
        plain = patcher.compute(ids[:, :6], ids[:, 6:]).logits
        unhooked = with_context(stock, nullcontext, "")
        watching = [KINDS["watches"](model.get_submodule(path)) for path in paths_in(stock)]
        assert right_or_refused(patcher, unhooked, "no module")
        for handle in watching:
            handle.remove()
        others = [kind for kind in kinds if kind != "watches"]
        for place, path in enumerate(paths_in(stock)):
            tried = others if path.endswith(".mlp") else others[place % len(others) :][:1]
            for kind in tried:
                register = KINDS[kind]
                try:
                    expected = with_context(stock, register, path)
                except (RuntimeError, TypeError, KeyError):  # no hook for such a module
                    continue
                with register(model.get_submodule(path)):
                    right = right_or_refused(patcher, expected, path)
                assert right or kind not in RIGHT.get(update, ()), (path, kind)
            assert torch.equal(patcher.compute(ids[:, :6], ids[:, 6:]).logits, plain)


@pytest.mark.parametrize(("family", "update"), [("llama", "stable"), ("gemma3", "exact")])
def test_hooks_that_are_set_before_attaching(family: str, update: str) -> None:
    """The same, where a writer is tried with its hook; what attaching refuses names the module
    too.
    """
    stock: Any = shallow(family)
    found: dict[str, bool] = {}
    places = (".mlp", "gate_proj", "down_proj", "post_feedforward_layernorm")
    for path in (path for path in paths_in(stock) if path.endswith(places)):
        for kind in FEW:
            model = copy.deepcopy(stock)
            KINDS[kind](model.get_submodule(path))
            try:
                with ContextPatcher(model, update) as patcher:
                    right = right_or_refused(patcher, with_context(stock, KINDS[kind], path), path)
            except UnsupportedModelError as error:
                assert path in str(error), error
                right = False
            found[f"{path} {kind}"] = right
    assert all(right for name, right in found.items() if name.endswith("watches"))
    # after attaching it is refused: the hook then stands behind the patch
    assert found["model.layers.1.mlp.down_proj scales"]
    # the multiplier of a block that ends in a matrix is measured with the hook
    assert found["model.layers.1.mlp scales"] == (family == "llama")


@pytest.mark.parametrize("update", ["exact", "stable"])
def test_a_hook_before_the_norm_behind_the_sum(update: str) -> None:
    """The block's sum is read before the hook changes it, and the patch holds the hook's effect."""
    model = tiny_models.build("opt-post-norm")
    path = next(name for name, _ in model.named_modules() if name.endswith("1.final_layer_norm"))
    expected = with_context(model, KINDS["scales the input"], path)
    with ContextPatcher(model, update) as patcher:
        KINDS["scales the input"](model.get_submodule(path))
        assert right_or_refused(patcher, expected, path)


# -- between computing a patch and replaying it


@pytest.mark.parametrize("loaded", [False, True])
def test_a_patch_is_replayed_beside_the_hooks_that_it_was_computed_beside(
    loaded: bool, tmp_path: Path
) -> None:
    """What only watches may come and go; a loaded patch does not say what there was."""
    model: Any = build("llama")
    mlp = model.model.layers[1].mlp
    with ContextPatcher(model) as patcher:

        def kept(patch: ContextPatch) -> ContextPatch:
            patch.save(tmp_path / "patch.safetensors")
            return ContextPatch.load(tmp_path / "patch.safetensors", model) if loaded else patch

        made = patcher.compute(CONTEXT, KEPT)
        patch, logits = kept(made), made.logits
        watching = [(KINDS["watches"], module) for module in (mlp, mlp.gate_proj, model.model.norm)]
        for register, module in (*watching, (silent, model)):
            with register(module):
                assert metrics.linf(patcher.forward(KEPT, patch), logits).max() <= NEAR
        for kind in ("adds a vector", "scales", "another forward"):
            message = r"the patch was computed with, got others on model\.layers\.1\.mlp:"
            refusal = pytest.raises(UnsupportedModelError, match=message)
            with KINDS[kind](mlp), refusal:
                patcher.forward(KEPT, patch)
            assert torch.equal(patcher.forward(KEPT, patch), logits)
        with KINDS["adds a vector"](mlp):
            patch = patcher.compute(CONTEXT, KEPT)
            assert torch.equal(patcher.forward(KEPT, patch), patch.logits)
        message = "the patch was computed with, they have been removed: the replay is off by"
        with pytest.raises(UnsupportedModelError, match=message):
            patcher.forward(KEPT, patch)


# -- generation


ARGUMENTS: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}


@pytest.mark.filterwarnings("ignore::icl_patch.errors.SlowerStepsWarning")
@pytest.mark.parametrize("update", ["exact", "stable"])
def test_hooks_and_generation(update: str) -> None:
    """Every kind in a block before another, few in the last, which no other one makes up for; set
    before the first step or after it.
    """
    model: Any = build("llama", num_hidden_layers=2)
    stock, right = copy.deepcopy(model), set()
    with ContextPatcher(model, update) as patcher:
        for path, kinds in (("model.layers.0.mlp", KINDS), ("model.layers.1.mlp.down_proj", FEW)):
            for kind in kinds:
                register = KINDS[kind]
                with register(stock.get_submodule(path)):
                    expected = list(own_steps(stock, CONTEXT, torch.ones_like(CONTEXT), 3))
                try:
                    with register(model.get_submodule(path)):
                        steps = patcher.generate(CONTEXT, **ARGUMENTS)
                        for step, logits in zip(steps, expected, strict=True):
                            assert metrics.linf(step.logits, logits).max() <= NEAR, (path, kind)
                    right.add(kind)
                except UnsupportedModelError as error:
                    assert path.rpartition(".mlp")[0] in str(error), error
        assert {"watches", "adds a vector"} <= right
        steps = patcher.generate(CONTEXT, **ARGUMENTS)
        next(steps)
        message = r"got new ones on model\.layers\.1\.mlp: generate again, with mode='two_pass'"
        refusal = pytest.raises(UnsupportedModelError, match=message)
        with KINDS["scales"](model.model.layers[1].mlp), refusal:
            next(steps)
        works(patcher)


# -- hooks on all modules


@torch.no_grad()
@pytest.mark.parametrize("update", ["exact", "stable"])
def test_hooks_on_all_modules(update: str) -> None:
    """They see the modules of the stock model, each call once; what they change is in the patch."""
    model: Any = build("llama")
    stock = copy.deepcopy(model)
    seen: list[str] = []

    def named(module: nn.Module, *_: Any) -> None:
        seen.append(type(module).__name__)

    def scaled(module: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
        return 1.1 * out if isinstance(module, nn.Linear) and module.out_features == 72 else None

    def doubled(_module: nn.Module, _args: Any, out: Any) -> Any:
        return 1.01 * out if isinstance(out, Tensor) and out.is_floating_point() else None

    with ContextPatcher(model, update) as patcher:
        with register_module_forward_pre_hook(named):
            stock(CONTEXT)
            expected = seen.copy()
            for own in (nullcontext(), silent(model.model.layers[1].mlp.up_proj)):
                seen.clear()
                with own:
                    model(CONTEXT)
                    assert seen == expected
                    works(patcher)
        for hook in (scaled, doubled):
            with register_module_forward_hook(hook):
                expected = with_context(stock, nullcontext, "model")
                right = right_or_refused(patcher, expected, "every module (a global hook)")
                assert right or hook is doubled
                with silent(model.model.layers[1].mlp.up_proj):
                    assert right_or_refused(patcher, expected, "a global hook") is right
        works(patcher)


def test_what_transformers_leaves_on_a_model_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that stay once hidden states were asked for are no reason to replay a patch; any other
    hook is.
    """
    model: Any = build("llama")
    with ContextPatcher(model) as patcher:
        replay = Mock(wraps=patcher.attached_model.replay_logits)
        monkeypatch.setattr(patcher.attached_model, "replay_logits", replay)
        with torch.no_grad():
            assert len(model(CONTEXT, output_hidden_states=True).hidden_states) == 4
        assert any(module._forward_hooks for module in model.modules())
        patcher.compute(CONTEXT, KEPT)
        assert not replay.called
        with silent(model.model):
            patcher.compute(CONTEXT, KEPT)
        assert replay.call_count == 1
