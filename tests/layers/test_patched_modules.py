"""Patched modules by themselves: a drop-in while off, ``W + u vᵀ`` or ``m'`` while patched, and
never a stored output.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.numeric import UNIT, within_roundings
from support.quantised import Int8Linear
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrize, prune
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from icl_patch import PatchedLinear, PatchedRMSNorm, metrics
from icl_patch.layers.patched_module import PatchedModule

K, N = 12, 7


def conv1d() -> Conv1D:
    layer = Conv1D(N, K)
    nn.init.normal_(layer.bias)
    return layer


BASES = {
    "linear": lambda: nn.Linear(K, N),
    "without bias": lambda: nn.Linear(K, N, bias=False),
    "conv1d": conv1d,
    "int8": lambda: Int8Linear(nn.Linear(K, N)),
}


def matrix(base: nn.Module) -> tuple[Tensor, Tensor | float]:
    """W (N, K) and the bias of one of the bases, in fp64."""
    if isinstance(base, Int8Linear):
        return (base.packed * base.row_scale).double(), 0.0
    weight = base.weight.detach().double()
    bias = 0.0 if base.bias is None else base.bias.detach().double()
    return (weight.T if isinstance(base, Conv1D) else weight), bias


def patched_sum(z: Tensor, weight: Tensor, bias: Tensor | float, u: Tensor, v: Tensor) -> Tensor:
    """``(W + Σ_r u_r v_rᵀ) z + b`` in fp64, with the matrices built: z (..., K), u (..., R, N), v
    (..., R, K).
    """
    matrices = weight + u.double().mT @ v.double()
    return (matrices @ z.double().unsqueeze(-1)).squeeze(-1) + bias


def is_patched_sum(got: Tensor, *parts: Tensor | float) -> bool:
    """Whether ``got`` is that sum, rounded at most once for each of its K + R + 1 terms and each of
    the K products of v.
    """
    size = patched_sum(*(abs(part) for part in parts))
    return within_roundings(got, patched_sum(*parts), 2 * K + 4, size)


def patched_norm() -> PatchedRMSNorm:
    base = LlamaRMSNorm(K, eps=1e-3)
    nn.init.normal_(base.weight, 0, 0.7)
    return PatchedRMSNorm(base, scale_offset=0.0, cast_first=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("rows", [(5,), (2, 4), (1,), (1, 3)])
def test_a_patch_per_row(name: str, rows: tuple[int, ...]) -> None:
    """(1, T, N) is one patch of rank 1 for each token, or one of rank T for all if so said."""
    base, z = BASES[name](), torch.randn(*rows, K)
    u, v = torch.randn(*rows, N), torch.randn(*rows, K)
    layer = PatchedLinear(base)
    layer.set_patch(u, v)
    assert is_patched_sum(layer(z), z, *matrix(base), u.unsqueeze(-2), v.unsqueeze(-2))
    if rows != (1,):
        other = v.roll(1, -2).unsqueeze(-2)
        assert not is_patched_sum(layer(z), z, *matrix(base), u.unsqueeze(-2), other)
    if rows == (1, 3):
        assert not is_patched_sum(layer(z), z, *matrix(base), u[0], v[0])
        layer.set_patch(u, v, shared=True)
        for part in (z, z[0, :1], z[:, :2]):
            assert is_patched_sum(layer(part), part, *matrix(base), u[0], v[0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_map_of_no_inputs_is_its_bias() -> None:
    base = nn.Linear(0, N)
    layer = PatchedLinear(base)
    for shape in ((2, 3, 0), (3, 0), (0,), (0, 2, 0)):
        layer.set_patch(torch.randn(1, 1, N), torch.randn(1, 1, 0), shared=True)
        assert torch.equal(layer(torch.empty(shape)), base.bias.expand(*shape[:-1], N))
        layer.set_bias_change(torch.ones(N))
        assert torch.equal(layer(torch.empty(shape)), base.bias.expand(*shape[:-1], N) + 1)


def test_the_base_follows_in_mode_and_dtype_and_the_factors_to_another_device() -> None:
    layer = PatchedLinear(nn.Linear(K, N))
    for mode in (False, True):
        assert layer.train(mode).base_layer.training == mode
    layer.set_patch(torch.randn(3, N), torch.randn(3, K, dtype=torch.float64))
    layer.to(torch.bfloat16)
    dtypes = [x.dtype for x in (layer.weight, layer.u, layer.v)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float64]
    layer.to("meta")
    assert layer.weight.device == layer.u.device == layer.v.device == torch.device("meta")
    with pytest.raises(ValueError, match="without a patch to leave the meta device, got u there"):
        layer.to_empty(device="cpu")
    assert layer.weight.is_meta
    layer.clear_patch()
    assert layer.to_empty(device="cpu").weight.is_cpu
    norm = patched_norm()
    norm.set_patch(torch.rand(2, K))
    norm.to("meta")
    assert norm(torch.empty(2, K, device="meta")).shape == (2, K)


class OwnConv1D(Conv1D):
    """As it is, under another name."""


class Doubled(nn.Linear):
    """Multiplies its output."""

    def forward(self, z: Tensor) -> Tensor:
        return 2 * super().forward(z)


class Kept(nn.Linear):
    """Computes with a copy of its weight, which does not notice a change."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.copy = self.weight.detach().clone()

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.copy, self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D, FalconLinear, OwnConv1D])
def test_merged_weights_do_what_the_patch_does(kind: type, dtype: torch.dtype) -> None:
    transposed = issubclass(kind, Conv1D)
    base = (kind(N, K) if transposed else kind(K, N)).to(dtype)
    layer, z = PatchedLinear(base), torch.randn(5, K).to(dtype)
    u, v = torch.randn(1, 3, N), torch.randn(1, 3, K)
    layer.set_patch(u, v, shared=True)
    merged = layer.merge()
    change = u[0].double().T @ v[0].double()
    expected = base.weight.double() + (change.T if transposed else change)
    assert type(merged) is kind
    assert torch.equal(merged.weight, expected.to(dtype))
    assert torch.equal(merged.bias, base.bias)
    assert metrics.linf(merged(z), layer(z)).max() <= 8 * torch.finfo(dtype).eps
    assert not torch.equal(merged.weight, base.weight)


