"""In which modules of a model torch's functions are replaced during a decode step."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icl_patch.invariance.arithmetic import InvariantModules
from icl_patch.invariance.functions import ROW_FUNCTIONS

X = torch.randn(5, 77, generator=torch.Generator().manual_seed(0))


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
