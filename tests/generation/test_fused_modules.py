"""Norms, gated products and rotary positions through our ops: what of a model is one, what is not,
and that a step with them is the step without.
"""

import itertools
from collections import Counter
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from support.generation import generated_logits, prefilled
from support.inversion import needs_native
from support.numeric import UNIT, noise_limit, normal, seeded
from support.random_models import ragged, shallow, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from icl_patch import ContextPatcher, metrics, ops
from icl_patch.evaluation import tiny_models
from icl_patch.generation import one_pass_plan, recorded_step
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decoding import decode_one_token
from icl_patch.generation.fused_modules import NormBefore, fused_modules
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, running_in
from icl_patch.models.forward import cache_name
from icl_patch.models.forward_override import FusedModule

LAYERS = 4
# Of a block: norms, those beneath patched ones among them, norms that tell the recorder, gated
# products; and the model's last norm.
EXPECTED = {"llama": (1, 1, 1, 1), "qwen3": (3, 1, 1, 1), "gemma3": (5, 1, 1, 1)}
EXPECTED |= {"phi3": (1, 1, 1, 1), "olmo2": (4, 0, 1, 1), "gpt2": (0, 0, 0, 0)}
EXPECTED |= {"cohere2": (0, 0, 1, 0), "mixtral": (1, 1, 0, 1)}


def kind(fused: FusedModule) -> str:
    if isinstance(fused, NormBefore):
        return "norm before"
    return "norm" if hasattr(fused.module, "weight") else "gated"


def found(patcher: ContextPatcher, keeps_bits: bool = False) -> list[FusedModule]:
    return fused_modules(patcher.model, patcher.attached_model.blocks, keeps_bits=keeps_bits)


def count_of(norms: int, before: int, gated: int) -> Counter:
    return Counter({"norm": norms, "norm before": before, "gated": gated})