@pytest.mark.parametrize("name", BASES)
def test_factors_in_another_order_than_the_input(name: str) -> None:
    """(T, B, ·) has as many elements as (B, T, ·), and is not it."""
    layer, z = PatchedLinear(BASES[name]()), torch.randn(2, 3, K)
    layer.set_patch(torch.randn(3, 2, N), torch.randn(3, 2, K))
    message = r"expected u and v for the 6 rows of this call, \(2, 3, '·'\) or flat \(6, ·\), or .*"
    with pytest.raises(ValueError, match=rf"{message}, got \(3, 2, 7\)\Z"):
        layer(z)
    for shape in ((3, 2, N), (N, 6), (1,)):
        layer.set_bias_change(torch.randn(shape))
        message = r"expected bias_change for the 6 rows of this call, \(2, 3, '·'\) .* \(7,\), got"
        with pytest.raises(ValueError, match=message):
            layer(z)


def test_a_patch_of_a_prompts_rows_does_not_last_to_the_next_token() -> None:
    """Nor one of a token's row back; the cures work in both."""
    layer, norm = PatchedLinear(nn.Linear(K, N)), patched_norm()
    prompt, token = torch.randn(1, 5, K), torch.randn(1, 1, K)
    u, v, scale = torch.randn(1, 5, N), torch.randn(1, 5, K), torch.rand(1, 5, K)
    for call, other, one in ((prompt, token, slice(5)), (token, prompt, slice(1))):
        refused = pytest.raises(ValueError, match=r"\(prefill\) and each token .*before each call")
        layer.set_patch(u[:, one], v[:, one])
        norm.set_patch(scale[:, one])
        layer(call), norm(call)
        for module in (layer, norm):
            with refused:
                module(other)
        layer.set_bias_change(u[:, one])
        layer(call)
        with refused:
            layer(other)
    layer.set_patch(u[:, :1], v[:, :1], shared=True)
    for z in (prompt, token):
        plain = layer.base_layer(z)
        expected = plain + (z * v[:, :1]).sum(-1, keepdim=True) * u[:, :1]
        torch.testing.assert_close(layer(z), expected)


