"""Descriptions of kernel launches, which are launched, interpreted, or compiled ahead of time;
launches of known shapes are cached. And the kernels as operators of ``torch.ops.icl_patch``: for
torch.compile and for fake tensors.
"""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import InitVar, dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from icl_patch.checks import is_traced, serve_negated

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set before triton was
imported.
"""

Memory = tuple[tuple[int, ...], torch.dtype]  # the size and dtype of a tensor


@dataclass(slots=True)
class Launch:
    """One kernel launch without its tensors, for all tensors of the dtypes, sizes and strides that
    it was planned for.

    kernel: takes the input tensors, the output tensors, then ``rest``, constexprs included;
    programs: the size of the grid; inputs: tensors like those to come, or their dtypes, None for an
        absent tensor; outputs: sizes and dtypes, None for an absent one; num_warps, num_stages:
        options of the compiler.
    """

    kernel: Any
    programs: int
    inputs: InitVar[tuple[Tensor | torch.dtype | None, ...]]
    outputs: tuple[Memory | None, ...]
    rest: tuple
    num_warps: int
    num_stages: int = 1
    _dtypes: tuple[torch.dtype | None, ...] = field(init=False)
    _compiled: dict[int, Callable[..., None]] = field(init=False, default_factory=dict)

    def __post_init__(self, inputs: tuple[Tensor | torch.dtype | None, ...]) -> None:
        self._dtypes = tuple(x.dtype if isinstance(x, Tensor) else x for x in inputs)

    def __call__(self, *inputs: Tensor | None) -> Any:
        """Launch on the current stream of the first input's device.

        Returns:
            The output, or a tuple of the outputs.
        """
        assert inputs[0] is not None
        device = inputs[0].device
        outputs = [_allocated(memory, device) for memory in self.outputs]
        if self.programs:
            if INTERPRETED or device.index == torch.cuda.current_device():
                self._run((*inputs, *outputs), device)
            else:
                with torch.cuda.device(device):
                    self._run((*inputs, *outputs), device)
        given = [output for output in outputs if output is not None]
        return given[0] if len(given) == 1 else tuple(given)

    def _run(self, tensors: tuple[Tensor | None, ...], device: torch.device) -> None:
        """Call the compiled kernel directly from the second time on. The compiler specialises on
        the alignment of addresses; all else it looks at is the same for every call.
        """
        aligned = 0
        for tensor in tensors:
            aligned = 2 * aligned + (tensor is not None and not tensor.data_ptr() & 15)
        run = self._compiled.get(aligned)
        if run is not None:
            run(*tensors, *self.rest)
        else:
            compiled = self.kernel[(self.programs,)](*tensors, *self.rest, **self.options)
            if compiled is not None:  # in the interpreter there is none
                self._compiled[aligned] = compiled[(self.programs, 1, 1)]

    @property
    def arguments(self) -> tuple:
        """All arguments of the kernel, with dtypes in place of tensors."""
        return (*self._dtypes, *(known and known[1] for known in self.outputs), *self.rest)

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of the compiler. It may not fuse multiplications with additions: the kernels say
        where, so that the bits do not depend on the compiler's version.
        """
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
        }


def _allocated(memory: Memory | None, device: torch.device) -> Tensor | None:
    if memory is None:
        return None
    size, dtype = memory
    return torch.empty(size, dtype=dtype, device=device)


_launches: dict[tuple, Callable[..., Any]] = {}
_MAX_LAUNCHES = 4096


def cached_launch(
    plan: Callable[..., Callable[..., Any]], tensors: tuple[Tensor | None, ...], *options: Hashable
) -> Any:
    """``plan(*tensors, *options)(*tensors)``, planned once for all tensors of the same sizes,
    strides, dtypes and devices.

    These are all that plans and the compiler see of a tensor, except for its address, which
    :class:`Launch` looks at; and all that checks see of a tensor that is not on the CPU.
    """
    key = (
        plan,
        options,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
    )
    launch = _launches.get(key)
    if launch is None:
        launch = plan(*tensors, *options)
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    return launch(*tensors)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not smaller than ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def needs_op(*tensors: Tensor | None) -> bool:
    """Whether a call must go through torch's dispatcher.

    True under torch.compile and other tracers, on fake tensors, and for tensors with a pending
    negation.
    """
    if is_traced() or torch._C._is_tracing():
        return True
    for x in tensors:  # not any(): this runs before every launch of a decode step
        if x is None:
            continue
        if type(x) not in (Tensor, torch.nn.Parameter) or x.is_neg():
            return True
    return False


_LIBRARY = torch.library.Library("icl_patch", "FRAGMENT")
P = ParamSpec("P")
R = TypeVar("R")


def define(name: str, schema: str, fake: Callable[..., Any], launch: Callable[..., Any]) -> Any:
    """Define the operator ``icl_patch::triton_NAME`` that runs ``launch``; ``fake`` gives the
    outputs' sizes and dtypes.
    """
    name = f"triton_{name}"
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CUDA", "CPU"):  # the CPU in Triton's interpreter
        _LIBRARY.impl(name, launch, device)
    serve_negated(_LIBRARY, name)
    torch.library.register_fake(f"icl_patch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.icl_patch, name)


def operator(
    check: Callable[..., object],
    plan: Callable[..., Callable[..., Any]],
    writes: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an operator of a function. Its body runs on fake tensors alone and gives the outputs'
    sizes and dtypes; its annotations give the schema.

    A call goes straight to the launch, or through the operator where torch has to see it.

    Args:
        check: raises for arguments that do not fit; runs before the plan, in the interpreter before
            every launch. Tensors come first.
        plan: gives the call for the tensors, see :func:`cached_launch`.
        writes: the names of the tensors that it changes.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        total = len(signature.parameters)
        count = sum("Tensor" in str(x.annotation) for x in signature.parameters.values())

        # torch leaves out the last arguments too where they are the defaults
        def complete(*arguments: Any, **named: Any) -> tuple[Any, ...]:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            return bound.args

        def checked_plan(*arguments: Any) -> Callable[..., Any]:
            check(*arguments)
            return plan(*arguments)

        def launch(*arguments: Any) -> Any:
            if INTERPRETED:  # on the CPU a check looks at numbers too, which another call changes
                check(*arguments)
            return cached_launch(checked_plan, arguments[:count], *arguments[count:])

        schema = torch.library.infer_schema(function, mutates_args=writes)
        packet = define(
            function.__name__, schema, function, lambda *given: launch(*complete(*given))
        )

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if named or len(arguments) < total:
                arguments = complete(*arguments, **named)
            if needs_op(*arguments[:count]):
                check(*arguments)
                return packet(*arguments)
            return launch(*arguments)

        return call

    return decorated