# Sums of 32 to 96 products and squares in another order; in half precision two roundings that go
# the other way.
ROUNDINGS = {torch.float32: 96, torch.bfloat16: 4, torch.float16: 4}
CASES = [*itertools.product(EXPECTED, [torch.float32])]
CASES += itertools.product(("qwen3", "gemma3", "phi3"), (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_what_is_found_does_what_the_module_does(family: str, dtype: torch.dtype) -> None:
    """Also in fp16, where the largest numbers that are tried overflow; to the bit in an exact
    step.
    """
    norms, before, gated, last = EXPECTED[family]
    model = tiny_models.build(family, dtype=dtype)
    with torch.no_grad(), ContextPatcher(model, "stable") as patcher:
        for exact in (False, True):
            modules = found(patcher, keeps_bits=exact)
            expected_kinds = count_of(LAYERS * norms + last, LAYERS * before, LAYERS * gated)
            assert Counter(map(kind, modules)) == expected_kinds
            for fused in modules:
                width = 32 if kind(fused) == "gated" else fused.module.weight.shape[0]
                x = 3 * normal(seeded(3), 10, 1, width, dtype=dtype)
                with running_in(BATCH_INVARIANT, model) if exact else nullcontext():
                    made, expected = fused(x), fused.module(x)
                assert made.dtype == expected.dtype
                limit = 0 if exact else ROUNDINGS[dtype] * UNIT[dtype]
                assert metrics.linf(made, expected).max() <= limit


class Counting(TorchDispatchMode):
    """Counts operators that compute something."""

    count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        nothing = ("aten::empty", "aten::new_empty", "aten::_unsafe_view")
        self.count += not (function.is_view or function.name().startswith(nothing))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@torch.no_grad()
def test_a_step_takes_fewer_operators_than_the_models_own(family: str) -> None:
    """Although it computes and applies every layer's patch on the way."""
    model, ids = shallow(family), tokens(0, 1, 9) % tiny_models.VOCABULARY
    cache, run = DynamicCache(config=model.config), cast(Any, model)
    run(ids[:, :-1], **{cache_name(model): cache})
    with Counting() as own:
        run(ids[:, -1:], **{cache_name(model): cache})
    with ContextPatcher(model, "stable") as patcher:
        mask = torch.ones_like(ids, dtype=torch.bool)
        state = prefilled(patcher, ids, mask, 10, DecodeMode.SHARED_CACHE)
        with Counting() as ours:
            decode_one_token(state, ids[:, -1])
    assert 0 < ours.count < own.count


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_a_context_nothing_changes(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both streams have the same bits where they see the same: from the smallest delta a stable
    update makes one of finite size.
    """
    monkeypatch.setattr(recorded_step, "in_regions", lambda function, *_, **_options: function)
    ids = tokens(0, 2, 1) % tiny_models.VOCABULARY
    if compiled:  # tracing takes seconds, and the dtype changes nothing of a graph but its dtypes
        cases = {torch.float32: ("two_stream",), torch.bfloat16: ("shared_cache",)}
    else:
        cases = {torch.float32: ("two_stream", "shared_cache")}
        cases |= {torch.bfloat16: ("shared_cache",), torch.float64: ("two_stream",)}
    for dtype, modes in cases.items():
        with ContextPatcher(shallow(family, dtype=dtype), "stable") as patcher:
            for mode in modes:
                step = next(patcher.generate(ids, max_new_tokens=1, mode=mode, compile=compiled))
                for layer in step.patch.layers:
                    for name, factor in layer.items():
                        if name.endswith(".u"):
                            assert not factor.any()
                        if name.endswith(".new_scale"):
                            assert (factor == layer[name.replace("new_scale", "scale")]).all()


@pytest.mark.parametrize("order", [1, -1], ids=["gate first", "up first"])
def test_which_reader_is_the_gate_shows_in_front_of_weights_of_zero(order: int) -> None:
    """The MLP's output is 0 for both orders; what its last layer reads is not."""

    class Swapped(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.gate_proj, self.up_proj)[::order]
            return self.down_proj(self.act_fn(first(x)) * second(x))

    model = shallow("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = Swapped
        nn.init.zeros_(layer.mlp.down_proj.weight)
    with ContextPatcher(model, "stable") as patcher:
        first = patcher.attached_model.blocks[0]
        read: list[Tensor] = []
        first.down.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        mlp = model.model.layers[0].mlp
        x = normal(seeded(3), 5, model.config.hidden_size, dtype=torch.float32)
        [fused] = [each for each in found(patcher) if each.module is mlp]
        read.clear()
        mlp(x)
        fused.run(x)
        assert metrics.linf(read[1], read[0]).max() <= ROUNDINGS[x.dtype] * UNIT[x.dtype]


class _Clamped(LlamaMLP):
    """The product of what is clamped to numbers that smaller ones do not reach."""

    limits: tuple[float, float]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.limits
        gated = self.act_fn(self.gate_proj(x)).clamp(max=gate)
        return self.down_proj(gated * self.up_proj(x).clamp(-up, up))


class _ClampedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-50, 50))


class _LargeEps(LlamaRMSNorm):
    """Where eps matters another norm, and in half precision nowhere else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        size = x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return self.weight * (x / size).to(hidden_states.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_another_function_of_large_and_of_small_numbers_is_left_alone(
    dtype: torch.dtype,
) -> None:
    model: Any = tiny_models.build("llama", dtype=dtype)
    layers = model.model.layers
    # beyond numbers of size 1, and of size 30; the last product overflows in fp16 at 1000
    limits = (10.0, 10.0), (130.0, 130.0), (10.0, torch.inf)
    for layer, layer.mlp.limits in zip(layers, limits, strict=False):
        layer.mlp.__class__ = _Clamped
    layers[1].input_layernorm.__class__ = _ClampedNorm
    layers[3].input_layernorm.__class__ = _LargeEps
    layers[2].mlp.up_proj.weight.data.mul_(30)
    # in fp16 its product overflows even where numbers are of size 30
    layers[3].mlp.up_proj.weight.data.mul_(100)
    with ContextPatcher(model, "stable") as patcher:
        assert Counter(map(kind, found(patcher))) == count_of(LAYERS - 1, LAYERS, LAYERS - 3)


class _Doubled(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


def test_look_alikes_are_left_alone() -> None:
    """And what has a hook or another forward."""
    model: Any = tiny_models.build("llama")
    model.model.norm.__class__ = _Doubled
    model.model.layers[0].mlp.act_fn = nn.GELU()  # not by tanh
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    handle = model.model.layers[2].input_layernorm.register_forward_hook(lambda *_: None)
    with ContextPatcher(model, "stable") as patcher:
        assert Counter(map(kind, found(patcher))) == count_of(LAYERS - 1, LAYERS, LAYERS - 2)
    handle.remove()


@pytest.mark.parametrize("part", ["activation", "weight of a norm", "rotary positions"])
def test_a_part_that_is_replaced_later(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function too, as kernels of other packages replace it for all models of a source file."""
    model = tiny_models.build("llama")
    ids = tokens(0, 2, 6) % tiny_models.VOCABULARY
    settings: dict = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    rotate = modeling_llama.apply_rotary_pos_emb

    def half_as_far(query: Tensor, key: Tensor, *of: Tensor) -> Any:
        angle = torch.atan2(of[1], of[0]) / 2
        return rotate(query, key, angle.cos(), angle.sin())

    with ContextPatcher(model, "stable") as patcher:
        before = list(patcher.generate(ids, **settings))
        if part == "rotary positions":
            monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", half_as_far)
        for layer in model.model.layers:
            if part == "activation":
                layer.mlp.act_fn = torch.nn.ReLU()
            elif part == "weight of a norm":
                norm = layer.post_attention_layernorm
                norm.weight = nn.Parameter(1.5 * norm.weight.detach())
        expected, limit = generated_logits(model, ids, **settings), noise_limit(model)
        assert metrics.linf(before[0].logits, expected[0]).max() > limit
        for step, logits in zip(patcher.generate(ids, **settings), expected, strict=True):
            assert metrics.linf(step.logits, logits).max() <= limit
    if part == "rotary positions":
        assert modeling_llama.apply_rotary_pos_emb is half_as_far


IDS = tokens(3, 3, 11) % 32
ARGUMENTS: dict[str, Any] = {"context_mask": ragged(3, 11, side="left"), "max_new_tokens": 3}
ARGUMENTS |= {"do_sample": False, "eos_token_id": None}
ROTATED = ("llama", "gemma3", "qwen3_moe", "phi3", "phi")
# of part of a head, of pairs of neighbours, and none
NOT_ROTATED = ("gpt_neox", "cohere", "gpt2")


@needs_native
@pytest.mark.parametrize(
    ("family", "dtype"),
    list(zip(ROTATED + NOT_ROTATED, 4 * [torch.float32, torch.bfloat16], strict=True)),
    ids=str,
)
def test_rotary_positions_in_one_operation(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has the bits of a step without."""
    calls: list[int] = []  # the rows of each call of our op

    def counted(query: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(query))
        return own(query, *others)

    own = ops.rotary_embedding
    monkeypatch.setattr(ops, "rotary_embedding", counted)
    with ContextPatcher(shallow(family, dtype=dtype), "stable") as patcher:
        made = list(patcher.generate(IDS, **ARGUMENTS))
        layers = len(patcher.attached_model.blocks)
        used = calls.count(len(IDS) * (2 if made[0].mode == "two_stream" else 1))
        assert (used >= 3 * layers) == (family in ROTATED)
        monkeypatch.setattr(one_pass_plan, "rotary_overrides", lambda _: set())
        patcher.plans.clear()
        calls.clear()
        for step, other in zip(made, patcher.generate(IDS, **ARGUMENTS), strict=True):
            assert torch.equal(step.logits, other.logits)
        assert not calls
