"""Checks of the arguments of ops, for all their implementations. Each raises an error with the
expected and the actual value.
"""

import torch
from torch import Tensor

from icl_patch.activations import activation_named

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_floats(**tensors: Tensor | None) -> None:
    """All tensors are floating and on the device of the first; None stands for no tensor.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a device differs.
    """
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"expected {name} in fp64, fp32, bf16 or fp16, got {tensor.dtype}")
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f"expected {name} on {device}, got {tensor.device}")


def check_matrix(name: str, tensor: Tensor) -> None:
    """The tensor is floating and has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"expected {name} with 2 dimensions, got {tuple(tensor.shape)}")
    check_floats(**{name: tensor})


def check_eps(eps: float) -> None:
    """The eps of a norm is finite and not negative."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"expected a finite eps ≥ 0, got {eps}")


def check_out_dtype(out_dtype: torch.dtype | None) -> None:
    """The result's dtype is floating."""
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise TypeError(f"expected a floating out_dtype, got {out_dtype}")


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds integers: indices, not a mask."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def is_traced() -> bool:
    """Whether this call is traced into a graph, which later runs on other numbers."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def check_range(name: str, indices: Tensor, least: int, count: int) -> None:
    """Indices from ``least`` to ``count - 1``: checked only if the host can read the values without
    waiting for a device.
    """
    if not indices.is_cpu or not indices.numel() or is_traced() or is_transformed():
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < least or highest >= count:
        raise ValueError(f"expected {name} from {least} to {count - 1}, got {lowest} to {highest}")


def check_operands(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """The operands of a product of x by one weight (N, K) or by several (E, N, K)."""
    if weight.dtype != x.dtype and weight.dtype in FLOATS and x.dtype in FLOATS:
        raise TypeError(f"expected weight in {name}'s dtype {x.dtype}, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"expected bias {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}")
    check_floats(**{name: x}, weight=weight, bias=bias)
    if bias is not None and bias.dtype != x.dtype:
        raise TypeError(f"expected bias in {name}'s dtype {x.dtype}, got {bias.dtype}")
    check_out_dtype(out_dtype)


def check_linear(
    z: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> None:
    """The operands of a linear map of z (M, K)."""
    check_matrix("z", z)
    check_matrix("weight", weight)
    if weight.shape[1] != z.shape[1]:
        raise ValueError(f"expected weight (N, {z.shape[1]}), got {tuple(weight.shape)}")
    check_operands("z", z, weight, bias, out_dtype)


def check_patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str | None,
) -> None:
    """The arguments of :func:`icl_patch.ops.patched_linear`."""
    check_linear(z, weight, bias, out_dtype)
    if path not in (None, "gemv", "gemm"):
        raise ValueError(f"expected path 'gemv' or 'gemm', got {path!r}")
    if u is not None or v is not None:
        check_factors(z, u, v, weight.shape[0], index)
    elif index is not None:
        raise ValueError("expected u and v with index, got none")


def check_factors(
    z: Tensor, u: Tensor | None, v: Tensor | None, n: int, index: Tensor | None
) -> None:
    """Factors of a change that maps z (M, K) to (M, n)."""
    if u is None or v is None:
        raise ValueError("expected both u and v or neither, got one of them")
    check_floats(z=z, u=u, v=v)
    rows, k = z.shape
    for name, factor, width in (("u", u, n), ("v", v, k)):
        if index is not None:
            fits = factor.dim() == 3
        else:
            shared = factor.dim() == 3 and factor.shape[0] == 1
            fits = shared or (factor.dim() in (2, 3) and factor.shape[0] == rows)
        if not fits or factor.shape[-1] != width:
            # not before: it would bind a compiled graph to this number of rows
            own = f"({rows}, {width}), ({rows}, R, {width}) or (1, R, {width})"
            expected = own if index is None else f"(P, R, {width})"
            raise ValueError(f"expected {name} {expected}, got {tuple(factor.shape)}")
    if u.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"expected u and v with the same rows and rank, got {tuple(u.shape)} and"
            f" {tuple(v.shape)}"
        )
    if index is not None:
        if index.shape != (rows,) or not is_integer(index):
            raise ValueError(
                f"expected index ({rows},) of integers, got {tuple(index.shape)} {index.dtype}"
            )
        if index.device != z.device:
            raise ValueError(f"expected index on {z.device}, got {index.device}")
        check_range("index", index, -1, u.shape[0])


def check_record_linear(z_pair: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The operands of a linear map of both streams."""
    check_linear(z_pair, weight, bias)
    # torch.compile has no remainder for sizes that vary
    if 2 * (z_pair.shape[0] // 2) != z_pair.shape[0]:
        raise ValueError(f"expected z_pair (2M, K), got {tuple(z_pair.shape)}")


def check_add_low_rank(
    y: Tensor,
    z: Tensor,
    u: Tensor,
    v: Tensor,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    """The arguments of :func:`icl_patch.ops.add_low_rank`."""
    check_matrix("y", y)
    check_matrix("z", z)
    if y.shape[0] != z.shape[0]:
        raise ValueError(
            f"expected y and z with the same number of rows, got {tuple(y.shape)} and"
            f" {tuple(z.shape)}"
        )
    check_floats(y=y, z=z)
    check_out_dtype(out_dtype)
    check_factors(z, u, v, y.shape[1], index)


def check_expert_linear(
    x: Tensor, weight: Tensor, expert: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """The arguments of :func:`icl_patch.ops.expert_linear`."""
    if expert.dim() != 2 or not is_integer(expert):
        raise ValueError(
            f"expected expert (M, k) of integers, got {tuple(expert.shape)} {expert.dtype}"
        )
    rows, chosen = expert.shape
    if weight.dim() != 3 or x.shape not in (
        (rows, weight.shape[-1]),
        (rows, chosen, weight.shape[-1]),
    ):
        raise ValueError(
            f"expected x ({rows}, K) or ({rows}, {chosen}, K) and weight (E, N, K), got"
            f" {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_operands("x", x, weight, bias, out_dtype)
    if expert.device != x.device:
        raise ValueError(f"expected expert on {x.device}, got {expert.device}")
    check_range("expert", expert, 0, len(weight))


def check_rms_norm(
    x: Tensor, scale: Tensor, eps: float, scale_offset: float, cast_first: bool
) -> None:
    """The arguments of :func:`icl_patch.ops.rms_norm`."""
    _check_rows("x", x, eps, scale=scale)
    if scale.shape not in (x.shape, x.shape[1:]):
        raise ValueError(
            f"expected scale {tuple(x.shape)} or ({x.shape[1]},), got {tuple(scale.shape)}"
        )


def check_norm_pair(
    hidden: Tensor, weight: Tensor, eps: float, scale_offset: float, cast_first: bool
) -> None:
    """The arguments of :func:`icl_patch.ops.norm_pair`."""
    _check_rows("hidden", hidden, eps, weight=weight)
    if hidden.shape[0] % 2:
        raise ValueError(f"expected hidden (2M, d), got {tuple(hidden.shape)}")
    if weight.shape != hidden.shape[1:]:
        raise ValueError(f"expected weight ({hidden.shape[1]},), got {tuple(weight.shape)}")


def _check_rows(name: str, rows: Tensor, eps: float, **scale: Tensor) -> None:
    """Rows (M, d), a scale by its name, and eps."""
    check_matrix(name, rows)
    if not rows.shape[1]:
        raise ValueError(f"expected {name} (M, d) with d ≥ 1, got {tuple(rows.shape)}")
    check_floats(**{name: rows}, **scale)
    check_eps(eps)


def check_gated_product(gate: Tensor, up: Tensor, activation: str) -> None:
    """The arguments of :func:`icl_patch.ops.gated_product`."""
    activation_named(activation)
    if gate.dim() != 2 or gate.shape != up.shape:
        raise ValueError(
            f"expected gate and up (M, N), got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    check_floats(gate=gate, up=up)
    if up.dtype != gate.dtype:
        raise TypeError(f"expected up in gate's dtype {gate.dtype}, got {up.dtype}")


def check_decode_attention(
    query: Tensor, key: Tensor, value: Tensor, _scale: float, mask: Tensor | None
) -> None:
    """The arguments of :func:`icl_patch.ops.decode_attention`."""
    check_floats(query=query, key=key, value=value)
    if query.dim() != 3 or key.dim() != 4 or value.dim() != 4:
        dims = f"{query.dim()}, {key.dim()} and {value.dim()}"
        raise ValueError(
            f"expected query (B, H, D), key (B, G, S, D) and value (B, G, S, E), got {dims}"
            " dimensions"
        )
    rows, heads, width = query.shape
    groups, keys = key.shape[1:3]
    fits = key.shape == (rows, groups, keys, width) and value.shape[:3] == (rows, groups, keys)
    if not fits or (heads % groups if groups else heads):
        raise ValueError(
            f"expected key ({rows}, G, S, {width}) and value ({rows}, G, S, E) of a query"
            f" {tuple(query.shape)}, where G divides {heads}, got {tuple(key.shape)} and"
            f" {tuple(value.shape)}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"expected one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (rows, keys)):
        raise ValueError(
            f"expected a mask ({rows}, {keys}) of bools, got {tuple(mask.shape)} {mask.dtype}"
        )
