"""Two CUDA devices that are not there: the CPU computes in their place, and what CUDA refuses is
refused.

``ICL_PATCH_OPS=torch pytest -p pretend_cuda -m gpu`` runs tests of a device on it. A storage says
which device its tensors claim to be on; one that was made inside an operator says nothing and goes
with any. Tensors of two devices do not mix. A graph takes down what is dispatched while it is
captured, takes back what that wrote, and at a replay does it again on what lies in the same places
by then; a capture neither looks at a number nor copies between devices. A compiler gives back what
it was given. Streams and events do nothing, no kernel runs, and no time means anything.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses import fake_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from icl_patch.generation import region_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# What waits for the device, as the host looks at a number.
LOOKS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero"}
LOOKS |= {"_unique2", "unique_dim", "bincount"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"copy_", "_to_copy", "_copy_from", "set_"}
# What only CUDA computes.
COMPUTED = {torch.ops.aten.mm.dtype: lambda x, y, dtype: x.to(dtype) @ y.to(dtype)}

real_device = torch._C.TensorBase.device.__get__
real_to, real_numpy = Tensor.to, Tensor.numpy


def is_real(x: Any) -> bool:
    traced = (fake_tensor.FakeTensor, FunctionalTensor)
    real = isinstance(x, Tensor) and not isinstance(x, traced)
    return real and x.untyped_storage().device == CPU


def tensors_of(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def claim_of(x: Tensor) -> str | None:
    return getattr(x.untyped_storage(), "claim", None)


def claim(x: Tensor, device: str) -> Tensor:
    if is_real(x):
        x.untyped_storage().claim = device
    return x


def name_of(device: Any) -> str:
    device = torch.device(device)
    return f"cuda:{device.index or 0}" if device.type == "cuda" else device.type


def device_of(x: Tensor) -> torch.device:
    claimed = claim_of(x) if is_real(x) else None
    return real_device(x) if claimed in (None, "cpu") else torch.device(claimed)


class Capture(list[Callable[[], None]]):
    """What to do at a replay, and what to take back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.overwritten: list[tuple[Tensor, Tensor]] = []


class PretendCuda(TorchDispatchMode):
    """Every operator passes through here."""

    def __init__(self) -> None:
        super().__init__()
        self.capture: Capture | None = None
        self.target: str | None = None  # of a copy between devices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        call = COMPUTED.get(func, func)
        tensors = tensors_of((args, kwargs))
        asked = None if kwargs.get("device") is None else name_of(kwargs["device"])
        if asked == "meta" or not all(map(is_real, tensors)):
            return func(*args, **kwargs)
        if asked is not None:
            kwargs["device"] = CPU
        claims = [claim_of(x) for x in tensors]
        on_cuda = next((claimed for claimed in claims if claimed not in (None, "cpu")), None)
        self.check(
            name, tensors, claims if asked is None or name != "_to_copy" else [*claims, asked]
        )
        capture, self.capture = self.capture, None
        try:
            if capture is not None:
                capture.overwritten += [(x, x.clone()) for x in written(func, args, kwargs)]
            out = call(*args, **kwargs)
        finally:
            self.capture = capture
        made = [x for x in tensors_of(out) if not any(x is y for y in tensors)]
        if asked == "cpu" and name != "_to_copy":
            asked = None
        device = self.target or asked or on_cuda or ("cpu" if "cpu" in claims else None)
        for x in made:
            if device is not None and claim_of(x) is None:
                claim(x, device)
        if capture is not None:
            capture.append(lambda: again(call, args, kwargs, made))
        return out

    def check(self, name: str, tensors: list[Tensor], claims: list[str | None]) -> None:
        """Raise what CUDA would."""
        devices = {claimed for claimed in claims if claimed not in (None, "cpu")}
        indexing = name in INDEXING
        mask = indexing and any(x.dtype == torch.bool for x in tensors[1:])
        if devices and self.capture is not None and (name in LOOKS or mask or "cpu" in claims):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        others = [x for x, of in zip(tensors, claims, strict=False) if of == "cpu" and x.dim()]
        indices = indexing and all(x.dtype in (torch.int64, torch.bool) for x in others)
        mixed = len(devices) > 1 or (devices and others and not indices)
        if mixed and name not in COPIES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, {name} got {claims}"
            )

    @contextmanager
    def copying_to(self, device: str) -> Iterator[None]:
        synchronize()
        self.target = device
        try:
            yield
        finally:
            self.target = None


MODE = PretendCuda()


def written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    arguments = func._schema.arguments
    given = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    pairs = zip(given, arguments, strict=True)
    return tensors_of([value for value, argument in pairs if argument.is_write])


def again(call: Any, args: tuple, kwargs: dict, made: list[Tensor]) -> None:
    new = tensors_of(call(*args, **kwargs))
    for x, y in zip(made, new[len(new) - len(made) :], strict=True):
        if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
            x.copy_(y)


