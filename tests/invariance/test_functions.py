"""The replacements: near the function in fp64, and the same bits wherever a row stands."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.numeric import normal, seeded
from torch import Tensor, nn

from icl_patch.invariance.arithmetic import InvariantModules
from icl_patch.invariance.functions import ROW_FUNCTIONS, attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, WIDTHS = 64, (1, 7, 33, 255, 709)
PARTS = [slice(0, 2), slice(1, 8), slice(47, 64), slice(3, 36), slice(0, 64)]
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": torch.sigmoid,
    "method": Tensor.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "mish": F.mish,
    "rsqrt": torch.rsqrt,
}
OPTIONS = {
    "gelu_tanh": (F.gelu, {"approximate": "tanh"}),
    "softplus_steep": (F.softplus, {"beta": 3.0, "threshold": 4.0}),
    **{name: (function, {}) for name, function in ACTIVATIONS.items()},
}


def rows_of(width: int, dtype: torch.dtype, *, positive: bool = False) -> Tensor:
    x = 3 * torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width))
    return (x.abs() + 0.1 if positive else x).to(dtype)


def differing(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """In how many parts of the rows a row has other bits than alone."""
    alone = torch.cat([function(row) for row in x.split(1)])
    return sum(not torch.equal(function(x[part]), alone[part]) for part in PARTS)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_activation_gives_a_row_the_same_bits_everywhere(name: str, dtype: torch.dtype) -> None:
    """And is rounded once. In fp64 too, which no kernel of ours takes."""
    own, options = OPTIONS[name]
    for width in WIDTHS:
        x = rows_of(width, dtype, positive=name == "rsqrt")
        assert differing(lambda part: ROW_FUNCTIONS[own](part, **options), x) == 0
    out, expected = ROW_FUNCTIONS[own](x, **options), own(x.double(), **options)
    assert out.dtype == dtype
    # fp32's own operations take up to four roundings of the larger of input and output
    size = torch.maximum(expected.abs(), x.double().abs()) * 4 * torch.finfo(torch.float32).eps
    half = expected.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
    assert ((out.double() - expected).abs() <= size + half).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_give_a_row_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for k, n in ((1, 3), (33, 17), (255, 96), (709, 61)):
        x = rows_of(k, dtype)
        weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype)
        products = {
            "linear": lambda part: ROW_FUNCTIONS[F.linear](part, weight, bias),  # noqa: B023
            "addmm": lambda part: ROW_FUNCTIONS[torch.addmm](bias, part, weight.mT),  # noqa: B023
            "matmul": lambda part: ROW_FUNCTIONS[torch.matmul](part, weight.mT),  # noqa: B023
        }
        for name, product in products.items():
            assert differing(product, x) == 0, name
            expected = x.double() @ weight.double().mT + (bias.double() if name != "matmul" else 0)
            size = x.double().abs() @ weight.double().abs().mT + bias.double().abs()
            # each of K products and sums may be off by a rounding of fp32
            error = size * (k + 2) * torch.finfo(torch.float32).eps
            half = expected.abs() * torch.finfo(dtype).eps
            assert ((product(x).double() - expected).abs() <= error + half).all(), name


@pytest.mark.usefixtures("threads")
def test_those_of_torch_do_not() -> None:
    """The tests above would notice: without vector instructions torch computes all elements alike,
    without MKL it chooses no product's kernel by the number of rows.
    """
    own: list[Callable[[Tensor], Tensor]] = []
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        own += [F.silu, torch.sigmoid, F.softplus, F.mish]
    if torch.backends.mkl.is_available():
        weight = normal(seeded(1), 96, 709, dtype=torch.float32)
        own.append(lambda part: F.linear(part, weight))
    x = rows_of(709, torch.float32)
    assert [function for function in own if differing(function, x) == 0] == []


def test_grouped_products_are_those_of_each_expert() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(9, 13, generator=generator), torch.randn(4, 13, 7, generator=generator)
    offs = torch.tensor([2, 2, 7, 8], dtype=torch.int32)
    grouped = next(f for name, f in ROW_FUNCTIONS.items() if "grouped_mm" in name.__name__)
    out, linear = grouped(x, weight, offs), ROW_FUNCTIONS[F.linear]
    for rows, expert in ((slice(0, 2), 0), (slice(2, 7), 2), (slice(7, 8), 3)):
        assert torch.equal(out[rows], linear(x[rows], weight[expert].mT))
    assert not out[8:].any()


def problem(tokens: int = 1) -> list[Tensor]:
    """Query, key and value of five rows with grouped heads."""
    shapes = ((6, tokens), (2, 37), (2, 37))
    return [normal(seeded(2), 5, *shape, 24, dtype=torch.float32) for shape in shapes]


def attended(mask: Tensor | None, rows: slice, keys: slice, *, tokens: int = 1) -> Tensor:
    """Rows of one attention, over some of its keys."""
    query, key, value = problem(tokens)
    parts = (query[rows], key[rows, :, keys], value[rows, :, keys])
    return attention(*parts, attn_mask=mask, enable_gqa=True, is_causal=mask is None and tokens > 1)


def test_neither_padding_nor_room_changes_the_attention_of_a_row() -> None:
    mask = torch.zeros(5, 1, 1, 37, dtype=torch.bool)
    spans = [(0, 37), (3, 37), (3, 30), (36, 37), (0, 1)]
    for row, (start, stop) in enumerate(spans):
        mask[row, ..., start:stop] = True
    together = attended(mask, slice(0, 5), slice(0, 37))
    for row, span in enumerate(spans):
        alone = attended(None, slice(row, row + 1), slice(*span))
        assert torch.equal(together[row : row + 1], alone)


def test_attention_of_several_tokens_over_a_cache_equals_sdpa() -> None:
    """Padding before the keys, and room behind them."""
    tokens, mask = 3, torch.zeros(5, 1, 3, 37, dtype=torch.bool)
    for row, start in enumerate((0, 4, 21, 7, 0)):
        for token in range(tokens):
            mask[row, :, token, start : 28 + token] = True
    together = attended(mask, slice(0, 5), slice(0, 37), tokens=tokens)
    wide = [x.double() for x in problem(tokens)]
    expected = F.scaled_dot_product_attention(*wide, mask, enable_gqa=True)
    torch.testing.assert_close(together.double(), expected, atol=2e-6, rtol=2e-6)


def test_a_mask_of_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an attention mask"):
        attended(torch.zeros(5, 1, 1, 37), slice(0, 5), slice(0, 37))


# In which modules of a model they are replaced during a decode step


X = rows_of(77, torch.float32)


class Calls(nn.Module):
    """A function of torch; ``modes`` notes how many modes each call runs in."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.modes = function, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(len(torch.overrides._get_current_function_mode_stack()))
        return self.function(x)


