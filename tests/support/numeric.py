"""What the tests share to compare numbers: dtypes, rounding units, noise floors, seeded numbers,
bits.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from icl_patch import ContextPatch, ContextPatcher, metrics
from icl_patch.generation.sampling_loop import GenerationStep

FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Half the spacing of the dtype's numbers at 1: the largest relative error of one rounding.
UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
ULP = 2.0**-52
# The spacing of the dtype's numbers at 1: errors of rounding are small multiples of it.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

NARROW = {name: dtype for name, dtype in FLOATS.items() if name != "fp64"}

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
every_dtype = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
every_narrow = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)

# A patched pass rounds in other places than the untouched one: at most 3.1 noise floors apart were
# seen over all families. The same number as in icl_patch.verify.
NOISE_FLOORS = 10


@torch.no_grad()
def noise_floor(
    model: nn.Module, ids: Tensor | None = None, dtype: torch.dtype | None = None, **inputs: Tensor
) -> float:
    """How far rounding alone moves a model's logits on this machine, relative to the largest one.

    The larger L∞ of two other ways to run the untouched model. One runs half of the first row
    alone, which takes other matrix products. The other moves every weight by one spacing of
    ``dtype``, up or
    down: no arithmetic in that dtype can tell this from rounding. Batching may round alike by
    accident, the second way does not, so the floor is never 0.

    Args:
        ids: (B, T); by default three rows of 18 random tokens.
        dtype: of the arithmetic; by default the model's, but fp32 for a model in fp64, because
            norms and softmax of transformers compute in that.
        inputs: further inputs of the model.
    """
    if ids is None:
        ids = torch.randint(1, 90, (3, 18), generator=seeded(91)).to(model.device)
    given = {"use_cache": False, **inputs}
    expected = model(ids, **given).logits
    with moved_weights(model, dtype):
        found = [model(ids, **given).logits]
    if ids.shape[1] > 1:
        half = (slice(1), slice(ids.shape[1] // 2))
        parts = {name: x[half] for name, x in inputs.items()}
        found.append(model(ids[half], use_cache=False, **parts).logits)
    pairs = ((logits, expected[: len(logits), : logits.shape[1]]) for logits in found)
    return max(float(metrics.linf(*pair).max()) for pair in pairs)


def noise_limit(model: nn.Module, *args: Any, **inputs: Any) -> float:
    """The relative error of logits that still passes for rounding: so many noise floors."""
    return NOISE_FLOORS * noise_floor(model, *args, **inputs)


_LIMITS: WeakKeyDictionary[ContextPatcher, float] = WeakKeyDictionary()  # of the untouched models


@torch.no_grad()
def replay_limit(patcher: ContextPatcher, patch: ContextPatch) -> float:
    """The same for a replay: noise floors of the untouched model, or of the patched one where that
    has more. The former is measured once for each patcher, while its model's weights stay the same.

    It has more where a factor divides by something small, such as activations or the weights of
    experts. A patch of two passes was recorded in the replay's own shapes, and rounds as that does.
    """
    limit = _untouched_limit(patcher)
    if patch.passes == 2:
        return limit
    expected = patcher.attached_model.replay(patch)[0]
    with moved_weights(patcher.model):
        off = metrics.linf(patcher.attached_model.replay(patch)[0], expected)[patch.kept_mask]
    return max(limit, NOISE_FLOORS * float(off.max()))


def replay_error(patcher: ContextPatcher, step: GenerationStep) -> Tensor:
    """The error (B,) of the replay of a generated token's patch; 0 for rows that had ended."""
    replayed = patcher.forward(step.patch.kept_ids, step.patch)[:, -1]
    return metrics.linf(replayed, step.logits).masked_fill(~step.live, 0)


def is_noise(off: Tensor, patcher: ContextPatcher, patch: ContextPatch) -> bool:
    """Whether the largest error of a replay is within :func:`replay_limit`. The patched model's
    noise takes two more replays: it is measured only where the untouched one's is not enough.
    """
    return bool(off <= _untouched_limit(patcher)) or bool(off <= replay_limit(patcher, patch))


def _untouched_limit(patcher: ContextPatcher) -> float:
    if patcher not in _LIMITS:
        _LIMITS[patcher] = noise_limit(patcher.model)
    return _LIMITS[patcher]


@contextmanager
def moved_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Every weight is one spacing of ``dtype`` up or down, in random directions, until the block
    ends.
    """
    dtype = dtype or (torch.float32 if model.dtype == torch.float64 else model.dtype)
    rng = seeded(0)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for x in model.parameters():
        if type(x) is nn.Parameter:  # others are quantised
            up_or_down = torch.randn(x.shape, generator=rng).sign().to(x.device, torch.float64)
            near = (x.double() * (1 + 2 * UNIT[dtype] * up_or_down)).to(x.dtype)
            moved[x] = nn.Parameter(near, requires_grad=False)
    holders = [module._parameters for module in model.modules()]
    kept = [(own, name, x) for own in holders for name, x in own.items() if x in moved]
    try:
        for holder, name, x in kept:
            holder[name] = moved[x]
        yield
    finally:
        for holder, name, x in kept:
            holder[name] = x


def within_roundings(got: Tensor, expected: Tensor, roundings: float, size: Tensor) -> bool:
    """Whether rounding explains it: ``|got - expected| ≤ roundings · unit(got.dtype) · size``.

    A sum of K products is within K roundings of the sum of their absolute values, which is its
    ``size``, in whatever order a machine adds them up.
    """
    off = (got.double() - expected.double()).abs()
    return bool((off <= roundings * UNIT[got.dtype] * size.double()).all())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The numbers as integers: tells -0 from 0, and a NaN equals itself."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def poisoned(x: Tensor) -> Tensor:
    """The same numbers between NaNs: rows that are further apart and do not begin where a vector
    load would like them to.
    """
    wide = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    return wide[tuple(slice(1, size + 1) for size in x.shape)].copy_(x)


def by_columns(x: Tensor) -> Tensor:
    """The same numbers with the last but one dimension contiguous, as a Conv1D stores its
    weight.
    """
    return x.mT.contiguous().mT


def in_gaps(x: Tensor) -> Tensor:
    """The same numbers with a NaN after each, of integers a -1."""
    gap = torch.nan if x.is_floating_point() else -1
    wide = torch.full([2 * size for size in x.shape], gap, dtype=x.dtype, device=x.device)
    return wide[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)


def negated(x: Tensor) -> Tensor:
    """The same numbers as a view of those with the other sign, as the imaginary part of a conjugate
    is.
    """
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg()
    return view


def numbers_of_threads(*counts: int) -> Iterator[int]:
    """For as many turns as there are counts torch has that many threads."""
    before = torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold huge numbers or NaN until they are written: those that torch allocates, and
    those that the native ops do.
    """
    perturb = -6  # glibc's M_PERTURB: allocated bytes are the complement
    allocator = ctypes.CDLL(None)
    assert allocator.mallopt(perturb, 0x80)
    # 4,000 bytes: glibc may serve less than 1,033 from a thread's cache, which it does not fill.
    assert (torch.empty(1000) > 3e38).all() and (torch.empty(4000, dtype=torch.int8) == 127).all()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        allocator.mallopt(perturb, 0)


FLOATING = "expected {} in fp64, fp32, bf16 or fp16, got torch.{}"


def check_refused(error: type, message: str, call: Callable[[], object]) -> None:
    """The error itself, not a subclass, with the message somewhere in it."""
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert type(raised.value) is error
