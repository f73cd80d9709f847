"""The arithmetics that a model can run in: its own, with or without autocast, and one in which rows
do not see their batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from icl_patch import ops
from icl_patch.invariance.functions import (
    ATTENTION,
    ONE_TOKEN_ATTENTION,
    ROW_FUNCTIONS,
    is_own,
)
from icl_patch.layers.attachment import turn_of
from icl_patch.layers.device_hooks import input_device
from icl_patch.layers.product_interception import Replacing
from icl_patch.layers.rms_norm import rms_norms
from icl_patch.models.attention_mask import padding_sees_nothing
from icl_patch.models.forward_override import Forward, ForwardOverrides, FusedModule
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.tolerances import coarsest

NATIVE, BATCH_INVARIANT = "model", "batch_invariant"
_AUTOCAST = "autocast "
ARITHMETICS = (NATIVE, BATCH_INVARIANT, *(_AUTOCAST + name for name in ("bfloat16", "float16")))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Models in these dtypes can run in the batch-invariant arithmetic."""


def reason_against(model: PreTrainedModel) -> str | None:
    """Why a model cannot run in the batch-invariant arithmetic, or None."""
    device = input_device(model).type
    reasons = {
        f"it runs in {model.dtype}": model.dtype not in DTYPES,
        "autocast is enabled": torch.is_autocast_enabled(device),
        f"icl_patch has no kernels for {device}": not ops.has_kernels(device),
        "it has recurrent layers, which see padding": is_recurrent(model),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def arithmetic_here(model: PreTrainedModel) -> str:
    """The arithmetic of the model's own calls at this place: under autocast or without."""
    device = input_device(model).type
    if not torch.is_autocast_enabled(device):
        return NATIVE
    return _AUTOCAST + str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def rounding_dtype(arithmetic: str, model: PreTrainedModel) -> torch.dtype:
    """The dtype with the fewest digits in which a model's functions round in an arithmetic."""
    if not arithmetic.startswith(_AUTOCAST):
        return model.dtype
    return coarsest(model.dtype, getattr(torch, arithmetic.removeprefix(_AUTOCAST)))


@contextmanager
def running_in(
    arithmetic: str, model: PreTrainedModel, *, attention: bool = False
) -> Iterator[None]:
    """Within this context a model's calls in this thread run in an arithmetic. The batch-invariant
    one of a model is one thread's at a time.

    Args:
        arithmetic: ``"model"``: torch's functions, as the model calls them, without autocast.
            ``"autocast bfloat16"`` and ``"autocast float16"``: the same under autocast.
            ``"batch_invariant"``: products, activations and RMSNorms in which a row's bits do not
            depend on other rows.
        model: the model.
        attention: whether attention is batch-invariant for several tokens a row too, not for one
            alone. A token without a context attends to itself, and needs none of that.
    """
    if arithmetic != BATCH_INVARIANT:
        dtype = None if arithmetic == NATIVE else getattr(torch, arithmetic.removeprefix(_AUTOCAST))
        with torch.autocast(input_device(model).type, dtype, enabled=dtype is not None):
            yield
        return
    table = {**ROW_FUNCTIONS, **(ATTENTION if attention else ONE_TOKEN_ATTENTION)}
    masks = padding_sees_nothing() if attention else nullcontext()
    # No ExitStack: after an interrupt during its exit the remaining contexts never end. A
    # generator's contexts end when it is collected.
    # The turn comes first: the norms' forwards of another thread's call would be in the way.
    with turn_of(model), masks, _products(), Replacing(table), ForwardOverrides(_norms(model)):
        yield


def _norms(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Forward]]:
    """The RMSNorms of a model, with forwards that take one launch each."""
    for norm in rms_norms(model):
        yield norm.base_layer, FusedModule(norm.base_layer, norm.in_one_launch)


@contextmanager
def _products() -> Iterator[None]:
    """Within this context our products do not see their batch, and autocast is off."""
    with _autocast_off("cpu"), _autocast_off("cuda"), ops.gemv_products():
        yield


def _autocast_off(device: str) -> AbstractContextManager[Any]:
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


class _Noting(Replacing):
    """Calls ``note`` before each call of torch that is replaced by another."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__(ROW_FUNCTIONS)
        self.note = note

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self.table and not is_own(function, args):
            self.note()
        return super().__torch_function__(function, types, args, kwargs)


class InvariantModules:
    """Runs a model's decode steps in the batch-invariant arithmetic, without attention.

    A mode of torch takes time at each call of torch, thousands a step. So only the first step runs
    in one as a whole. It notes the modules with code that calls a function to replace. Later steps
    enter the mode in these modules only, and in those that the first step did not reach.

    Args:
        model: the model.
        mixtures: modules that always run in the mode, because their calls depend on the tokens.
    """

    def __init__(self, model: nn.Module, mixtures: Iterable[nn.Module]) -> None:
        self._model = model
        self._found = set(mixtures)
        # of the modules found; None in the first step
        self._overrides: ForwardOverrides | None = None
        self._forwards: dict[nn.Module, Forward] = {}  # theirs, within this step
        self._mode = Replacing(ROW_FUNCTIONS)
        self._running: list[nn.Module] = []  # the modules that run, the innermost last

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context a step runs in the arithmetic."""
        if self._overrides is not None:
            self._forwards = {module: module.forward for module in self._found}
            with _products(), self._overrides:
                yield
            return
        reached: set[nn.Module] = set()
        modules = list(self._model.modules())
        noting = _Noting(lambda: self._found.add(self._running[-1]))
        followed = [(module, self._followed(module, reached)) for module in modules]
        with _products(), noting, ForwardOverrides(followed):
            yield
        self._found.update(module for module in modules if module not in reached)
        self._overrides = ForwardOverrides(
            (module, self._in_mode(module)) for module in self._found
        )

    def _followed(self, module: nn.Module, reached: set[nn.Module]) -> Forward:
        """The module's forward, which notes that it runs."""
        forward = module.forward

        def followed(*args: Any, **kwargs: Any) -> Any:
            reached.add(module)
            self._running.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return followed

    def _in_mode(self, module: nn.Module) -> Forward:
        """The module's forward in the mode, which a module inside it does not enter again."""

        def replaced(*args: Any, **kwargs: Any) -> Any:
            forward = self._forwards[module]
            if self._running:
                return forward(*args, **kwargs)
            self._running.append(module)
            try:
                with self._mode:
                    return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return replaced