@pytest.mark.parametrize("patched", [False, True])
def test_the_input_under_its_own_name(patched: bool) -> None:
    linear, conv = PatchedLinear(nn.Linear(K, N)), PatchedLinear(Conv1D(N, K))
    norm = patched_norm()
    z = torch.randn(2, 3, K)
    if patched:
        for layer in (linear, conv):
            layer.set_patch(torch.randn(1, 1, N), torch.randn(1, 1, K), shared=True)
        norm.set_patch(torch.rand(K))
        with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
            linear(z, scale=2.0)
    assert torch.equal(linear(input=z), linear(z))
    assert torch.equal(conv(x=z), conv(z))
    assert torch.equal(norm(hidden_states=z), norm(z))


class Minus(nn.Module):
    """Of two inputs, and with another output if ``both``."""

    def forward(self, x: Tensor, y: Tensor, both: bool = False) -> Any:
        return (x - y, y) if both else x - y


class PatchedMinus(PatchedModule):
    _INPUTS = ("x", "y")

    def _replay(self, x: Tensor, y: Tensor) -> Tensor:
        return 3 * (x - y)


def test_inputs_by_name_in_any_order_and_no_others() -> None:
    x, y, layer = torch.ones(2), torch.zeros(2), PatchedMinus(Minus())
    for scale in (1, 3):
        for out in (layer(x, y), layer(x, y=y), layer(x=x, y=y), layer(y=y, x=x)):
            assert torch.equal(out, scale * x)
        layer.replay()
    with pytest.raises(TypeError, match=r"a Minus that is called with x, y alone .*, got 3 inputs"):
        layer(y=y, x=x, both=True)
    layer = PatchedLinear(Minus())
    layer.set_patch(x[None], x[None])
    with pytest.raises(TypeError, match=r"a Minus that is called with z alone .*, got 2 inputs"):
        layer(x, y)


def test_a_base_that_returns_more_than_a_tensor() -> None:
    layer = PatchedLinear(nn.LSTM(K, N))
    z = torch.randn(3, K)
    assert torch.equal(layer(z)[0], layer.base_layer(z)[0])
    layer.set_patch(torch.randn(3, N), torch.randn(3, K))
    for _ in range(2):
        with pytest.raises(TypeError, match="returns one tensor to patch, got LSTM, which returns"):
            layer(z)
        layer.set_bias_change(torch.ones(N))


