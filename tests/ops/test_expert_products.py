"""``expert_linear`` in the implementation that runs here; ``test_dispatch.py`` checks the rest."""

import itertools

import pytest
import torch
from support import expert_products
from support.inversion import needs_native
from support.numeric import every_dtype, numbers_of_threads, poisoned_memory, same_bits

from icl_patch import ops
from icl_patch.ops import reference


@needs_native
@pytest.mark.parametrize("grad", [True, False])
@every_dtype
def test_products(dtype: torch.dtype, grad: bool) -> None:
    """With gradients on, the arguments are checked first; without, they are tried."""
    with torch.set_grad_enabled(grad), poisoned_memory():
        expert_products.check_products(ops.expert_linear, dtype, bits=dtype != torch.float64)


@needs_native
def test_threads_do_not_change_a_bit() -> None:
    of = expert_products.case((9, 4, 6, 515, 1000), torch.bfloat16, False, True)
    alone = ops.expert_linear(*of[:4])
    for _ in numbers_of_threads(1, 2, 3):
        assert same_bits(ops.expert_linear(*of[:4]), alone)


@needs_native
def test_a_slot_has_the_bits_of_the_plain_map() -> None:
    of = expert_products.case((5, 2, 3, 33, 257), torch.bfloat16, True, True)
    out = ops.expert_linear(*of[:4])
    for row, slot in itertools.product(range(5), range(2)):
        own = {"weight": of.weight[of.expert[row, slot]], "bias": of.bias[of.expert[row, slot]]}
        alone = ops.patched_linear(of.x[row, slot : slot + 1], **own, path="gemv")
        assert same_bits(out[row, slot], alone[0])


def test_what_nobody_can_look_at_is_not_another_experts() -> None:
    """Where the experts are traced, one that there is not gives 0 or an error."""
    of = expert_products.case((3, 2, 4, 5, 7), torch.float32, False, True)
    for wrong in (-1, 4):
        out = reference.expert_linear(
            of.x, of.weight, of.expert.clone().fill_(wrong), of.bias, torch.float32, gather=True
        )
        assert not out.any()
