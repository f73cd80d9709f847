"""Every op as a function of tensors, in whichever implementation serves it: registered with torch,
traced on real tensors, derived, and mapped over.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.numeric import UNIT, normal, same_bits, seeded
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

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


def _norm_pair(z: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    pair = ops.norm_pair(z, v[0], 1e-5)
    return pair.z_pair, pair.delta, *pair.direction[:2]


def _record_linears(z: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    direction = ops.read_direction(z[2:])
    recorded = ops.record_linears(z, [(w, b), (-w, b)], direction=direction)
    return tuple(x for of in recorded for x in of)


def _mask(z: Tensor) -> Tensor:
    seen = [[True, False], *[[True, True]] * (ROWS - 1)]
    return torch.tensor(seen, device=z.device)


def _column(z: Tensor, number: int) -> Tensor:
    return torch.tensor([number], device=z.device)


def _decode(z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    key, value = (torch.stack([x, -x], 1).unsqueeze(1) for x in (v, u))
    return ops.decode_attention(z.unsqueeze(1), key, value)


def _attention(z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Of two keys and values, of which the first row sees one."""
    key, value = (torch.stack([x, -x], 1).unsqueeze(1) for x in (v, u))
    return ops.attention_pair(z.unsqueeze(1), key, value, _column(z, 1), _mask(z))


def _written(z: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The same; the second key and value are written before, into the first column too."""
    keys, values = (torch.stack([x, -x], 1).unsqueeze(1) for x in (v, u))
    query, key, column = z[:, None, None], 2 * keys[:, :, 1:], _column(z, 0)
    return ops.write_and_attend(query, keys, values, key, 2 * u, column, _mask(z)), keys, values


def _rotary(z: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Of three heads of two numbers, for each row another angle."""
    query = z[:, None, :6].unflatten(-1, (3, 2)).transpose(1, 2)
    return ops.rotary_embedding(query, 2 * query[:, :1], v[:, None, :2], v[:, None, 2:4])


NAMES = ("z", "w", "u", "v", "b", "pool_u", "pool_v", "index")  # of the arguments
CALLS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "patched_linear": lambda z, w, u, v, b, **_: ops.patched_linear(z, w, u, v, b),
    "patched_linear, a pool": lambda z, w, b, pool_u, pool_v, index, **_: ops.patched_linear(
        z, w, pool_u, pool_v, b, index=index
    ),
    "patched_linear, plain": lambda z, w, **_: ops.patched_linear(z, w),
    "patched_linear, in fp16": lambda z, w, u, v, **_: ops.patched_linear(
        z, w, u, v, out_dtype=torch.float16
    ),
    "add_low_rank, apart": lambda z, w, b, pool_u, pool_v, index, **_: ops.patched_linear(
        z, w, pool_u, pool_v, b, index=index, path="gemm"
    ),
    "record_linear": lambda z, w, b, **_: ops.record_linear(z, w, b)[:2],
    "record_linears": lambda z, w, b, **_: _record_linears(z, w, b),
    "add_low_rank": lambda z, u, v, **_: ops.add_low_rank(u, z, u, v),
    "add_low_rank, in fp16": lambda z, u, v, **_: ops.add_low_rank(
        u, z, u, v, out_dtype=torch.float16
    ),
    "expert_linear": lambda z, w, index, **_: ops.expert_linear(
        z, torch.stack([w, -w, 2 * w, w]), index.unsqueeze(1) + 1
    ),
    "expert_linear, in fp16": lambda z, w, b, index, **_: ops.expert_linear(
        z, w[None], 0 * index[:, None], b[None], out_dtype=torch.float16
    ),
    "read_direction": lambda z, **_: tuple(ops.read_direction(z)[:2]),
    "rms_norm": lambda z, v, **_: ops.rms_norm(z, v, 1e-5),
    "norm_pair": lambda z, v, **_: _norm_pair(z, v),
    "gated_product": lambda z, v, **_: ops.gated_product(z, v, "silu"),
    "gated_product, by tanh": lambda z, v, **_: ops.gated_product(z, v, "gelu_tanh"),
    "decode_attention": lambda z, u, v, **_: _decode(z, u, v),
    "attention_pair": lambda z, u, v, **_: _attention(z, u, v),
    "write_and_attend": lambda z, u, v, **_: _written(z, u, v),
    "rotary_embedding": lambda z, v, **_: _rotary(z, v),
    "invert_rmsnorm": lambda z, u, v, **_: ops.invert_rmsnorm(z, v, u[:, 0].abs()).hidden,
    "stable_scale": lambda z, v, **_: ops.stable_scale(z, v[0], v).u,
}