class Moved(torch.autograd.Function):
    """A copy between devices, whose gradient goes back to where its input was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
        ctx.was = name_of(device_of(x)), x.dtype
        return move(x, device, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return move(gradients[0], *ctx.was), None, None


def move(
    x: Tensor,
    device: Any = None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    **layout: Any,
) -> Tensor:
    have = name_of(device_of(x))
    want = have if device is None else name_of(device)
    if want == "meta":
        return real_to(x, device)
    if want == have:
        return real_to(x, dtype or x.dtype, copy=copy, **layout)
    if x.requires_grad and torch.is_grad_enabled():
        return Moved.apply(x, want, dtype or x.dtype)
    with MODE.copying_to(want):
        device = torch.device(want)
        copied = torch.ops.aten._to_copy(x, dtype=dtype or x.dtype, device=device, **layout)
        return claim(copied, want)


def to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if not is_real(self):
        return real_to(self, *args, copy=copy, **kwargs)
    if args and isinstance(args[0], Tensor):
        return move(self, args[0].device, args[0].dtype, copy)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    layout = {} if memory_format is None else {"memory_format": memory_format}
    return move(self, device, dtype, copy, **layout)


def numpy(self: Tensor, **kwargs: Any) -> Any:
    if device_of(self).type == "cuda":
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    return real_numpy(self, **kwargs)


def claiming(make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory called from Python, whose tensors are on the CPU unless it is told otherwise."""

    def made(*args: Any, **kwargs: Any) -> Any:
        x = make(*args, **kwargs)
        return claim(x, "cpu") if is_real(x) and claim_of(x) is None else x

    return made


def claiming_data(make: Callable[..., Any], empty: Callable[..., Tensor]) -> Callable[..., Any]:
    """``torch.tensor`` and the like, which would take their numbers to the device themselves."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Any:
        # which a device context has a say in
        wanted = empty(0) if device is None else empty(0, device=device)
        if isinstance(data, Tensor):
            return move(data, device, kwargs.get("dtype"))
        return claim(
            make(data, device=CPU if is_real(wanted) else wanted.device, **kwargs),
            name_of(device_of(wanted)),
        )

    return made


class Stream:
    """All work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, other: "Stream") -> None: ...
    def synchronize(self) -> None:
        synchronize()


class CUDAGraph:
    """See the module."""

    def __init__(self) -> None:
        self.work: Capture | None = None

    def capture_begin(self) -> None:
        if self.work is not None or MODE.capture is not None:
            raise RuntimeError("expected one capture at a time and one for a graph")
        MODE.capture = Capture()

    def capture_end(self) -> None:
        self.work, MODE.capture = MODE.capture, None
        with torch.no_grad():
            for x, before in reversed(self.work.overwritten):
                x.copy_(before)

    def replay(self) -> None:
        with torch.no_grad():
            for step in self.work:
                step()


@contextmanager
def graph(into: CUDAGraph, **_: Any) -> Iterator[None]:
    into.capture_begin()
    try:
        yield
    finally:
        into.capture_end()


def synchronize(_: Any = None) -> None:
    if MODE.capture is not None:
        raise RuntimeError("operation not permitted when stream is capturing: synchronize")


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def pytest_configure() -> None:
    """From here on there is a device."""
    _device._device_constructors()  # knows the factories by what they are now
    empty = torch.empty
    makers = "empty zeros ones full rand randn randint arange eye linspace randperm"
    for name in makers.split():
        setattr(torch, name, claiming(getattr(torch, name)))
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, claiming_data(getattr(torch, name), empty))
    torch.compile = lambda function, **_: function
    region_compiler.BACKEND = lambda module, _: module
    fake_tensor.init_gpu_context = always(None)
    # a traced graph makes its tensors on the CPU, as this does
    functorch_config.fake_tensor_prefer_device_type = "cuda"

    Tensor.device = property(device_of)
    Tensor.is_cuda = property(lambda x: device_of(x).type == "cuda")
    Tensor.is_cpu = property(lambda x: device_of(x).type == "cpu")
    Tensor.get_device = lambda x: -1 if device_of(x).index is None else device_of(x).index
    Tensor.to, Tensor.numpy = to, numpy
    Tensor.type_as = lambda x, other: to(x, other)
    Tensor.cuda, Tensor.cpu = (lambda x, _=None: move(x, CUDA)), (lambda x: move(x, CPU))

    pretended = {"is_available": True, "is_initialized": True, "device_count": 2}
    pretended |= {"_lazy_init": None, "empty_cache": None, "current_stream": Stream()}
    pretended |= {"current_device": 0, "get_device_capability": (9, 0)}
    pretended |= {"get_device_name": "a pretended device"}
    for name, value in pretended.items():
        setattr(torch.cuda, name, always(value))
    torch.cuda.is_current_stream_capturing = lambda: MODE.capture is not None
    torch.cuda.synchronize = synchronize
    torch.cuda.stream = torch.cuda.device = nullcontext
    torch.cuda.Stream, torch.cuda.CUDAGraph, torch.cuda.graph = Stream, CUDAGraph, graph

    torch._C._ensureCUDADeviceGuardSet()
    # of what writes down what is called, which this does not
    depth = torch._C._len_torch_dispatch_stack
    torch._C._len_torch_dispatch_stack = lambda: (
        depth() - (MODE in _get_current_dispatch_mode_stack())
    )
    MODE.__enter__()
