"""Patched modules: the module that was there, a mode, and the factors of a change of its weights.

A patched module takes the base module's place in the model. It shares the base's parameters, buffers and children under their own
names, so the model's state dict, its parameters and ``model.to(...)`` do not notice it.

Three modes: ``off`` (the base module, bit for bit), ``record`` (a recorder computes the factors from what passes through and applies
them) and ``replay`` (the given factors are applied).
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch import ops
from icl_patch.attachment import Attachment


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody has hooked the module: its forward, or its gradients."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


class Mode(Enum):
    """What a patched module does with its input."""

    OFF = "off"
    RECORD = "record"
    REPLAY = "replay"


class PatchedModule(nn.Module):
    """What the patched modules have in common: the base module, the mode and the recorder."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        if isinstance(base_layer, PatchedModule):
            raise TypeError(f"expected a module that is not patched yet, got {type(base_layer).__name__}")
        # The base's own dictionaries: names stay as they were, and whatever moves or replaces a parameter does it for both.
        self._parameters, self._buffers, self._modules = base_layer._parameters, base_layer._buffers, base_layer._modules
        self._non_persistent_buffers_set = base_layer._non_persistent_buffers_set
        object.__setattr__(self, "base_layer", base_layer)
        self.training, self._version = base_layer.training, base_layer._version
        self.mode = Mode.OFF
        self.recorder: Callable[..., Tensor] | None = None
        self.observer: Callable[..., None] | None = None  # of what is no output of the module's: a router's logits, the choice of experts
        self.attachment: Attachment | None = None  # that the module is part of

    base_layer: nn.Module
    _replay: Callable[..., Tensor]  # what the base module makes of its input with the patch

    _FACTORS: ClassVar[tuple[str, ...]] = ()  # the attributes that hold them
    _STATE: ClassVar[frozenset[str]] = frozenset(("mode", "recorder", "observer"))

    def __setattr__(self, name: str, value: Any) -> None:
        # past torch's bookkeeping of parameters and modules: a decode step sets hundreds of these
        if name in self._STATE:
            object.__setattr__(self, name, value)
        elif name in vars(self.__dict__.get("base_layer", self)) and name not in vars(self) and not hasattr(type(self), name):
            setattr(self.base_layer, name, value)  # where it is read
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "base_layer" not in vars(self):  # while it is being copied or unpickled
                raise
            return getattr(self.base_layer, name)

    def train(self, mode: bool = True) -> "PatchedModule":
        """Set the mode of this module and its base."""
        self.base_layer.train(mode)
        return super().train(mode)

    # What a base saves, loads and moves beside its parameters and buffers (a quantised one's scales, say) goes with them.

    def _save_to_state_dict(self, *args: Any) -> None:
        self.base_layer._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.base_layer._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PatchedModule":
        """Factors follow a move to another device; their dtype is their own."""
        self.base_layer._apply(fn, recurse)
        for name in self._FACTORS:
            factor = getattr(self, name)
            if factor is not None:
                setattr(self, name, factor.to(fn(factor[:0]).device))
        return self

    def record(self, recorder: Callable[..., Tensor]) -> None:
        """Hand every input to ``recorder(module, x)``, which sets the factors and returns the output."""
        self.recorder, self.mode = recorder, Mode.RECORD

    def off(self) -> None:
        """Be the base module again, bit for bit; the factors are dropped."""
        self.recorder, self.mode = None, Mode.OFF

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the base module is called with -> what it returns."""
        if self.mode is Mode.OFF and self.observer is None:
            return self.base_layer(*args, **kwargs)
        attachment = self.attachment
        if attachment is None or attachment.thread == threading.get_ident():
            return self._run(*args, **kwargs)
        with attachment.lock:  # the pass of another thread ends first
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`forward` in the mode that is set; a patch takes one input, under any name."""
        if self.mode is Mode.OFF:
            return self.base_layer(*args, **kwargs)
        if len(args) + len(kwargs) != 1:
            raise TypeError(f"expected one input in a patched {type(self.base_layer).__name__}, got {len(args) + len(kwargs)}")
        (x,) = (*args, *kwargs.values())
        if self.mode is Mode.RECORD:
            assert self.recorder is not None
            return self.recorder(self, x)
        return self._replay(x)

    def _replicate_for_data_parallel(self) -> "PatchedModule":
        raise RuntimeError("expected a model without patched modules in DataParallel, which cannot copy them: call icl_patch.detach first")

    def extra_repr(self) -> str:
        """The base module and the mode."""
        return f"{type(self.base_layer).__name__}({self.base_layer.extra_repr()}), mode={self.mode.value}"