def test_parents_that_read_a_weight_themselves() -> None:
    """One that never calls its module is refused; another calls it without its fast path."""
    parent = nn.TransformerEncoderLayer(8, 2, N, dropout=0, batch_first=True).eval()
    with pytest.raises(TypeError, match=r"got the out_proj of an nn\.MultiheadAttention"):
        PatchedLinear(parent.self_attn.out_proj)
    x = torch.randn(2, 3, 8)
    parent.linear1 = layer = PatchedLinear(parent.linear1)
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            plain = parent(x)
            layer.set_patch(torch.randn(1, 1, N), torch.randn(1, 1, 8), shared=True)
            patched, parent.linear1 = parent(x), layer.merge()
            torch.testing.assert_close(patched, parent(x))
            assert not torch.allclose(patched, plain)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_what_cannot_be_merged() -> None:
    layer = PatchedLinear(nn.Linear(K, N))
    layer.set_patch(torch.randn(3, N), torch.randn(3, K))
    with pytest.raises(ValueError, match="that all rows share"):
        layer.merge()
    hooked = nn.Linear(K, N)
    hooked.register_forward_hook(lambda _module, _args, out: 2 * out)
    with pytest.raises(TypeError, match="Linear without hooks and with its own forward"):
        PatchedLinear(hooked).merge()
    for kind in (Doubled, Kept):
        with pytest.raises(TypeError, match=rf"got \S+{kind.__name__}, which computes"):
            PatchedLinear(kind(K, N)).merge()
    for base in (nn.Linear(K, N).to(torch.float8_e4m3fn), Int8Linear(nn.Linear(K, N))):
        with pytest.raises(TypeError, match="load weights without quantisation, first"):
            PatchedLinear(base).merge()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("conv1d", "shared"), *(("linear", kind) for kind in ("off", "shared", "row", "bias"))],
)
def test_compiles_without_a_graph_break(name: str, kind: str) -> None:
    base = nn.Linear(K, N) if name == "linear" else Conv1D(N, K)
    layer, z = PatchedLinear(base), torch.randn(3, K)
    if kind == "bias":
        layer.set_bias_change(torch.randn(N))
    elif kind != "off":
        rows = (1, 2) if kind == "shared" else (3,)
        layer.set_patch(torch.randn(*rows, N), torch.randn(*rows, K), shared=kind == "shared")
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert metrics.linf(compiled(z), layer(z)).max() <= 2 * K * UNIT[torch.float32]


@pytest.mark.parametrize("patched", [False, True])
def test_hooks_and_another_forward_of_the_base_still_run(patched: bool) -> None:
    """Offloading libraries replace ``forward`` on the instance."""
    base, z = nn.Linear(K, N), torch.randn(3, K, requires_grad=True)
    plain = base(z)
    seen = []
    base.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    base.register_forward_hook(lambda _module, _args, out: 2 * out)
    base.register_full_backward_hook(lambda _module, _given, made: seen.append(made[0]))
    layer = PatchedLinear(base)
    if patched:
        layer.set_patch(torch.zeros(1, 1, N), torch.zeros(1, 1, K), shared=True)
    out = layer(z)
    assert torch.equal(out, 2 * plain)
    assert len(seen) == 1
    out.sum().backward()
    assert torch.equal(seen[1], torch.ones(3, N))
    base.forward = lambda z: 2 * F.linear(z, base.weight, base.bias)
    assert torch.equal(layer(z), 4 * plain)


@pytest.mark.parametrize("patched", [False, True])
def test_hooks_of_all_modules_run_once(patched: bool) -> None:
    """Also beside hooks of the patched module's own, which see what they have made."""
    base, z, seen = nn.Linear(K, N), torch.randn(3, K), []
    layer = PatchedLinear(base)
    if patched:
        layer.set_patch(torch.zeros(1, 1, N), torch.zeros(1, 1, K), shared=True)
    with ExitStack() as hooks:

        def register(where: Any, hook: Callable[..., Any]) -> None:
            hooks.enter_context(where(hook))

        register(register_module_full_backward_hook, lambda m, *_: seen.append(type(m)))
        register(register_module_forward_hook, lambda _module, _args, out: 2 * out)
        expected = base(z)
        assert torch.equal(layer(z), expected)
        register(layer.register_forward_hook, lambda _module, _args, out: seen.append(out))
        out = layer(z)
        assert torch.equal(out, expected) and torch.equal(seen.pop(), expected)
        register(layer.register_full_backward_hook, lambda m, *_: seen.append(type(m)))
        layer(z.requires_grad_()).sum().backward()
        assert seen[1:] == [nn.Linear, PatchedLinear]
    if not patched:
        layer.register_forward_hook(lambda _module, _args, out: 3 * out)
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(z), 3 * base(z))


