"""How a kernel is described before it runs: the same description is launched, interpreted or compiled ahead of time."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set before triton was imported."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Launch:
    """One kernel launch.

    kernel: the kernel; programs: how many; arguments: all of them in the kernel's order, constexprs included; num_warps, num_stages: how
    it is compiled.
    """

    kernel: Any
    programs: int
    arguments: tuple
    num_warps: int
    num_stages: int = 1
    compiled: dict[int, Any] = field(init=False, default_factory=dict)

    def __call__(self, device: torch.device) -> None:
        """Run it on the device's current stream."""
        self.with_tensors(device)

    def with_tensors(self, device: torch.device, *tensors: Tensor | None) -> None:
        """Run it with more arguments before those it has.

        From its second time on such a launch goes straight to the compiled kernel: of all that the compiler looks at, only the alignment
        of the tensors can differ.
        """
        if not self.programs:
            return
        if INTERPRETED or device.index == torch.cuda.current_device():
            self._run(tensors)
        else:
            with torch.cuda.device(device):
                self._run(tensors)

    def _run(self, tensors: tuple[Tensor | None, ...]) -> None:
        aligned = 0
        for tensor in tensors:
            aligned = 2 * aligned + (tensor is not None and not tensor.data_ptr() & 15)
        compiled = self.compiled.get(aligned)
        if compiled is None:
            self.compiled[aligned] = self.kernel[(self.programs,)](*tensors, *self.arguments, **self.options)
        else:
            compiled[(self.programs, 1, 1)](*tensors, *self.arguments)

    def without(self, count: int) -> "Launch":
        """The same without its first arguments, for :meth:`with_tensors`."""
        return replace(self, arguments=self.arguments[count:])

    @property
    def options(self) -> dict[str, int | bool]:
        """For the compiler. It fuses no multiply with an add: the kernels say where, so the bits do not depend on its version."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}


def ceil_div(a: int, b: int) -> int:
    """``⌈a / b⌉``."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not smaller than ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def check(good: bool, what: str, got: object, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` with what was expected and what came."""
    if not good:
        raise error(f"expected {what}, got {tuple(got) if isinstance(got, torch.Size) else got}")


def check_floats(first: Tensor, **tensors: Tensor | None) -> None:
    """fp32, bf16 or fp16, on the device of ``first``, which the kernels run on."""
    wanted = "cpu" if INTERPRETED else "cuda"
    if first.device.type != wanted and not torch.compiler.is_compiling():
        raise ValueError(f"expected tensors on {wanted}, got {first.device}")
    for name, tensor in tensors.items():
        if tensor is not None:
            check(tensor.dtype in FLOATS, f"{name} in fp32, bf16 or fp16", tensor.dtype, TypeError)
            check(tensor.device == first.device, f"{name} on {first.device}", tensor.device)


def needs_op(*tensors: Tensor | None) -> bool:
    """Whether a call must go through torch's dispatcher: under torch.compile and any other tracer, on fake tensors, and for gradients."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    gradients = torch.is_grad_enabled()
    return any(x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or (gradients and x.requires_grad)) for x in tensors)