class PatchedLinear(PatchedModule):
    """A linear module with a low-rank change of its weight per token: ``y = base_layer(z) + Σ_r (z·v_r) u_r + Δb``.

    A drop-in for ``nn.Linear``, Conv1D and any other module that maps (..., K) to (..., N) by a matrix. With no patch set it is the
    base module, bit for bit::

        layer = PatchedLinear(model.lm_head)
        layer.set_patch(u, v)      # u (1, R, N), v (1, R, K): the same change for every row; u (M, N), v (M, K): one a row
        layer.update_patch(u, v)   # other numbers in the same places: a captured CUDA graph goes on with them
        merged = layer.merge()     # a plain module with W + Σ_r u_r v_rᵀ, rounded to its dtype
        layer.set_bias_change(bias_change)     # a change of the bias instead
        layer.clear_patch()

    Source: Goldwaser et al. (2025), Lemmas 6, 8 and 9.
    """

    _FACTORS = ("u", "v", "bias_change")
    _STATE = PatchedModule._STATE | {*_FACTORS, "shared", "out_dtype"}

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.u: Tensor | None = None
        self.v: Tensor | None = None
        self.bias_change: Tensor | None = None
        self.shared: bool | None = None
        self.out_dtype: torch.dtype | None = None

    def set_patch(self, u: Tensor, v: Tensor, *, shared: bool | None = None, out_dtype: torch.dtype | None = None) -> None:
        """Apply ``W + u vᵀ`` from now on.

        Args:
            u: shared by all rows (1, R, N); else one per row of the input (..., K): (..., N), or flat (M, N) or (M, R, N). Any float.
            v: the same with K for N.
            shared: whether all rows share it. By default a patch (1, R, N) is; of one sequence (1, T, K) that may as well be a patch for
                each of its T tokens, so there say which: a warning reminds of it.
            out_dtype: of the output; the base module's by default.

        Raises:
            ValueError: u and v do not agree in their leading dimensions, or a patch that is to be shared is not (1, R, N).
        """
        if u.dim() < 2 or u.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"expected u (..., N) and v (..., K) with the same leading dimensions, got {tuple(u.shape)}, {tuple(v.shape)}")
        if shared and (u.dim() != 3 or u.shape[0] != 1):
            raise ValueError(f"expected a patch that all rows share as u (1, R, N) and v (1, R, K), got {tuple(u.shape)}, {tuple(v.shape)}")
        self.off()
        self.u, self.v, self.shared, self.out_dtype, self.mode = u, v, shared, out_dtype, Mode.REPLAY

    def update_patch(self, u: Tensor, v: Tensor) -> None:
        """Copy other factors into those that are set, which keep their places in memory.

        Raises:
            ValueError: no patch is set, or its factors have other shapes; nothing is changed then.
        """
        if self.u is None or self.v is None:
            raise ValueError("expected a patch to update, got a module without one: call set_patch first")
        if u.shape != self.u.shape or v.shape != self.v.shape:
            expected = f"u {tuple(self.u.shape)} and v {tuple(self.v.shape)}"
            raise ValueError(f"expected {expected}, as they were set, got {tuple(u.shape)} and {tuple(v.shape)}")
        with torch.no_grad():
            # v is made ready before u is written: it may fail, or lie where u does
            v = v.to(self.v.device, self.v.dtype, copy=v.untyped_storage().data_ptr() == self.u.untyped_storage().data_ptr())
            self.u.copy_(u)
            self.v.copy_(v)

    def merge(self) -> nn.Module:
        """A copy of the base module with the patch in its parameters: ``W + Σ_r u_r v_rᵀ`` or ``b + Δb``, in fp64, rounded to their dtype.

        Raises:
            TypeError: the base module is not an ``nn.Linear`` or a Conv1D with a plain weight, or somebody hooked it.
            ValueError: the patch is not the same for all rows or does not fit, or a bias is to change and there is none.
        """
        base = self.base_layer
        if type(base) not in (nn.Linear, Conv1D) or type(base.weight) is not nn.Parameter:
            raise TypeError(f"expected an nn.Linear or a Conv1D to merge into, got {type(base).__name__}")
        if is_hooked(base) or "forward" in vars(base):
            raise TypeError(f"expected a {type(base).__name__} that does nothing else to merge into, got one with hooks or another forward")
        changes: dict[str, Tensor] = {}
        if self.u is not None and self.v is not None:
            if self.u.dim() != 3 or self.u.shape[0] != 1 or self.shared is False:
                raise ValueError(f"expected a patch that all rows share, u (1, R, N), got {tuple(self.u.shape)}")
            change = torch.einsum("rn,rk->nk", self.u[0].double(), self.v[0].double())
            changes["weight"] = change.T if type(base) is Conv1D else change
        if self.bias_change is not None:
            if self.bias_change.dim() != 1 or base.bias is None:
                raise ValueError(f"expected a bias and a change (N,) of it, got {base.bias is not None}, {tuple(self.bias_change.shape)}")
            changes["bias"] = self.bias_change
        merged = copy.deepcopy(base)
        with torch.no_grad():
            for name, change in changes.items():
                parameter = getattr(merged, name)
                if change.shape != parameter.shape:
                    raise ValueError(f"expected a change of {name} {tuple(parameter.shape)}, got {tuple(change.shape)}")
                parameter.copy_(parameter.double() + change.double())
        return merged

    def set_bias_change(self, bias_change: Tensor, *, out_dtype: torch.dtype | None = None) -> None:
        """Apply ``b + Δb`` from now on: ``bias_change`` (N,), or one per row of the input (..., K): (..., N) or flat (M, N)."""
        self.off()
        self.bias_change, self.out_dtype, self.mode = bias_change, out_dtype, Mode.REPLAY

    def clear_patch(self) -> None:
        """Drop the patch and be the base module again."""
        self.off()

    def off(self) -> None:
        """Be the base module again, bit for bit; the factors are dropped."""
        super().off()
        self.u = self.v = self.bias_change = self.shared = self.out_dtype = None

    def linear_map(self, z: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The base module's matrix (N, K) and bias, if ``F.linear(z, matrix, bias)`` is all that the module does."""
        base = self.base_layer
        if is_hooked(base) or "forward" in vars(base) or (not z.is_meta and torch.is_autocast_enabled(z.device.type)):
            return None
        weight = base.weight if type(base) in (nn.Linear, Conv1D) else None
        if type(weight) is not nn.Parameter or weight.dtype != z.dtype:
            return None
        bias = base.bias
        assert bias is None or isinstance(bias, Tensor)
        return (weight.T if type(base) is Conv1D else weight), bias

    def plain(self, z: Tensor, rows: int | None = None) -> tuple[Tensor, torch.dtype]:
        """What the patch is added to, (..., K) -> (..., N), and the dtype of the base module's output.

        It is that output, in fp32 before its rounding where our kernels compute it. ``rows``: of how many rows the regime is to be
        (:func:`icl_patch.ops.regime_of`), those of z by default.
        """
        linear = self.linear_map(z)
        if linear is None:
            plain = self.base_layer(z)
            return plain, plain.dtype
        flat = z.reshape(-1, z.shape[-1])
        wide = torch.promote_types(z.dtype, torch.float32)
        regime = ops.regime_of(flat, len(flat) if rows is None else rows)
        y = ops.patched_linear(flat, linear[0], bias=linear[1], out_dtype=wide, regime=regime)
        return y.reshape(*z.shape[:-1], y.shape[-1]), z.dtype

    def _replay(self, z: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.bias_change is not None:
            plain, dtype = self.plain(z)
            return add_bias_change(plain, self.bias_change, self.out_dtype or dtype)
        assert self.u is not None and self.v is not None
        rows = z.reshape(-1, z.shape[-1])
        if self.shared is None and self.u.shape[:-1] == z.shape[:-1] == (1, len(rows)) != (1, 1) and not torch.compiler.is_compiling():
            warnings.warn(
                f"a patch u {tuple(self.u.shape)} of an input {tuple(z.shape)} is taken for one of rank {len(rows)} that all rows share: "
                "say shared=True in set_patch if it is, shared=False if each row has its own",
                stacklevel=2,
            )
        u, v = self._by_row(self.u, z, len(rows)), self._by_row(self.v, z, len(rows))
        linear = self.linear_map(z)
        if linear is not None:
            y = ops.patched_linear(rows, linear[0], u, v, linear[1], out_dtype=self.out_dtype)
        else:
            plain = self.base_layer(z)
            y = ops.add_low_rank(plain.reshape(-1, plain.shape[-1]), rows, u, v, out_dtype=self.out_dtype)
        return y.reshape(*z.shape[:-1], y.shape[-1])

    def _by_row(self, factor: Tensor, z: Tensor, rows: int) -> Tensor:
        """A factor in a form that the ops take: (1, R, ·), (M, R, ·) or (M, ·)."""
        if factor.dim() == 2:
            return factor
        if factor.dim() == 3 and factor.shape[0] == 1 and self.shared is not False:
            return factor
        if factor.shape[:-1] == z.shape[:-1]:
            return factor.flatten(0, -2)
        if factor.dim() != 3 or factor.shape[0] != rows:
            raise ValueError(f"expected factors (1, R, ·), {(*z.shape[:-1], '·')} or flat ({rows}, ·), got {tuple(factor.shape)}")
        return factor


def _is_for(change: Tensor, x: Tensor) -> bool:
    """Whether a change is (n,), or for rows x (..., n) one each: (..., n), or flat (M, n)."""
    return change.shape in (x.shape, x.shape[-1:], (x.shape[:-1].numel(), x.shape[-1]))


def add_bias_change(y: Tensor, bias_change: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``y + Δb`` for rows y (..., N) and Δb (..., N), flat (M, N) or (N,), rounded once to ``out_dtype`` or y's dtype."""
    if not _is_for(bias_change, y):
        raise ValueError(f"expected bias_change {tuple(y.shape)}, flat or ({y.shape[-1]},), got {tuple(bias_change.shape)}")
    wide = torch.promote_types(torch.promote_types(y.dtype, bias_change.dtype), torch.float32)
    bias_change = bias_change if bias_change.dim() == 1 else bias_change.reshape(y.shape)
    return (y.to(wide) + bias_change.to(wide)).to(out_dtype or y.dtype)


class PatchedRMSNorm(PatchedModule):
    """An RMSNorm whose scale differs per token: ``y = m' ⊙ x / sqrt(mean(x²) + eps)``.

    Args:
        base_layer: an RMSNorm with a ``weight`` (n,) and its eps as ``eps`` or ``variance_epsilon``.
        scale_offset: the scale is ``offset + weight`` (1 for Gemma, 0 for Llama).
        cast_first: whether the normalised input is rounded to the model's dtype before it is scaled (Llama) or after (Gemma). Where
            neither is given, both are found by trying the module.

    Raises:
        TypeError: the module has no weight or no eps, or what it does is no RMSNorm.

    Source: Goldwaser et al. (2025), Lemma 10.
    """

    _FACTORS = ("new_scale",)
    _STATE = PatchedModule._STATE | {*_FACTORS}

    def __init__(self, base_layer: nn.Module, *, scale_offset: float | None = None, cast_first: bool | None = None) -> None:
        super().__init__(base_layer)
        eps = getattr(base_layer, "eps", getattr(base_layer, "variance_epsilon", None))
        if eps is None or not isinstance(getattr(base_layer, "weight", None), Tensor):
            raise TypeError(f"expected an RMSNorm with a weight and an eps, got {type(base_layer).__name__}")
        self.eps = float(eps)
        if scale_offset is None and cast_first is None:
            scale_offset, cast_first = _tried_form(base_layer)
        self.scale_offset, self.cast_first = scale_offset or 0.0, cast_first is not False
        self.new_scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """m, the base module's effective scale: (n,) fp32, as the base computes it whatever the model's dtype."""
        weight = self.base_layer.weight
        assert isinstance(weight, Tensor)
        return self.scale_offset + weight.float()

    def normalize(self, x: Tensor) -> Tensor:
        """``Norm(x)`` before the scale, fp32, rounded where the base module rounds."""
        normalized = ops.rms_normalize(x.float(), self.eps)
        return normalized.to(x.dtype).to(normalized.dtype) if self.cast_first else normalized

    def set_patch(self, new_scale: Tensor) -> None:
        """Use the scale m', (..., n) per row or (n,), from now on; an fp64 scale makes the output fp64.

        Raises:
            TypeError: new_scale is not floating.
            ValueError: its last dimension is not n.
        """
        if not new_scale.is_floating_point():
            raise TypeError(f"expected a floating new_scale, got {new_scale.dtype}")
        if new_scale.shape[-1] != self.scale.shape[0]:
            raise ValueError(f"expected new_scale (..., {self.scale.shape[0]}), got {tuple(new_scale.shape)}")
        self.new_scale = new_scale
        self.recorder, self.mode = None, Mode.REPLAY

    def clear_patch(self) -> None:
        """Drop the patch and be the base module again."""
        self.off()

    def off(self) -> None:
        """Be the base module again, bit for bit; the factors are dropped."""
        super().off()
        self.new_scale = None

    def _replay(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        assert self.new_scale is not None
        if not _is_for(self.new_scale, x):
            raise ValueError(f"expected new_scale (n,) or one for each row of x {tuple(x.shape)}, got {tuple(self.new_scale.shape)}")
        return self.apply_scale(x, self.new_scale)

    def apply_scale(self, x: Tensor, new_scale: Tensor) -> Tensor:
        """``m' ⊙ Norm(x)`` in x's dtype, or in fp64 for an fp64 ``m'``; with the base's own scale the base's own bits."""
        normalized = self.normalize(x)
        if new_scale.dim() > 1:
            new_scale = new_scale.reshape(x.shape)
        y = normalized * new_scale.to(torch.promote_types(new_scale.dtype, normalized.dtype))
        return y if new_scale.dtype == torch.float64 else y.to(x.dtype)

    def in_one_launch(self, x: Tensor, new_scale: Tensor | None = None) -> Tensor:
        """``m' ⊙ Norm(x)``, or the base module's output, by our op: theirs to rounding; with the base's scale both have the same bits."""
        rows = x.reshape(-1, x.shape[-1])
        scale, offset = (self.base_layer.weight, self.scale_offset) if new_scale is None else (new_scale.reshape(rows.shape), 0.0)
        assert isinstance(scale, Tensor)
        return ops.rms_norm(rows, scale, self.eps, scale_offset=offset, cast_first=self.cast_first).reshape(x.shape)


def rms_norm_form(module: nn.Module, x: Tensor, made: Tensor) -> tuple[float, bool] | None:
    """``scale_offset`` and ``cast_first`` of an RMSNorm that makes ``made`` of x, bit for bit; None if it is no such norm.

    Raises:
        TypeError: the module has no weight or no eps.
    """
    for scale_offset in (0.0, 1.0):
        for cast_first in (True, False):
            norm = PatchedRMSNorm(module, scale_offset=scale_offset, cast_first=cast_first)
            mine = norm.apply_scale(x, norm.scale)
            if bool(((mine == made) | (mine.isnan() & made.isnan())).all()):
                return scale_offset, cast_first
    return None


def _tried_form(module: nn.Module) -> tuple[float, bool]:
    """:func:`rms_norm_form` on random rows."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    x = torch.randn(3, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    with torch.no_grad():
        form = rms_norm_form(module, x, module(x))
    if form is None:
        raise TypeError(f"expected an RMSNorm of scale w or 1 + w, got {type(module).__name__}, which does something else")
    return form


_Module = TypeVar("_Module", bound=PatchedModule)


def swap(model: nn.Module, path: str, wrap: Callable[[nn.Module], _Module]) -> _Module:
    """Put ``wrap(module)`` in the place of the module at ``path`` and return it."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    patched = wrap(getattr(holder, name))
    setattr(holder, name, patched)
    return patched


def restore(roots: Iterable[nn.Module], patched: PatchedModule) -> bool:
    """Put the base module back wherever the roots hold the patched one, at any depth, and say whether they did."""
    holders = [module for root in roots for module in root.modules()]
    places = [(holder, name) for holder in holders for name, child in holder._modules.items() if child is patched]
    for holder, name in places:
        setattr(holder, name, patched.base_layer)
    return bool(places)