class OwnNorm(nn.Module):
    """Computes in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.weight)


NORMS = {  # with their offset, and whether they round before they scale
    "llama": (LlamaRMSNorm, 0.0, True),
    "gemma": (Gemma3RMSNorm, 1.0, False),
    "torch": (partial(nn.RMSNorm, eps=1e-3), 0.0, False),
    "own": (OwnNorm, 1.0, False),
}


def form_of(name: str) -> dict[str, Any]:
    _, offset, cast_first = NORMS[name]
    return {"scale_offset": offset, "cast_first": cast_first}


@pytest.mark.parametrize("name", NORMS)
def test_a_patched_norm_is_the_norm_with_another_scale(name: str) -> None:
    """In the arithmetic of its class, which in fp64 is fp32 or fp64, and in its output's dtype."""
    dtypes = [(dtype, dtype) for dtype in UNIT]
    dtypes += [(torch.bfloat16, torch.float32)] if name in ("llama", "gemma") else []
    for dtype, of_weight in dtypes:
        base = NORMS[name][0](K).to(of_weight)
        nn.init.normal_(base.weight)
        layer, x = PatchedRMSNorm(base, **form_of(name)), 3 * torch.randn(5, K).to(dtype)
        layer.set_patch(layer.scale.clone())
        y, expected = layer(x), base(x)
        assert y.dtype == expected.dtype
        in_fp32 = dtype == torch.float64 and name in ("llama", "gemma")
        limit = 0 if in_fp32 else 8 * UNIT[dtype] + 1e-300
        assert (y - expected).abs().max() <= limit * expected.abs().max()


def test_what_is_no_rms_norm_of_the_form() -> None:
    for name in NORMS:
        base = NORMS[name][0](K)
        for given in (base, base.bfloat16(), base.to("meta")):
            PatchedRMSNorm(given, **form_of(name))
        wrong = form_of(name) | {"scale_offset": 1 - form_of(name)["scale_offset"]}
        with pytest.raises(TypeError, match=r"of [01] \+ weight .*, which computes something else"):
            PatchedRMSNorm(base, **wrong)
    for other, message in (
        (nn.LayerNorm(K), r"with {'weight': \(12,\), 'bias': \(12,\)}"),
        (nn.LayerNorm(K, bias=False), "which computes something else"),
        (nn.LayerNorm((3, K), bias=False), r"with {'weight': \(3, 12\)}"),
    ):
        with pytest.raises(
            TypeError, match=rf"scale of 0 \+ weight .*, got \S+LayerNorm,? {message}"
        ):
            PatchedRMSNorm(other, **form_of("llama"))


def test_hooks_of_a_norm_run_with_a_patch() -> None:
    """Its own and those of all modules, in every thread; in one place of the model's calls."""
    layer, x, seen = patched_norm(), torch.randn(3, K, requires_grad=True), []
    base = layer.base_layer
    layer.set_patch(torch.rand(K))
    expected = layer(x)
    with register_module_forward_hook(lambda module, *_: seen.append(module)):
        assert torch.equal(layer(x), expected)
    assert seen == [base]
    base.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    base.register_forward_hook(lambda _module, _args, out: 3 * out)
    base.register_full_backward_hook(lambda module, *_: seen.append(module))
    out = layer(x)
    assert metrics.linf(out, 3 * layer.apply_scale(2 * x, layer.new_scale)).max() == 0
    out.sum().backward()
    assert seen == [base, base]
    assert "forward" not in vars(base)
    base.forward = lambda x: x
    with pytest.raises(ValueError, match="LlamaRMSNorm with its own forward to patch, got another"):
        layer(x)
    assert vars(base)["forward"](3) == 3


def test_factors_carry_gradients() -> None:
    layer, z = PatchedLinear(nn.Linear(K, N)), torch.randn(3, K)
    u, v = (torch.randn(1, 2, size, requires_grad=True) for size in (N, K))
    layer.set_patch(u, v, shared=True)
    layer(z).sum().backward()
    torch.testing.assert_close(u.grad[0], (v @ z.sum(0))[0, :, None].expand(2, N))
    torch.testing.assert_close(v.grad[0], torch.outer(u.sum(-1)[0], z.sum(0)))


# -- errors