def call(name: str, given: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return CALLS[name](**dict(zip(NAMES, given, strict=True)))


# the native library's, whatever serves the products
NATIVE = ("invert_rmsnorm", "stable_scale")


class Operators(TorchDispatchMode):
    """Notes the calls of operators of the native library and of Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "icl_patch":
            self.seen.append((function, args, kwargs or {}))
        return function(*args, **kwargs or {})


def check_registered(name: str, device: str = "cpu") -> None:
    """What torch.compile and fake tensors see of the operators that serve the op."""
    with torch.no_grad(), Operators() as found:
        call(name, [x.to(device) for x in arguments(0)])
    assert found.seen
    for function, args, kwargs in found.seen:
        torch.library.opcheck(function, args, kwargs)


def check_traced(name: str) -> None:
    """Through ``make_fx`` the op's node is in the graph, and nothing of the first run's numbers."""
    op = name.partition(",")[0]
    graph = make_fx(lambda *given: call(name, given))(*arguments(0))
    triton = dispatch.backend == "triton" and op not in NATIVE
    if op.startswith("record_linear"):
        op = "record_linears" if triton else "record_linear"
    expected = f"icl_patch.{'triton_' if triton else ''}{op}.default"
    assert expected in [str(node.target) for node in graph.graph.nodes], graph.code
    other = arguments(1)
    found, eager = graph(*other), call(name, other)
    assert all(map(same_bits, _parts(found), _parts(eager)))


def _parts(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def check_compiled() -> None:
    """A compiled graph of all ops has the operators that run without it, and their bits. A
    transform of torch.func in it has none of those that cannot be transformed.
    """
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        targets = [str(node.target).split(".") for node in graph.graph.nodes]
        graphs.append([target[1] for target in targets if target[0] == "icl_patch"])
        return graph

    def everything(*given: Tensor) -> list[Tensor]:
        return [x for name in CALLS for x in _parts(call(name, given))]

    given = arguments(0)
    with torch.no_grad():
        compiled = torch.compile(everything, fullgraph=True, backend=backend)
        found, expected = compiled(*given), everything(*given)
        assert all(map(same_bits, found, expected))
        with Operators() as ran:
            everything(*given)
        assert graphs == [[function.name().split("::")[1] for function, *_ in ran.seen]]
        function, stack = _of("write_and_attend"), torch.stack([given[0], -given[0]])
        mapped = torch.compile(torch.func.vmap(function), fullgraph=True, backend=backend)
        assert near(mapped(stack), torch.stack([function(z) for z in stack]))
        assert graphs[1:] == [[]]


def _record_norm(z: Tensor, w: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    y_pair, update, direction, *_ = ops.record_norm(z, u[:2], v[:2], w[0], 1e-5)
    return y_pair, update, *direction[:2]


CONSTANT = {name: CALLS[name] for name in NATIVE}
CONSTANT["record_norm"] = lambda z, w, u, v, **_: _record_norm(z, w, u, v)


def check_without_derivatives() -> None:
    """Ops whose results are not differentiable: they are constants, backwards and forwards, with
    the bits of inference.
    """
    for function in CONSTANT.values():
        for dtype in (torch.float32, torch.float64):
            given = [x.to(dtype) if x.is_floating_point() else x for x in arguments(0)]

            def results(*first: Tensor, of: Any = function, given: Any = given) -> Any:
                return _parts(of(**dict(zip(NAMES, [*first, *given[len(first) :]], strict=True))))

            with torch.no_grad():
                expected = results()
            found = results(*[x.clone().requires_grad_() for x in given[:5]])
            assert not any(x.requires_grad for x in found)
            assert all(map(same_bits, found, expected))
            with torch.autograd.forward_ad.dual_level():
                dual = [torch.autograd.forward_ad.make_dual(x, x) for x in given[:5]]
                found = [torch.autograd.forward_ad.unpack_dual(x) for x in results(*dual)]
            assert [x.tangent for x in found] == [None] * len(found)
            _, tangents = torch.func.jvp(results, (given[0],), (given[0],))
            assert not any(map(torch.count_nonzero, tangents))


DIFFERENTIABLE = [name for name in CALLS if name not in NATIVE and "in fp16" not in name]


def read_by(name: str) -> list[int]:
    """The places of the op's arguments but for the index."""
    read = inspect.signature(CALLS[name]).parameters.keys() - {"index"}
    return [place for place, argument in enumerate(NAMES) if argument in read]


def _of(name: str, place: int = 0) -> Callable[[Tensor], Tensor]:
    """The op's results as a function of one argument, in its dtype."""
    given = arguments(0)

    def function(x: Tensor) -> Tensor:
        own = [y.to(x.dtype) if y.is_floating_point() else y for y in given]
        out = call(name, [*own[:place], x, *own[place + 1 :]])
        return out if isinstance(out, Tensor) else torch.cat([y.flatten() for y in out])

    return function


def near(found: Tensor, expected: Tensor) -> bool:
    """In fp32: a derivative is two sums of at most ten products, of results that are rounded sums
    themselves.
    """
    size = expected.abs().max()
    return bool((found - expected).abs().max() <= 400 * UNIT[torch.float32] * size)


def check_derivatives(name: str, place: int = 0) -> None:
    """Forwards, backwards and by torch.func, against differences in fp64 where gradients are
    recorded and where they are not; in z, or the argument in another place.
    """
    function, z = _of(name, place), arguments(0)[place]
    tangent = normal(seeded(9), *z.shape, dtype=torch.float32)
    wide, step = z.double(), 1e-6 * tangent.double()
    expected = ((function(wide + step) - function(wide - step)) / 2e-6).float()
    jacobian = torch.func.jacrev(function)(z)
    along = torch.tensordot(jacobian, tangent, tangent.dim())
    assert jacobian.dtype == torch.float32
    assert near(along, expected), name
    assert not near(1.0001 * along, expected), name
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert near(torch.func.jvp(function, (z,), (tangent,))[1], along), (name, grad)
    leaf = z.clone().requires_grad_()
    out = function(leaf)
    pulled = normal(seeded(8), *out.shape, dtype=torch.float32)
    (found,) = torch.autograd.grad(out, leaf, pulled)
    assert near(found, torch.tensordot(pulled, jacobian, pulled.dim())), name


def check_mapped(name: str) -> None:
    """``vmap`` over a stack is the op on each."""
    function, stack = _of(name), torch.stack([arguments(seed)[0] for seed in (0, 1)])
    with torch.no_grad():
        found = torch.func.vmap(function)(stack)
        assert near(found, torch.stack([function(z) for z in stack])), name
