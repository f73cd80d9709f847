"""ContextPatcher as something that is attached to a model: what it leaves behind, what is absorbed,
what is built.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patchers import IDS, Snapshot, plain_logits, works
from support.random_models import build, case, tokens, two_layers
from support.storages import largest_of
from torch import Tensor, nn

from icl_patch import ContextPatch, ContextPatcher, PatchedLinear, ops
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.tolerances import rounding_limit


def use(patcher: ContextPatcher, stage: str) -> None:
    """One of the things a patcher does, to its end."""
    if stage == "generate":
        for _step in patcher.generate(tokens(3, 2, 5), max_new_tokens=3):
            pass
        return
    patch = patcher.compute(**case("spans"))
    if stage == "forward":
        patcher.forward(patch.kept_ids, patch)


# of models that end in a norm and in a matrix, where direct is stable
PAIRS = [("gemma3", "direct"), ("gemma3", "exact"), ("llama", "stable")]
pairs = pytest.mark.parametrize(("family", "update"), PAIRS)


@pytest.mark.parametrize(
    ("family", "update", "attention"),
    [("gemma3", "direct", "eager"), ("gemma3", "exact", "sdpa"), ("llama", "stable", "eager")],
)
def test_detach_leaves_the_model_as_it_was(family: str, update: str, attention: str) -> None:
    model = build(family, attention=attention)
    before = Snapshot(model)
    patcher = ContextPatcher(model, update)
    for stage in ("compute", "forward", "generate"):
        use(patcher, stage)
    assert sum(isinstance(module, PatchedLinear) for module in model.modules()) == 3 * 3
    before.check_parameters(model)  # attached or not
    patcher.detach()
    before.check(model)
    patcher.detach()
    before.check(model)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> Iterator[None]:
    """The low-rank ops, which every patched layer calls, raise at the call after so many."""
    calls = itertools.count()

    def breaking(op: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= after:
                raise error
            return op(*args, **kwargs)

        return called

    with monkeypatch.context() as patched:
        for name in ("add_low_rank", "patched_linear"):
            patched.setattr(ops, name, breaking(getattr(ops, name)))
        yield


@pairs
def test_an_exception_in_the_middle_leaves_nothing(
    family: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    before = Snapshot(model)
    patcher = ContextPatcher(model, update)
    patch = patcher.compute(**case("spans"))
    errors = (RuntimeError("broken"), KeyboardInterrupt())
    for stage, error in itertools.product(("compute", "forward", "generate"), errors):
        # in the second of three blocks
        with pytest.raises(type(error)), failing(monkeypatch, 3, error):
            if stage == "forward":
                patcher.forward(patch.kept_ids, patch)
            else:
                use(patcher, stage)
        assert torch.equal(plain_logits(model), before.logits)  # every module is off again
        works(patcher)
    patcher.detach()
    before.check(model)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def _changed_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        _changed_weight,
        lambda model: model.config.update({"rms_norm_eps": 1e-4}),
        lambda model: model.model.norm.register_forward_hook(lambda *_: None),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.bfloat16(),
    ],
    ids=["weight", "config", "hook", "attention", "dtype"],
)
def test_what_attaching_found_holds_until_something_changes(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = build("llama"), []
    monkeypatch.setattr(type(model), "forward", counted(type(model).forward, calls))
    with ContextPatcher(model) as patcher:
        first = patcher.attached_model.block_specs
    tried = len(calls)
    with ContextPatcher(model, "stable") as patcher:
        assert patcher.attached_model.block_specs == first
        patch = patcher.compute(tokens(0, 1, 4), tokens(1, 1, 2))
    assert tried == 4
    assert len(calls) - tried <= 3  # those of compute
    assert patch.info.fingerprint == patcher.attached_model.weights.check().fingerprint
    change(model)
    before = len(calls)
    ContextPatcher(model).detach()
    assert len(calls) - before == tried + (model.dtype == torch.bfloat16)  # multipliers


def counted(forward: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    return counting


@pytest.mark.parametrize("what", ["one matrix", "an MLP", "a matrix within another"])
def test_detach_leaves_alone_what_was_replaced_meanwhile(what: str) -> None:
    model = build("llama")
    before = dict(model.named_modules())
    patcher = ContextPatcher(model, "stable")
    mlp = model.model.layers[1].mlp
    if what == "an MLP":
        mine: nn.Module = nn.Identity()
        model.model.layers[1].mlp = mine
        gone = {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    else:
        mine = mlp.down_proj = nn.Linear(72, 48) if what == "one matrix" else Doubled(mlp.down_proj)
        gone = {"model.layers.1.mlp.down_proj"}
    replaced = gone if what == "one matrix" else set()  # our module is nowhere
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patcher.detach()
    assert {str(warning.message).split(" ")[0] for warning in caught} == replaced
    assert all(
        warning.filename == __file__ and "replaced while it was patched" in str(warning.message)
        for warning in caught
    )
    after = dict(model.named_modules())
    modules = [*after.values(), *mlp.modules()]
    assert not any(isinstance(module, PatchedModule) for module in modules)
    assert mine in after.values()
    if what == "an MLP":
        gone |= {name for name in before if name.startswith("model.layers.1.mlp")}
    assert all(after[name] is before[name] for name in before.keys() - gone)
    own = [before[f"model.layers.1.mlp.{part}_proj"] for part in ("gate", "up")]
    assert [mlp.gate_proj, mlp.up_proj] == own
    if isinstance(mine, Doubled):
        assert mine.inner is before["model.layers.1.mlp.down_proj"]
    patcher.detach()
    assert not patcher.attached
    if what == "one matrix":
        with ContextPatcher(model, "stable") as patcher:
            works(patcher)


def test_all_in_inference_mode() -> None:
    """A model that is made and attached there; attached outside: test_fingerprints.py."""
    with torch.inference_mode(), ContextPatcher(build("gemma3")) as patcher:
        works(patcher)
        use(patcher, "generate")


@pairs
def test_what_is_prefix_and_what_is_kept(family: str, update: str) -> None:
    """Before the first absorbed token everything is prefix, and the first tokens in any case; after
    it all that is not absorbed is kept, with a patch of its own.
    """
    context, kept = tokens(0, 2, 10), tokens(1, 2, 2)
    context_mask = torch.tensor([[True] * 10, [False] * 2 + [True] * 8])
    kept_mask = torch.tensor([[True, False], [True, True]])
    spans = [(8, 9), (4, 7)]  # in any order
    with ContextPatcher(build(family), update) as patcher:
        inputs = {"context_ids": context, "kept_ids": kept, "context_mask": context_mask}
        inputs |= {"kept_mask": kept_mask, "absorbed": spans, "keep_first": 3}
        patch = patcher.compute(**inputs)
        with pytest.raises(TypeError, match="only kept tokens, got keep_first too: leave it out"):
            patcher.forward(patch.kept_ids, patch, keep_first=3)
        works(patcher, inputs)
    columns = [7, 9]
    assert torch.equal(patch.kept_ids, torch.cat([context[:, columns], kept], 1))
    assert patch.kept_mask.tolist() == [[True, True, True, False], [True] * 4]
    assert torch.equal(patch.prefix_ids[0], context[0, :4])
    assert torch.equal(patch.prefix_ids[1, 1:], context[1, 2:5])  # of the span the first one
    # left-padded
    assert torch.equal(patch.prefix_mask, torch.tensor([[True] * 4, [False] + [True] * 3]))
    rows = zip(patch.prefix_positions, patch.prefix_mask, strict=True)
    assert [x[mask].tolist() for x, mask in rows] == [[0, 1, 2, 3], [0, 1, 2]]
    # 4 tokens, 3 absorbed, then columns 7 and 9 around an absorbed one; the second row has two
    # tokens less
    assert patch.position_ids[0][patch.kept_mask[0]].tolist() == [7, 9, 10]
    assert patch.position_ids[1].tolist() == [5, 7, 8, 9]
    for layer in patch.layers:
        assert layer["readers.v"].shape[:2] == (2, 4)
        assert not layer["mlp.gate_proj.u"][0, 3].any()  # padding has no patch


ROOMY_SMALLEST = 64 * 128


def bucketed_capacity(family: str) -> nn.Module:
    """Matrices with more than four times as many elements as the activations of a few tokens."""
    changes: dict = {"head_dim": 16} if family == "gemma3" else {}
    model = two_layers(family, hidden_size=64, intermediate_size=128, **changes)
    sizes = [p.numel() for name, p in model.named_parameters() if ".mlp." in name]
    assert min(sizes) == ROOMY_SMALLEST
    return model


@pairs
def test_no_matrix_of_a_weights_size_is_made(family: str, update: str) -> None:
    model = bucketed_capacity(family)
    inputs = {"context_ids": tokens(0, 1, 4), "kept_ids": tokens(1, 1, 2)}
    with torch.no_grad():
        stock, _ = largest_of(lambda: model(torch.cat(list(inputs.values()), 1)))
    assert stock < ROOMY_SMALLEST / 4
    with ContextPatcher(model, update) as patcher:
        computing, patch = largest_of(lambda: patcher.compute(**inputs))
        replaying, _ = largest_of(lambda: patcher.forward(patch.kept_ids, patch))
        generating, _ = largest_of(
            lambda: list(patcher.generate(inputs["context_ids"], max_new_tokens=2))
        )
        building, _ = largest_of(
            lambda: (patcher.forward(patch.kept_ids, patch), list(patch.weight_changes(0, 0)))
        )
    assert max(computing, replaying, generating) < ROOMY_SMALLEST / 4
    assert building >= ROOMY_SMALLEST  # it is noticed


@pytest.mark.parametrize("under", [False, True])
def test_a_patch_replays_with_or_without_autocast_as_it_was_made(
    under: bool, tmp_path: Path
) -> None:
    """A loaded one too, whatever surrounds the replay; both runs differ."""
    model = build("llama")
    bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
    with ContextPatcher(model) as patcher:
        with bfloat16(enabled=under):
            patch = patcher.compute(**case("prefix"))
            (step,) = patcher.generate(IDS, max_new_tokens=1, mode="two_pass")
        with bfloat16(enabled=not under):
            other = patcher.compute(**case("prefix"))
        assert patch.info.arithmetic == ("autocast bfloat16" if under else "model")
        assert not torch.equal(patch.logits, other.logits)
        patch.save(tmp_path / "patch.safetensors")
        loaded = ContextPatch.load(tmp_path / "patch.safetensors", model)
        assert loaded.digest is not None
        assert loaded.digest.limit == rounding_limit(torch.bfloat16 if under else torch.float32)
        for enabled, made in itertools.product((False, True), (patch, loaded)):
            with bfloat16(enabled=enabled):
                logits = patcher.forward(made.kept_ids, made)
                replayed = patcher.forward(step.patch.kept_ids, step.patch)
            assert torch.equal(logits[patch.kept_mask], patch.logits[patch.kept_mask])
            assert torch.equal(replayed[:, -1], step.logits)