@pytest.mark.parametrize(
    ("u", "v", "message"),
    [
        ((N,), (K,), r"expected u \(M, N\) and v \(M, K\) for M rows.*\(7,\), \(12,\)"),
        ((5, N), (4, K), r"same leading dimensions, got \(5, 7\), \(4, 12\)"),
        ((5, N + 1), (5, K), r"expected u .*N = 7.*\(5, 8\)"),
        ((5, N), (5, K - 1), r"expected v .*K = 12.*\(5, 11\)"),
        ((4, N), (4, K), r"or flat \(5, ·\), or one for all, .* got \(4, 7\)"),
    ],
)
@pytest.mark.parametrize("name", BASES)
def test_factors_that_do_not_fit(
    name: str, u: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    layer = PatchedLinear(BASES[name]())
    with pytest.raises(ValueError, match=message):
        layer.set_patch(torch.zeros(u), torch.zeros(v))
        layer(torch.zeros(5, K))
    with pytest.raises(ValueError, match=r"expected u \(1, R, N\) and v \(1, R, K\)"):
        layer.set_patch(torch.zeros(3, N), torch.zeros(3, K), shared=True)


def test_scales_and_modules_that_do_not_fit() -> None:
    layer = patched_norm()
    for shape in ((K + 1,), (4, 1, K), (3, K), (3, 2, K)):
        layer.set_patch(torch.ones(shape))
        message = r"expected new_scale for the 6 rows of this call, .* for all, \(12,\), got"
        with pytest.raises(ValueError, match=message):
            layer(torch.ones(2, 3, K))
    with pytest.raises(TypeError, match="not patched yet, got PatchedLinear"):
        PatchedLinear(PatchedLinear(nn.Linear(K, N)))
    for base in (nn.Linear(K, N), nn.Identity()):
        with pytest.raises(TypeError, match="expected an RMSNorm with a weight and an eps"):
            PatchedRMSNorm(base, scale_offset=0.0, cast_first=True)


# -- the bias


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (1, K)])
def test_a_change_of_the_bias(name: str, shape: tuple[int, ...]) -> None:
    base, z = BASES[name](), torch.randn(shape)
    layer, plain = PatchedLinear(base), base(z)
    weight, bias = matrix(base)
    for change in (torch.randn(N), torch.randn(*shape[:-1], N)):
        layer.set_bias_change(change)
        nothing = torch.zeros(1, N), torch.zeros(1, K)
        assert is_patched_sum(layer(z), z, weight, bias + change.double(), *nothing)
        assert layer(z).dtype == plain.dtype
    flat = torch.randn(len(z.flatten(0, -2)), N)
    layer.set_bias_change(flat.double())
    layer.out_dtype = torch.float64
    assert torch.equal(layer(z), plain.double() + flat.double().reshape(*shape[:-1], N))
    layer.clear_patch()
    assert layer.bias_change is None
    assert torch.equal(layer(z), plain)
    layer.set_patch(torch.zeros(1, 1, N), torch.zeros(1, 1, K), shared=True)
    layer.set_bias_change(torch.zeros(N))
    assert layer.u is None


@pytest.mark.parametrize("tool", ["prune", "parametrize"])
def test_tools_that_put_something_in_a_weights_place(tool: str) -> None:
    """They work on the base module. On the patched one they take the weight from the base: the next
    call says so, patched or not.
    """

    def halve(module: nn.Module) -> None:
        if tool == "prune":
            prune.random_unstructured(module, "weight", 0.5)
        else:
            parametrize.register_parametrization(module, "weight", nn.LeakyReLU(0.5))

    z, base = torch.randn(3, K), nn.Linear(K, N)
    layer = PatchedLinear(base)
    before = layer(z)
    halve(base)
    assert torch.equal(layer(z), base(z)) and not torch.equal(layer(z), before)
    for patched in (False, True):
        layer = PatchedLinear(nn.Linear(K, N))
        if patched:
            layer.set_patch(torch.randn(3, N), torch.randn(3, K))
        halve(layer)
        with pytest.raises(ValueError, match="expected a Linear with its weight, got one without"):
            layer(z)
