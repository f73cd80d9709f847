"""Attention of one token per row over a cache of keys and values; rotary positions."""

import torch
from torch import Tensor

from icl_patch.checks import (
    check_attention_pair,
    check_decode_attention,
    check_rotary_embedding,
    check_write_and_attend,
    is_transformed,
)
from icl_patch.ops import reference
from icl_patch.ops.dispatch import Op, wants_gradients


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """``y = softmax(scale · q Kᵀ) V`` for one token per row, over the keys that the row sees.

    Every key and value is read once, for all heads that share it. A row's bits depend on its query
    and on the keys and values that it sees. They do not depend on other rows, padding, or free
    room in a cache. On CUDA they also depend on the distances between these keys.

    Args:
        query: (B, H, D) float.
        key, value: (B, G, S, D) and (B, G, S, E), query's dtype, any strides; G divides H, and
            heads ``[g H/G, (g + 1) H/G)`` share head g of the keys.
        mask: (B, S) bool, True for the keys that a row sees; all by default.
        scale: ``1/√D`` by default.

    Returns:
        (B, H, E) in query's dtype, summed in fp32 and rounded once (fp64 for fp64). A row that sees
        no key gets 0.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    return _decode_attention(query, key, value, scale, mask)


_decode_attention = Op(
    "decode_attention",
    check_decode_attention,
    reference.decode_attention,
    triton=lambda kernels, query, key, value, scale, mask: kernels.decode_attention(
        query, key, value, mask, scale
    ),
)


def attention_pair(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Both streams' attention of one token per row over one cache: :func:`decode_attention` with
    the context, and the token's own value without it. A token that attends to itself alone gets its
    value, because the softmax of one number is 1.

    Args:
        query, key, value, mask, scale: as for :func:`decode_attention`.
        slot: (1,) int64, the column of the token's own key and value. CUDA tensors are not checked
            on the host.

    Returns:
        (2B, H, E) in query's dtype: the B rows with the context, then the B rows without it, with
        the bits of ``value[:, :, slot]`` in each head.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Dherin et al. (2025), Section 2: A(C, x) and A(x), before their output projection.
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    return _attention_pair(query, key, value, slot, scale, mask)


_attention_pair = Op(
    "attention_pair",
    check_attention_pair,
    reference.attention_pair,
    triton=lambda kernels, query, key, value, slot, scale, mask: kernels.attention_pair(
        query, key, value, slot, mask, scale
    ),
)


def write_and_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Writes the token's key and value into column ``slot`` of a cache, then
    :func:`attention_pair` over this cache. The shapes are those that the operations around it have
    in a decode step, so that no view is needed between them.

    Args:
        query: (B, H, 1, D) float.
        keys, values: (B, G, S, D) and (B, G, S, E), query's dtype, any strides, not expanded;
            changed in place, which autograd notices as from torch's operators. G divides H, as for
            :func:`decode_attention`.
        key, value: (B, G, 1, D) and (B, G E), query's dtype, in other memory than the cache. With
            a value (2B, G E) the last B rows are the values of the token without the context.
        slot: (1,) int64, the column. CUDA tensors are not checked on the host: for a column that is
            not there nothing is written.
        mask: (B, S) bool, True for the keys that a row sees; all by default.
        scale: ``1/√D`` by default.

    Returns:
        (2B, H E) in query's dtype: the B rows with the context, with the bits of
        :func:`decode_attention`, then the value of the B rows without it in each head.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit. The cache is unchanged.
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    args = query, keys, values, key, value, slot, scale, mask
    y: Tensor = _write_and_attend(*args)
    # where autograd may ask for a derivative torch's operators have written, which count it
    if not (torch.compiler.is_compiling() or is_transformed() or wants_gradients(args)):
        for cache in (keys, values):
            if not cache.is_inference():
                torch.autograd.graph.increment_version(cache)
    return y


_write_and_attend = Op(
    "write_and_attend",
    check_write_and_attend,
    reference.write_and_attend,
    native_if=lambda *_: not is_transformed(),  # vmap has no rule for an op that writes
    triton=lambda kernels, *args: kernels.write_and_attend(*args[:6], args[7], args[6]),
)


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions as in Llama: ``x cos + (-x₂, x₁) sin`` of query and key, where x₁ and x₂ are
    the halves of a row x.

    Args:
        query: (B, H, T, D) float, D even.
        key: (B, G, T, D), query's dtype; both of any strides.
        cos, sin: (B, T, D), or (1, T, D) for all rows, query's dtype.

    Returns:
        Both rotated, in their shapes. The products and their sum are each rounded to query's dtype,
        as torch's operators round them.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    rotated: tuple[Tensor, Tensor] = _rotary_embedding(query, key, cos, sin)
    return rotated


_rotary_embedding = Op("rotary_embedding", check_rotary_embedding, reference.rotary_embedding)
