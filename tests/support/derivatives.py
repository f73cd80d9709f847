"""What is derived from an op, and mapped over it, in whichever implementation serves it."""

from collections.abc import Callable

import torch
from support.numeric import UNIT, normal, seeded
from torch import Tensor

from icl_patch import ops

Z, WEIGHT, U, V = (
    normal(seeded(number), *shape, dtype=torch.float32)
    for number, shape in enumerate(((3, 5), (4, 5), (3, 4), (3, 5)))
)
TANGENT = normal(seeded(9), 3, 5, dtype=torch.float32)
EXPERT = torch.tensor([[1, 0], [0, 1], [1, 1]])


def _of(op: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The op of z with the other tensors, in z's dtype."""
    return lambda z: op(z, *(x.to(z.dtype) for x in (WEIGHT, U, V)))


FUNCTIONS = {
    "patched_linear": _of(lambda z, w, u, v: ops.patched_linear(z, w, u, v)),
    "add_low_rank": _of(lambda z, w, u, v: ops.add_low_rank(u, z, u, v)),
    "record_linear": _of(lambda z, w, u, v: ops.record_linear(torch.cat([z, v]), w)[0]),
    "expert_linear": _of(
        lambda z, w, u, v: ops.expert_linear(z, torch.stack([w, -2 * w]), EXPERT)[:, 0]
    ),
    "read_direction": _of(lambda z, w, u, v: ops.read_direction(z).v),
    "rms_norm": _of(lambda z, w, u, v: ops.rms_norm(z, v[0], 1e-6)),
    "norm_pair": _of(lambda z, w, u, v: ops.norm_pair(torch.cat([z, v]), v[0], 1e-6).z_pair),
    "decode_attention": _of(
        lambda z, w, u, v: ops.decode_attention(
            z.unsqueeze(1),
            torch.stack([v, -v], 1).unsqueeze(1),
            torch.stack([z, v], 1).unsqueeze(1),
        ).squeeze(1)
    ),
    "gated_product": _of(lambda z, w, u, v: ops.gated_product(z, v, "silu")),
}


def near(found: Tensor, expected: Tensor) -> bool:
    """In fp32: a derivative is two sums of at most ten products, of results that are rounded sums
    themselves.
    """
    return bool(
        (found - expected).abs().max() <= 4 * 10**2 * UNIT[torch.float32] * expected.abs().max()
    )


def check_derivatives(name: str) -> None:
    """Forwards, backwards and by torch.func, against differences in fp64 where gradients are
    recorded and where they are not.
    """
    function = FUNCTIONS[name]
    z, step = Z.double(), 1e-6 * TANGENT.double()
    expected = ((function(z + step) - function(z - step)) / 2e-6).float()
    jacobian = torch.func.jacrev(function)(Z)
    along = torch.einsum("ijkl,kl->ij", jacobian, TANGENT)
    assert jacobian.dtype == torch.float32
    assert near(along, expected), name
    assert not near(1.0001 * along, expected), name
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert near(torch.func.jvp(function, (Z,), (TANGENT,))[1], along), (name, grad)
    z = Z.clone().requires_grad_()
    made = function(z)
    (found,) = torch.autograd.grad(made, z, torch.ones_like(made))
    assert near(found, jacobian.sum((0, 1))), name


def check_mapped(name: str) -> None:
    """``vmap`` over a stack is the op on each."""
    stack = torch.stack([Z, Z + TANGENT])
    with torch.no_grad():
        found = torch.func.vmap(FUNCTIONS[name])(stack)
        assert near(found, torch.stack([FUNCTIONS[name](z) for z in stack])), name
