"""ContextPatcher as something that is attached to a model: what it leaves behind, what is absorbed,
what is built.
"""

import functools
import gc
import itertools
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch
from support.patchers import IDS, Snapshot, plain_logits, works
from support.random_models import build, case, tokens, two_layers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from icl_patch import ContextPatch, ContextPatcher, ops
from icl_patch.evaluation import tiny_models
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.tolerances import rounding_limit

# of models that end in a norm and in a matrix, where direct is stable
PAIRS = [("gemma3", "direct"), ("gemma3", "exact"), ("llama", "stable")]
pairs = pytest.mark.parametrize(("family", "update"), PAIRS)


@contextmanager
def failing(error: BaseException) -> Iterator[None]:
    """The low-rank ops, which every patched layer calls, raise in the second of three blocks."""
    outcomes = itertools.chain([DEFAULT] * 3, itertools.repeat(error))
    broken = {
        name: Mock(wraps=getattr(ops, name), side_effect=outcomes)
        for name in ("add_low_rank", "patched_linear")
    }
    with patch.multiple(ops, **broken):
        yield


@pairs
def test_an_exception_in_the_middle_leaves_nothing(family: str, update: str) -> None:
    model = build(family)
    errors = (RuntimeError("broken"), KeyboardInterrupt())
    with Snapshot(model) as before, ContextPatcher(model, update) as patcher:
        patch = patcher.compute(**case("spans"))
        calls: list[Callable[[], Any]] = [
            lambda: patcher.compute(**case("spans")),
            lambda: patcher.forward(patch.kept_ids, patch),
            lambda: list(patcher.generate(tokens(3, 2, 5), max_new_tokens=3)),
        ]
        for call, error in itertools.product(calls, errors):
            with pytest.raises(type(error)), failing(error):
                call()
            assert torch.equal(plain_logits(model), before.logits)  # every module is off again
            works(patcher)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.normal_(model.model.layers[0].mlp.up_proj.weight),
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
    forward = type(model).forward

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
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


@pytest.mark.parametrize("what", ["one matrix", "an MLP", "a matrix within another"])
def test_detach_leaves_alone_what_was_replaced_meanwhile(what: str) -> None:
    model = build("llama")
    before = dict(model.named_modules())
    patcher = ContextPatcher(model, "stable")
    mlp = model.model.layers[1].mlp
    within = nn.Sequential(mlp.down_proj)
    if what == "an MLP":
        mine: nn.Module = nn.Identity()
        model.model.layers[1].mlp = mine
        gone = {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    else:
        mine = mlp.down_proj = nn.Linear(72, 48) if what == "one matrix" else within
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
    if mine is within:
        assert within[0] is before["model.layers.1.mlp.down_proj"]
    patcher.detach()
    assert not patcher.attached
    if what == "one matrix":
        with ContextPatcher(model, "stable") as patcher:
            works(patcher)


def test_all_in_inference_mode() -> None:
    """A model that is made and attached there; attached outside: test_fingerprints.py."""
    with torch.inference_mode(), ContextPatcher(build("gemma3")) as patcher:
        works(patcher)
        assert list(patcher.generate(IDS, max_new_tokens=3))


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


class NewStorages(TorchDispatchMode):
    """The largest storage, in elements, that an op made which was not one of its arguments'."""

    largest = ops = 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **kwargs or {})
        trees = ((args, kwargs), out)
        inputs, made = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in trees)
        given = {x.untyped_storage().data_ptr() for x in inputs}
        for x in made:
            if x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        self.ops += 1
        return out


def largest_of(call: Callable[[], Any]) -> tuple[int, Any]:
    with NewStorages() as storages:
        result = call()
    assert storages.ops > 100  # it does see what happens
    return storages.largest, result


EXPERTS = [("mixtral", "eager"), ("gpt_oss", "grouped_mm"), ("qwen2_moe", "grouped_mm")]


@pytest.mark.parametrize(
    ("family", "update", "experts"),
    [*((*pair, "") for pair in PAIRS), *((name, "direct", kind) for name, kind in EXPERTS)],
)
def test_no_matrix_of_a_weights_size_is_made(family: str, update: str, experts: str) -> None:
    """In models whose matrices, each expert's too, have far more elements than the activations of
    a few tokens.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 256 if experts else 128}
    own = {"gemma3": {"head_dim": 16}, "qwen2_moe": {"moe_intermediate_size": 256}}
    sizes |= own.get(family, {})
    model = tiny_models.build(family, **sizes) if experts else two_layers(family, **sizes)
    model.config._experts_implementation = experts or None
    matrices = [x[0] if experts else x for x in model.parameters() if x.dim() == 2 + bool(experts)]
    smallest = min(x.numel() for x in matrices if experts or x.shape in ((64, 128), (128, 64)))
    inputs = {"context_ids": tokens(0, 1, 4), "kept_ids": tokens(1, 1, 2)}
    with torch.no_grad():
        stock, _ = largest_of(lambda: model(torch.cat(list(inputs.values()), 1)))
    assert experts or stock < smallest / 4
    with ContextPatcher(model, update) as patcher:
        computing, patch = largest_of(lambda: patcher.compute(**inputs))
        calls = [lambda: patcher.forward(patch.kept_ids, patch)]
        if not experts:
            calls += [lambda: list(patcher.generate(inputs["context_ids"], max_new_tokens=2))]
        largest = max(computing, *(largest_of(call)[0] for call in calls))
        building, _ = largest_of(lambda: (calls[0](), list(patch.weight_changes(0, 0))))
    assert largest < smallest and largest <= max(2 * stock if experts else 0, smallest / 4)
    assert building >= smallest  # it is noticed


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
        assert loaded.digest.limit == rounding_limit(torch.bfloat16 if under else torch.float32)
        for enabled, made in itertools.product((False, True), (patch, loaded)):
            with bfloat16(enabled=enabled):
                logits = patcher.forward(made.kept_ids, made)
                replayed = patcher.forward(step.patch.kept_ids, step.patch)
            assert torch.equal(logits[patch.kept_mask], patch.logits[patch.kept_mask])
            assert torch.equal(replayed[:, -1], step.logits)


def resident_bytes() -> int:
    """Of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("update", ["stable", "exact"])
def test_two_thousand_cycles_take_no_more_memory(update: str) -> None:
    """Of compute, forward and generate, after a tenth of them has filled the caches."""
    generator = torch.Generator().manual_seed(0)
    sizes: list[int] = []

    def random_ids(columns: int) -> Tensor:
        return torch.randint(3, 90, (2, columns), generator=generator)

    with ContextPatcher(build("llama"), update) as patcher:
        for cycle in range(2000):
            patch = patcher.compute(random_ids(9), random_ids(3))
            patcher.forward(patch.kept_ids, patch)
            for step in patcher.generate(random_ids(7), max_new_tokens=2, eos_token_id=None):
                assert step.patch.layers
            if cycle % 200 == 199:
                gc.collect()
                sizes.append(resident_bytes())
    # an allocator's arenas may still grow by some MB; one kept patch a cycle would be 100 MB
    assert max(sizes[1:]) - sizes[0] < 16e6, [f"{size / 1e6:.0f} MB" for size in sizes]
