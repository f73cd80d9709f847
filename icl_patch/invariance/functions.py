"""Batch-invariant replacements of functions of torch: a row's bits depend on the batch in torch,
and not here.

Torch chooses the kernel of a product by the number of rows, computes the last elements of a tensor
by other instructions than the elements before them, and sums attention in an order that depends on
padding. Each changes the last bits of a row. The replacements compute a row in the same order at
every place: products by :func:`icl_patch.ops.patched_linear`, activations by our kernel or from
functions that torch rounds alike everywhere (exp, log1p, tanh, erf), attention over the keys that a
row sees.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import sdpa_attention

from icl_patch import ops
from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.patched_module import rows_of

Replacements = dict[Any, Callable[..., Tensor]]

# -- products


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + bias``: input x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    if 1 not in weight.stride():  # the kernel reads along rows or along columns
        weight = weight.contiguous()
    out = ops.patched_linear(rows_of(input), weight, bias=bias, path="gemv")
    return out.reshape(*input.shape[:-1], weight.shape[0])


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if input.dim() == 1 and beta == alpha == 1:
        return linear(mat1, mat2.mT, input)
    return beta * input + alpha * linear(mat1, mat2.mT)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """``x @ other``: by :func:`linear` where ``other`` is one matrix for all rows."""
    shared = input.dim() > 1 and other.dim() == 2 and input.is_floating_point()
    return linear(input, other.mT) if shared else torch.matmul(input, other)


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """``x_i W_e`` for the rows i of expert e, which end before ``offs[e]``.

    x (M, K), weight (E, K, N), offs (E,) -> (M, N); rows behind the last expert's are 0.

    It is an operator of its own: a compiled step calls it, and does not see that it reads ``offs``
    on the host.
    """
    return torch.ops.icl_patch_invariance.grouped_mm(x, weight, offs)


def _each_group(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    out, start = x.new_zeros(len(x), weight.shape[-1]), 0
    # a trace forbids reads on the host of functions that it sees into
    with torch._C.DisableTorchFunction():
        ends = offs.tolist()
    for expert, end in enumerate(ends):
        if end > start:
            out[start:end] = linear(x[start:end], weight[expert].mT)
        start = end
    return out


torch.library.define(
    "icl_patch_invariance::grouped_mm", "(Tensor x, Tensor weight, Tensor offs) -> Tensor"
)
torch.library.impl("icl_patch_invariance::grouped_mm", "CompositeExplicitAutograd", _each_group)
torch.library.register_fake(
    "icl_patch_invariance::grouped_mm",
    lambda x, weight, offs: x.new_empty(len(x), weight.shape[-1]),
)


_PRODUCTS: Replacements = {
    F.linear: linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((F.grouped_mm, torch._grouped_mm), _grouped_mm),
}


# -- activations


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` of x in fp32 (fp64 for fp64), rounded to x's dtype once."""

    def rounded(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        out = function(wide, *args, **kwargs).to(input.dtype)
        return input.copy_(out) if inplace else out

    return rounded


def _by_kernel(name: str, otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An activation by our kernel of gated products, which computes every element alike, else by
    torch's functions: one launch in place of four or more, and of MKL's exp, which starts its
    threads for a single row.
    """
    rounded = _in_fp32(otherwise)

    def activation(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        known = name != "gelu_tanh" or (*args, *kwargs.values()) == ("tanh",)
        if not known or not ops.has_gated_product(input):
            return rounded(input, *args, inplace=inplace, **kwargs)
        gate = input.reshape(1, -1)
        out = ops.gated_product(gate, gate.new_ones(()).expand_as(gate), name).reshape(input.shape)
        return input.copy_(out) if inplace else out

    return activation


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = beta * x
    smooth = (torch.log1p(torch.exp(-scaled.abs())) + scaled.clamp(min=0)) / beta
    return torch.where(scaled > threshold, x, smooth)


def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(x))


_ACTIVATIONS: Replacements = {
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, torch.special.expit), _in_fp32(_sigmoid)),
    **dict.fromkeys((torch.rsqrt, Tensor.rsqrt), _in_fp32(torch.rsqrt)),
    F.silu: _by_kernel("silu", _silu),
    F.gelu: _by_kernel("gelu_tanh", _gelu),
    F.softplus: _in_fp32(_softplus),
    F.mish: _in_fp32(_mish),
}


# -- attention


def one_token_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scale: float | None = None,
    slot: Tensor | None = None,
) -> Tensor | None:
    """``scaled_dot_product_attention`` of one token a row by our kernel; None for other calls. A
    row's bits depend on the row alone.

    query (B, H, 1, D), or with a mask packed as (B, G, H/G, D); key and value (B, G, S, ·); mask
    (B or 1, 1, 1, S) bool. With the column ``slot`` of the token, (1,), rows of its attention to
    itself alone follow.
    """
    packed = mask is not None and mask.shape[-2] == 1
    if dropout or not (query.shape[2] == 1 or packed) or query.dtype == torch.float64:
        return None
    if not ops.has_kernels(query.device.type):
        return None
    if not query.dtype == key.dtype == value.dtype:  # under autocast
        return None
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1):
            return None
        mask = mask[:, 0, 0].expand(len(query), -1)
    rows = query.flatten(1, 2) if query.shape[2] > 1 else query[:, :, 0]
    if slot is None:
        y = ops.decode_attention(rows, key, value, mask, scale=scale)
    else:
        y = ops.attention_pair(rows, key, value, slot, mask, scale=scale)
    return y.reshape(len(y), *query.shape[1:-1], y.shape[-1])


def _unless_one_token(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` by our kernel for one token a row, else by another one."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        y = None
        if query.dim() == 4 and not is_causal:
            y = one_token_attention(query, key, value, attn_mask, dropout_p, options.get("scale"))
        if y is not None:
            return y
        run = F.scaled_dot_product_attention if dropout_p else otherwise
        return run(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return attention


# Beside a mask, newer versions of transformers give one token's query heads as tokens of the heads
# of keys, older ones repeat the keys. Without a mask both leave it to this function, which must
# do the same.
_PACKS_QUERIES = hasattr(sdpa_attention, "pack_gqa")


def _attention_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    _dropout: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """``scaled_dot_product_attention``, row by row, of the queries that see a key over the keys
    that one of them sees.

    query (B, H, T, D), key and value (B, H or fewer, S, D), mask (B or 1, 1, T or 1, S) bool.
    So neither padding nor the room of a static cache changes a row's bits. A query that sees no key
    gets 0.

    It runs in one thread: in fp32 torch's kernel rounds by the place of a thread's scratch memory.

    Raises:
        UnsupportedModelError: a mask of another dtype or for each head.
    """
    heads, tokens = query.shape[1], query.shape[2]
    if heads != key.shape[1]:
        if tokens == 1 and _PACKS_QUERIES:
            query = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        else:
            key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    if mask is None:
        out = _attend(query, key, value, None, is_causal, scale)
    else:
        out = _attend_by_row(query, key, value, mask, scale)
    return out.reshape(len(query), heads, tokens, value.shape[-1])


def _attend_by_row(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        raise UnsupportedModelError(
            "expected an attention mask (B, 1, T, S) of bools, got"
            f" {tuple(mask.shape)} {mask.dtype}"
        )
    mask = mask[:, 0].expand(len(query), -1, -1)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    queries, keys = (mask.any(dim).tolist() for dim in (2, 1))
    for row in range(len(query)):
        part, asked, seen = slice(row, row + 1), _places(queries[row]), _places(keys[row])
        visible = mask[part, asked][:, :, seen].unsqueeze(1)
        if mask.shape[1] != query.shape[2]:  # one row of the mask for all queries
            asked = slice(None)
        if visible.numel():
            own = key[part, :, seen], value[part, :, seen]
            out[part, :, asked] = _attend_alone(query[part, :, asked], *own, visible, scale)
    return out


def _attend_alone(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None
) -> Tensor:
    """Attention of a row's own tokens, as for the row without padding."""
    if visible.all():
        y = one_token_attention(query, key, value, None, scale=scale)
        return _attend(query, key, value, None, False, scale) if y is None else y
    is_causal = bool((visible == torch.ones_like(visible).tril()).all())
    return _attend(query, key, value, None if is_causal else visible, is_causal, scale)


def _places(flags: list[bool]) -> slice | list[int]:
    """The places that are set: a slice if no other lies between them."""
    places = [place for place, is_set in enumerate(flags) if is_set]
    if places and places[-1] - places[0] >= len(places):
        return places
    return slice(places[0], places[-1] + 1) if places else slice(0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale
        )
    finally:
        torch.set_num_threads(threads)


def is_own(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether the replacement of ``function`` calls it with the same arguments: it is torch's own
    for these dtypes.
    """
    wide = isinstance(args[0], Tensor) and args[0].dtype in (torch.float32, torch.float64)
    return wide and function in (torch.rsqrt, Tensor.rsqrt)


ROW_FUNCTIONS: Replacements = {**_PRODUCTS, **_ACTIVATIONS}
"""Functions of torch, and the functions that give a row the same bits at every place."""

attention = _unless_one_token(_attention_by_row)
ATTENTION: Replacements = {F.scaled_dot_product_attention: attention}
"""The same for attention; a row is a sequence there."""

ONE_TOKEN_ATTENTION: Replacements = {
    F.scaled_dot_product_attention: _unless_one_token(F.scaled_dot_product_attention)
}
"""The same where each row has one token, as in a decode step; else torch's own."""
