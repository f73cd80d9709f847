"""The arguments that ops take, and the results of the native library's ops.

They stand in one table for all implementations. Functions compare arguments with a row of it.
Errors give the expected and the actual value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from icl_patch.activation_functions import activation_named
from icl_patch.dtypes import check_floating


def check_eps(eps: float) -> None:
    """The eps of a norm is finite and not negative."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"expected a finite eps ≥ 0, got {eps}")


def is_traced() -> bool:
    """Whether this call is traced into a graph, which later runs on other numbers."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms this call."""
    return torch._C._are_functorch_transforms_active()  # which torch.compile evaluates


def serve_negated(library: torch.library.Library, name: str) -> None:
    """Resolve pending negations before an operator that takes lists in which tensors may be absent,
    or that writes: torch does so for all others.
    """
    operator = getattr(torch.ops.icl_patch, name).default
    arguments = operator._schema.arguments
    written = [i for i, x in enumerate(arguments) if x.alias_info and x.alias_info.is_write]
    if not written and not any("Optional[Tensor]]" in str(x.type) for x in arguments):
        return

    def resolved(*args: Any) -> Any:
        given = tree_map_only(Tensor, Tensor.resolve_neg, args)
        out = operator(*given)
        for place in written:
            if args[place].is_neg():
                args[place].copy_(given[place])
        return out

    library.impl(name, resolved, "Negative")


def _check_out_dtype(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"expected a floating out_dtype, got {dtype}")


def _check_path(path: str) -> None:
    if path not in ("gemv", "gemm"):
        raise ValueError(f"expected path 'gemv' or 'gemm', got {path!r}")


_OTHERS: dict[str, Callable[[Any], object]] = {
    "eps": check_eps,
    "out_dtype": _check_out_dtype,
    "path": _check_path,
    "activation": activation_named,
}