class Model(nn.Module):
    """Each step runs other modules: ``late`` from step 2 on, an expert by the step's parity."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = Calls(F.silu), Calls(F.gelu)
        self.experts = nn.Sequential(Calls(torch.tanh), Calls(F.silu))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.late(x) if self.step > 1 else x
        return self.experts(x) if self.step % 2 else x


def test_later_steps_replace_what_the_first_one_replaces() -> None:
    """Also in modules that the first step did not reach."""
    model = Model()
    modules = InvariantModules(model, [])
    silu, gelu = ROW_FUNCTIONS[F.silu], ROW_FUNCTIONS[F.gelu]
    assert not torch.equal(silu(X), F.silu(X)) and not torch.equal(gelu(X), F.gelu(X))
    x = silu(X)
    expected = [x, silu(torch.tanh(x)), gelu(x), silu(torch.tanh(gelu(x))), gelu(x)]
    for model.step, wanted in enumerate(expected):
        with modules.active():
            assert torch.equal(model(X), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_modules_run_without_the_mode(dtype: torch.dtype) -> None:
    """rsqrt is replaced in narrow dtypes only; all calls of a mixture run in the mode."""
    silu, rsqrt, tanh, mixture = map(Calls, (F.silu, torch.rsqrt, torch.tanh, torch.tanh))
    model = nn.Sequential(tanh, silu, rsqrt, mixture)
    modules = InvariantModules(model, [mixture])
    for _ in range(2):
        with modules.active():
            model(X.to(dtype))
    assert silu.modes == mixture.modes == [1, 1]
    assert tanh.modes == [1, 0]
    assert rsqrt.modes == [1, int(dtype == torch.bfloat16)]
