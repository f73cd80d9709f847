"""Norms and gated products through our ops: what of a model is one, what is not, and that a step
with them is the step without.
"""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from support.generation import generated_logits, prefilled
from support.numeric import UNIT, noise_limit, normal, seeded
from support.random_models import shallow, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from icl_patch import ContextPatcher, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.generation import traced_step
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
    """Also in fp16, where the largest numbers that are tried overflow."""
    norms, before, gated, last = EXPECTED[family]
    model = tiny_models.build(family, dtype=dtype)
    with torch.no_grad(), ContextPatcher(model, "stable") as patcher:
        modules = found(patcher)
        expected_kinds = count_of(LAYERS * norms + last, LAYERS * before, LAYERS * gated)
        assert Counter(map(kind, modules)) == expected_kinds
        for fused in modules:
            width = 32 if kind(fused) == "gated" else fused.module.weight.shape[0]
            x = 3 * normal(seeded(3), 2, 5, width, dtype=dtype)
            made, expected = fused(x), fused.module(x)
            assert made.dtype == expected.dtype
            assert metrics.linf(made, expected).max() <= ROUNDINGS[dtype] * UNIT[dtype]
        exact = found(patcher, keeps_bits=True)
        assert Counter(map(kind, exact)) == expected_kinds
        with running_in(BATCH_INVARIANT, model):
            for fused in exact:
                width = 32 if kind(fused) == "gated" else fused.module.weight.shape[0]
                x = 3 * normal(seeded(4), 5, 1, width, dtype=dtype)
                assert torch.equal(fused(x), fused.module(x))


class _Counted(TorchDispatchMode):
    """Counts operators that compute something."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        nothing = ("aten::empty", "aten::new_empty", "aten::_unsafe_view")
        self.count += not (function.is_view or function.name().startswith(nothing))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_step_takes_fewer_operators_than_the_models_own(family: str) -> None:
    """Although it computes and applies every layer's patch on the way."""
    model, ids = shallow(family), tokens(0, 1, 9) % tiny_models.VOCABULARY
    cache = DynamicCache(config=model.config)
    run: Any = model
    with torch.no_grad():
        run(ids[:, :-1], **{cache_name(model): cache})
        with _Counted() as own:
            run(ids[:, -1:], **{cache_name(model): cache})
    with ContextPatcher(model, "stable") as patcher:
        state = prefilled(
            patcher, ids, torch.ones_like(ids, dtype=torch.bool), 10, DecodeMode.SHARED_CACHE
        )
        with _Counted() as ours:
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
    monkeypatch.setattr(traced_step, "in_regions", lambda module, blocks, **_: module)
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


class _Doubled(nn.Module):
    """An RMSNorm of twice its scale."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.clone()), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("order", [1, -1], ids=["gate first", "up first"])
def test_which_reader_is_the_gate_shows_in_front_of_weights_of_zero(order: int) -> None:
    """The MLP's output is 0 for both orders; what its last layer reads is not."""

    class Swapped(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (self.gate_proj, self.up_proj)[::order]
            return self.down_proj(self.act_fn(first(x)) * second(x))

    model = shallow("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = Swapped
        nn.init.zeros_(layer.mlp.down_proj.weight)
    with ContextPatcher(model, "stable") as patcher:
        first = patcher.attached_model.blocks[0]
        read: list[torch.Tensor] = []
        first.down.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        mlp = model.model.layers[0].mlp
        x = normal(seeded(3), 5, model.config.hidden_size, dtype=torch.float32)
        [fused] = [each for each in found(patcher) if each.module is mlp]
        read.clear()
        mlp(x)
        fused.run(x)
        assert metrics.linf(read[1], read[0]).max() <= ROUNDINGS[x.dtype] * UNIT[x.dtype]


def test_look_alikes_are_left_alone() -> None:
    model: Any = tiny_models.build("llama")
    model.model.norm = _Doubled(model.model.norm.weight)
    model.model.layers[0].mlp.act_fn = nn.GELU()  # not by tanh
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    handle = model.model.layers[2].input_layernorm.register_forward_hook(lambda *_: None)
    with ContextPatcher(model, "stable") as patcher:
        assert Counter(map(kind, found(patcher))) == count_of(LAYERS - 1, LAYERS, LAYERS - 2)
    handle.remove()


class _Clamped(LlamaMLP):
    """The product of what is clamped to numbers that those of size 1 do not reach."""

    gate, up = 10.0, 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(
            self.act_fn(self.gate_proj(x)).clamp(max=self.gate)
            * self.up_proj(x).clamp(-self.up, self.up)
        )


class _ClampedHigh(_Clamped):
    """Nor those of size 30."""

    gate = up = 130.0


class _ClampedGate(_Clamped):
    """Its product overflows in fp16 where they are of size 1000."""

    up = torch.inf


class _ClampedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.clamp(-50, 50))


class _LargeEps(LlamaRMSNorm):
    """Where eps matters another norm, and in half precision nowhere else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        size = x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return self.weight * (x / size).to(hidden_states.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_another_function_of_large_and_of_small_numbers_is_left_alone(
    dtype: torch.dtype,
) -> None:
    model: Any = tiny_models.build("llama", dtype=dtype)
    layers = model.model.layers
    for layer, form in zip(layers, (_Clamped, _ClampedHigh, _ClampedGate), strict=False):
        layer.mlp.__class__ = form
    layers[1].input_layernorm.__class__ = _ClampedNorm
    layers[3].input_layernorm.__class__ = _LargeEps
    layers[2].mlp.up_proj.weight.data.mul_(30)
    # in fp16 its product overflows even where numbers are of size 30
    layers[3].mlp.up_proj.weight.data.mul_(100)
    with ContextPatcher(model, "stable") as patcher:
        assert Counter(map(kind, found(patcher))) == count_of(LAYERS - 1, LAYERS, LAYERS - 3)


@pytest.mark.parametrize("part", ["activation", "weight of a norm"])
def test_a_part_that_is_replaced_later(part: str) -> None:
    model = tiny_models.build("llama")
    ids = tokens(0, 2, 6) % tiny_models.VOCABULARY
    settings: dict = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    with ContextPatcher(model, "stable") as patcher:
        list(patcher.generate(ids, **settings))
        for layer in model.model.layers:
            if part == "activation":
                layer.mlp.act_fn = torch.nn.ReLU()
            else:
                norm = layer.post_attention_layernorm
                norm.weight = nn.Parameter(1.5 * norm.weight.detach())
        expected, limit = generated_logits(model, ids, **settings), noise_limit(model)
        for step, logits in zip(patcher.generate(ids, **settings), expected, strict=True):
            assert metrics.linf(step.logits, logits).max() <= limit