class Arguments:
    """Checks the arguments of one op, and knows its results, given as one row of the table.

    Args:
        row: ``"NAME: SHAPE or SHAPE, KIND"`` for a tensor, NAME for anything else, in the order of
            the op's arguments. A letter of a shape stands for one size in all tensors, ``G·E`` for
            a product of letters before it. The kind is ``integers``, ``bools``, or the dtype of the
            first tensor; any float without one.
        rule: a further check, of all sizes by their letters and the arguments by name.
        results: ``"SHAPE, DTYPE"`` for each of the native op's results. The dtype is one of
            torch's, ``out_dtype``, or names of arguments: fp64 if one of them is, or is True, else
            fp32; that of the first argument without one.

    None is no argument. Raises TypeError for a dtype and ValueError for anything else.
    """

    def __init__(
        self, *row: str, rule: Callable[..., None] | None = None, results: tuple[str, ...] = ()
    ) -> None:
        self._row: dict[str, tuple[list[list[str]], str]] = {}
        self._rule, self._results = rule, [form.partition(", ")[::2] for form in results]
        for entry in row:
            name, _, form = entry.partition(": ")
            shapes, _, kind = form.partition(", ")
            self._row[name] = [shape.split() for shape in shapes.split(" or ")], kind

    def __call__(self, *args: Any, **options: Any) -> dict[str, int]:
        """Raise an error for arguments that do not fit the row; returns the sizes by their
        letters.
        """
        sizes: dict[str, int] = {}
        given = dict.fromkeys(self._row) | dict(zip(self._row, args, strict=False)) | options
        first: Any = next(iter(given.values()))
        for name, (shapes, kind) in self._row.items():
            x = given[name]
            if isinstance(x, Tensor):
                sizes = _bound(name, x, shapes, sizes)
                _check_kind(name, x, kind, first)
            elif x is not None and name in _OTHERS:
                _OTHERS[name](x)
        if self._rule is not None:
            self._rule(sizes, **given)
        return sizes

    def results(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, ...]:
        """Empty tensors like the native op's results, for torch.compile and for meta tensors."""
        given: dict[str, Any] = dict(zip(self._row, args, strict=False)) | options
        sizes = self(**given)
        sizes.setdefault("M", sizes.get("2M", 0) // 2)
        first: Tensor = next(iter(given.values()))

        def dtype_of(kind: str) -> torch.dtype:
            if kind in ("", "out_dtype"):
                return given.get(kind) or first.dtype
            named = [given.get(name) for name in kind.split()]
            is_wide = any(x is True or getattr(x, "dtype", x) == torch.float64 for x in named)
            return getattr(torch, kind, torch.float64 if is_wide else torch.float32)

        def size(part: str) -> int:
            known = _known(part, sizes)
            return 2 * sizes[part.removeprefix("2")] if known is None else known

        made = [
            first.new_empty([size(part) for part in shape.split()], dtype=dtype_of(kind))
            for shape, kind in self._results
        ]
        return made[0] if len(made) == 1 else tuple(made)


def _known(part: str, sizes: dict[str, int]) -> int | None:
    """The size of a part of a shape: 1, a letter or a product of letters; None if it is not known
    yet.
    """
    first, dot, second = part.partition("·")
    if dot:
        return sizes[first] * sizes[second]
    return 1 if part == "1" else sizes.get(part)


def _bound(name: str, x: Tensor, shapes: list[list[str]], sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of letters that are known, and those that a tensor's shape adds."""
    for shape in shapes:
        found = dict(zip(shape, x.shape, strict=False))
        known = {part: _known(part, sizes) for part in found}
        # not "in": a compiler's size is equal to one that it is not identical to
        fits = all(known[part] is None or known[part] == n for part, n in found.items())
        if len(shape) == x.dim() and fits:
            return sizes | {k: n for k, n in found.items() if k.isalnum() and k != "1"}
    # not before: it would bind a compiled graph to this number of rows
    forms = " or ".join(f"({', '.join(shape)})" for shape in shapes)
    bound = "".join(f", {letter} = {size}" for letter, size in sizes.items())
    raise ValueError(f"expected {name} {forms}{bound}, got {tuple(x.shape)}")


def _check_kind(name: str, x: Tensor, kind: str, first: Tensor) -> None:
    if kind == "integers":
        fits = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    elif kind == "bools":
        fits = x.dtype == torch.bool
    else:
        check_floating(name, x)
        fits = not kind or x.dtype == first.dtype
    if not fits:
        raise TypeError(f"expected {name} in {kind}, got {x.dtype} with {first.dtype}")
    if x.device != first.device:
        raise ValueError(f"expected {name} on {first.device}, got {x.device}")


def _check_range(name: str, indices: Tensor, least: int, count: int) -> None:
    """Indices from ``least`` to ``count - 1``: checked only if the host can read the values without
    waiting for a device.
    """
    if not indices.is_cpu or not indices.numel() or is_traced() or is_transformed():
        return
    indices = indices.long()  # torch has no least one of some unsigned ones
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < least or highest >= count:
        raise ValueError(f"expected {name} from {least} to {count - 1}, got {lowest} to {highest}")


def _check_factors(
    sizes: dict[str, int], u: Tensor | None, v: Tensor | None, index: Tensor | None, **_: Any
) -> None:
    """A row of u and v for each row of z, one for all, or a pool with an index."""
    if u is None or v is None:
        if not u is v is index:
            raise ValueError("expected both u and v, or neither of them and no index")
        return
    rows, ranks, least = sizes["M"], u.shape[:-1], 3 if index is not None else 2
    if len(ranks) != v.dim() - 1 or u.dim() < least:
        raise ValueError(
            f"expected u and v of {least} dimensions or more, got {u.dim()}, {v.dim()}"
        )
    if index is not None:
        _check_range("index", index, -1, ranks[0])
    elif ranks[0] != rows and (u.dim() == 2 or ranks[0] != 1):
        raise ValueError(f"expected u and v of one row or {rows}, got {ranks[0]}")


def _check_rows(sizes: dict[str, int], **_: Any) -> None:
    """Rows with a column at least, and half of them of each stream where both are there."""
    if sizes.get("d") == 0:
        raise ValueError("expected d ≥ 1, got 0")
    rows = sizes.get("2M", 0)
    half = rows // 2  # torch.compile has no remainder for sizes that vary
    if rows and (2 * half != rows or sizes.get("M", half) != half):
        raise ValueError(f"expected the rows of two streams, got {rows}")


def _check_experts(sizes: dict[str, int], expert: Tensor, **_: Any) -> None:
    _check_range("expert", expert, 0, sizes["E"])


def _check_heads(sizes: dict[str, int], **_: Any) -> None:
    """Each head of the keys is shared by as many of the queries'."""
    heads, groups = sizes["H"], sizes["G"]
    if heads % groups if groups else heads:
        raise ValueError(f"expected a number of keys' heads that divides {heads}, got {groups}")


def _check_slot(sizes: dict[str, int], slot: Tensor, **_: Any) -> None:
    """One column of the keys."""
    _check_heads(sizes)
    if sizes["N"] != 1:
        raise ValueError(f"expected slot of one column, got {sizes['N']}")
    _check_range("slot", slot, 0, sizes["S"])


def _check_written(
    sizes: dict[str, int], slot: Tensor, keys: Tensor, values: Tensor, **_: Any
) -> None:
    """One column of the keys, and a head of queries for each of theirs: it writes them. Values of
    both streams or of one.
    """
    _check_slot(sizes, slot)
    for name, x in (("keys", keys), ("values", values)):
        if any(not step and size > 1 for size, step in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"expected {name} of which each element has its own memory, got an expanded tensor,"
                f" strides {x.stride()}: clone it first"
            )
    if sizes["R"] not in (rows := (sizes["B"], 2 * sizes["B"])):
        raise ValueError(f"expected value of {rows[0]} or {rows[1]} rows, got {sizes['R']}")
    if sizes["H"] < sizes["G"]:
        raise ValueError(f"expected {sizes['G']} heads of queries or more, got {sizes['H']}")


def _check_rotary(sizes: dict[str, int], **_: Any) -> None:
    """Halves of the width, and an angle for each row or one for all."""
    if sizes["D"] % 2 or sizes["R"] not in (1, sizes["B"]):
        raise ValueError(
            f"expected an even D, and cos and sin of 1 or {sizes['B']} rows, got D = {sizes['D']}"
            f" and {sizes['R']} rows"
        )


_FACTORS = ("u: M N or P R N", "v: M K or P R K")
_INDEX = "index: M, integers"

check_patched_linear = Arguments(
    "z: M K",
    "weight: N K, z's dtype",
    *_FACTORS,
    "bias: N, z's dtype",
    _INDEX,
    "out_dtype",
    "path",
    rule=_check_factors,
    results=("M N, out_dtype",),
)
check_record_linear = Arguments(
    "z_pair: 2M K",
    "weight: N K, z_pair's dtype",
    "v: M K",
    "bias: N, z_pair's dtype",
    rule=_check_rows,
    results=("2M N", "M N, float32"),
)
check_add_low_rank = Arguments(
    "y: M N",
    "z: M K",
    *_FACTORS,
    _INDEX,
    "out_dtype",
    rule=_check_factors,
    results=("M N, out_dtype",),
)
check_expert_linear = Arguments(
    "x: M K or M k K",
    "weight: E N K, x's dtype",
    "expert: M k, integers",
    "bias: E N, x's dtype",
    "out_dtype",
    rule=_check_experts,
    results=("M k N, out_dtype",),
)
check_read_direction = Arguments("z: M K", "wide", results=("M K, wide", "M, wide"))
check_rms_norm = Arguments("x: M d", "scale: M d or d", "eps", rule=_check_rows, results=("M d",))
check_norm_pair = Arguments(
    "hidden: 2M d",
    "weight: d",
    "eps",
    rule=_check_rows,
    results=("2M d", "M d, float32", "M d, float32", "M, float32"),
)
check_gated_product = Arguments(
    "gate: M N", "up: M N, gate's dtype", "activation", results=("M N",)
)
check_decode_attention = Arguments(
    "query: B H D",
    "key: B G S D, query's dtype",
    "value: B G S E, query's dtype",
    "scale",
    "mask: B S, bools",
    rule=_check_heads,
    results=("B H E",),
)
check_attention_pair = Arguments(
    "query: B H D",
    "key: B G S D, query's dtype",
    "value: B G S E, query's dtype",
    "slot: N, integers",
    "scale",
    "mask: B S, bools",
    rule=_check_slot,
    results=("2B H E",),
)
check_write_and_attend = Arguments(
    "query: B H 1 D",
    "keys: B G S D, query's dtype",
    "values: B G S E, query's dtype",
    "key: B G 1 D, query's dtype",
    "value: R G·E, query's dtype",
    "slot: N, integers",
    "scale",
    "mask: B S, bools",
    rule=_check_written,
    results=("2B H·E",),
)
check_rotary_embedding = Arguments(
    "query: B H T D",
    "key: B G T D, query's dtype",
    "cos: R T D, query's dtype",
    "sin: R T D, query's dtype",
    rule=_check_rotary,
    results=("B H T D", "B G T D"),
)
_INVERSE = ("M, float64", "M d, float64", "M, int8", "M, int32")
check_inversion = Arguments(
    "target: M d",
    "scale: M d or d",
    "rms: M",
    "eps",
    "fallback: M d",
    rule=_check_rows,
    results=("M d, target", *_INVERSE),
)
check_stable_scale = Arguments(
    "delta: M d",
    "scale: M d or d",
    "hidden_down: M d",
    "eps",
    rule=_check_rows,
    results=("M d, delta scale hidden_down", *_INVERSE),
)
check_record_norm = Arguments(
    "y_pair: 2M d",
    "h: M K",
    "delta: M d",
    "weight: d",
    "eps",
    "out_dtype",
    rule=_check_rows,
    results=("2M d, out_dtype", "M d, float32", "M K, h", "M, h", "M d, float32", "M, int8"),
)
