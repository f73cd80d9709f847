"""Every op through ``make_fx`` on real tensors: the graph holds the ops themselves, and is right on
other numbers.
"""

from collections.abc import Callable

import torch
from support.numeric import normal, same_bits, seeded
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from icl_patch import ops
from icl_patch.ops import dispatch

ROWS, N, K = 4, 6, 9


def arguments(seed: int) -> list[Tensor]:
    """z (M, K), weight (N, K), per row u (M, N) and v (M, K), bias (N,), and a pool u (P, R, N), v
    (P, R, K) with its index (M,).
    """
    rng = seeded(seed)
    sizes = ((ROWS, K), (N, K), (ROWS, N), (ROWS, K), (N,), (3, 2, N), (3, 2, K))
    return [
        *(normal(rng, *size, dtype=torch.float32) for size in sizes),
        torch.randint(-1, 3, (ROWS,), generator=rng),
    ]


def _direction(z: Tensor) -> tuple[Tensor, Tensor]:
    return ops.read_direction(z)[:2]


def _norm_pair(z: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    pair = ops.norm_pair(z, v[0], 1e-5)
    return pair.z_pair, pair.delta, *pair.direction[:2]


def _record_linears(z: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    direction = ops.read_direction(z[2:])
    recorded = ops.record_linears(z, [(w, b), (-w, b)], direction=direction)
    return tuple(x for of in recorded for x in of)


Call = Callable[..., Tensor | tuple[Tensor, ...]]
CALLS: dict[str, Call] = {
    "patched_linear": lambda z, w, u, v, b, pu, pv, i: ops.patched_linear(z, w, u, v, b),
    "patched_linear, a pool": lambda z, w, u, v, b, pu, pv, i: ops.patched_linear(
        z, w, pu, pv, b, index=i
    ),
    "add_low_rank, tiles": lambda z, w, u, v, b, pu, pv, i: ops.patched_linear(
        z, w, pu, pv, b, index=i, path="gemm"
    ),
    "record_linear": lambda z, w, u, v, b, pu, pv, i: ops.record_linear(z, w, b)[:2],
    "record_linears": lambda z, w, u, v, b, pu, pv, i: _record_linears(z, w, b),
    "add_low_rank": lambda z, w, u, v, b, pu, pv, i: ops.add_low_rank(u, z, u, v),
    "expert_linear": lambda z, w, u, v, b, pu, pv, i: ops.expert_linear(
        z, torch.stack([w, -w, 2 * w, w]), i.unsqueeze(1) + 1
    ),
    "read_direction": lambda z, w, u, v, b, pu, pv, i: _direction(z),
    "rms_norm": lambda z, w, u, v, b, pu, pv, i: ops.rms_norm(z, v, 1e-5),
    "norm_pair": lambda z, w, u, v, b, pu, pv, i: _norm_pair(z, v),
    "gated_product": lambda z, w, u, v, b, pu, pv, i: ops.gated_product(z, v, "silu"),
    "decode_attention": lambda z, w, u, v, b, pu, pv, i: ops.decode_attention(
        z.unsqueeze(1), v[:, None, None], u[:, None, None]
    ),
    "invert_rmsnorm": lambda z, w, u, v, b, pu, pv, i: (
        ops.invert_rmsnorm(z, v, u[:, 0].abs()).hidden
    ),
    "stable_scale": lambda z, w, u, v, b, pu, pv, i: ops.stable_scale(z, v[0], v).u,
}
# the native library's, whatever serves the products
NATIVE = ("decode_attention", "invert_rmsnorm", "stable_scale")


def check_traced(name: str) -> None:
    """The op's node is in the graph, and nothing of the first run's numbers."""
    call, op = CALLS[name], name.partition(",")[0]
    graph = make_fx(call)(*arguments(0))
    triton = dispatch.backend == "triton" and op not in NATIVE
    if triton and "tiles" in name:
        op = "patched_linear"  # Triton's own tiles
    if op.startswith("record_linear"):
        op = "record_linears" if triton else "record_linear"
    expected = f"icl_patch.{'triton_' if triton else ''}{op}.default"
    assert expected in [str(node.target) for node in graph.graph.nodes], graph.code
    other = arguments(1)
    found, eager = graph(*other), call(*other)
    for x, y in zip(
        *((parts,) if isinstance(parts, Tensor) else parts for parts in (found, eager)), strict=True
    ):
        assert same_bits(x, y)
