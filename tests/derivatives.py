"""What is derived from an op, and mapped over it, in whichever implementation serves it."""

import torch
from numeric import normal, seeded
from torch import Tensor

from icl_patch import ops

Z, WEIGHT, U, V = (normal(seeded(number), *shape) for number, shape in enumerate(((3, 5), (4, 5), (3, 4), (3, 5))))
TANGENT = normal(seeded(9), 3, 5)
FUNCTIONS = {
    "patched_linear": lambda z: ops.patched_linear(z, WEIGHT, U, V),
    "add_low_rank": lambda z: ops.add_low_rank(U, z, U, V),
    "record_linear": lambda z: ops.record_linear(torch.cat([z, V]), WEIGHT)[0],
    "read_direction": lambda z: ops.read_direction(z).v,
    "rms_norm": lambda z: ops.rms_norm(z, V[0], 1e-6),
    "norm_pair": lambda z: ops.norm_pair(torch.cat([z, V]), V[0], 1e-6).z_pair,
    "gated_product": lambda z: ops.gated_product(z, V, "silu"),
}


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def check_derivatives(name: str) -> None:
    """Forwards, backwards and by torch.func, against differences in fp64 where gradients are recorded and where they are not."""
    function = FUNCTIONS[name]
    z = Z.double().requires_grad_(False)
    step = 1e-6 * TANGENT.double()
    expected = ((function(z + step) - function(z - step)) / 2e-6).float() if name != "record_linear" else None
    jacobian = torch.func.jacrev(function)(Z)
    along = torch.einsum("ijkl,kl->ij", jacobian, TANGENT)
    assert expected is None or near(along, expected), name
    assert along.abs().max() > 0, name
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
