"""Folding norms into the linear maps that follow them, for an analysis of the weights.

Source: "Folding weights in transformers", the reformulation used in "Weight-based Analysis of
Detokenization in Language Models". Its vectors are rows, ``x W``; a weight of ``nn.Linear`` is the
transpose of its ``W``.
"""

import functools
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.linear import LINEAR
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.models.language_model import random_tokens
from icl_patch.tolerances import rounding_limit

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class UncentredLayerNorm(nn.Module):
    """``y = x / σ(x)``, with ``σ(x) = sqrt(mean((x - mean x)²) + eps)``: the remaining part of a
    folded LayerNorm.

    Computed in fp32 at least and rounded once to the dtype of x. Source: "Folding weights in
    transformers", the new LN.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.var(-1, correction=0, keepdim=True) + self.eps)).to(x.dtype)


@dataclass(frozen=True)
class NormForm:
    """The formula of a norm: ``y = (offset + weight) ⊙ (x - centred · mean x) / sqrt(mean square +
    eps) + bias``.
    """

    centred: bool
    offset: float
    eps: float


@dataclass(frozen=True)
class FoldedNorm:
    """A norm that was folded: its path, its formula, and the paths of the linear maps that it was
    folded into.
    """

    path: str
    form: NormForm
    readers: tuple[str, ...]


class Folding:
    """A model with folded norms, until :meth:`restore` or the end of the ``with`` block.

    Attributes:
        folded: the norms that were folded, in the model's order.
        refused: the reason for every norm that was left as it is, by its path.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.folded: tuple[FoldedNorm, ...] = ()
        self.refused: dict[str, str] = {}
        # holder, name, original, replacement
        self._undo: list[tuple[dict[str, Any], str, Any, Any]] = []

    def __enter__(self) -> "Folding":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put back the parameters and norms that were there, the same objects: bit-exact, or as the
        model was moved since.

        Restoring twice is fine.

        Raises:
            ValueError: a :class:`~icl_patch.ContextPatcher` is attached to the folded model, or it
                was folded again: first undo that.
        """
        if self._undo:
            _require_unpatched(self.model)
        last = {(id(holder), name): value for holder, name, _, value in self._undo}
        if any(holder[name] is not last[id(holder), name] for holder, name, _, _ in self._undo):
            raise ValueError(
                f"expected {type(self.model).__name__} as it was folded, it was changed since:"
                " restore a later folding first"
            )
        self._undo_down_to(0)

    def _undo_down_to(self, count: int) -> None:
        while len(self._undo) > count:
            holder, name, original, value = self._undo.pop()
            if isinstance(original, nn.Parameter):
                original.data = original.data.to(value.device, value.dtype)
            holder[name] = original

    def _put(self, holder: dict[str, Any], name: str, value: Any) -> None:
        self._undo.append((holder, name, holder[name], value))
        holder[name] = value

    def _fold(self, norm: FoldedNorm) -> None:
        module = self.model.get_submodule(norm.path)
        weight, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(weight, Tensor)
        scale = norm.form.offset + weight.double()
        for path in norm.readers:
            self._fold_reader(self.model.get_submodule(path), scale, bias, norm.form.centred)
        if norm.form.centred:
            uncentred = UncentredLayerNorm(norm.form.eps).train(module.training)
            for parent in list(self.model.modules()):
                for name, child in list(parent._modules.items()):
                    if child is module:
                        self._put(parent._modules, name, uncentred)
            return
        neutral = torch.full_like(weight, 1.0 - norm.form.offset)
        self._put(module._parameters, "weight", nn.Parameter(neutral, weight.requires_grad))
        if bias is not None:
            self._put(
                module._parameters, "bias", nn.Parameter(torch.zeros_like(bias), bias.requires_grad)
            )

    def _fold_reader(
        self, reader: nn.Module, scale: Tensor, norm_bias: Tensor | None, centred: bool
    ) -> None:
        weight, bias = reader._parameters["weight"], reader._parameters["bias"]
        assert weight is not None
        matrix = _columns(reader)  # (N, K)
        folded = matrix * scale
        if centred:
            folded = folded - folded.mean(1, keepdim=True)
        folded = folded.T if isinstance(reader, Conv1D) else folded
        self._put(
            reader._parameters,
            "weight",
            nn.Parameter(folded.to(weight.dtype).contiguous(), weight.requires_grad),
        )
        if norm_bias is not None:
            shift = matrix @ norm_bias.double()
            total = shift if bias is None else bias.double() + shift
            self._put(
                reader._parameters,
                "bias",
                nn.Parameter(total.to(weight.dtype), weight.requires_grad),
            )


@torch.inference_mode(False)  # what is made here can be trained elsewhere
@torch.no_grad()
def fold(model: PreTrainedModel) -> Folding:
    """Fold norms into the linear maps that follow: the model computes the same, with ``LN(x) =
    x/σ(x)``, ``RMSNorm(x) = x/rms(x)``.

    For a linear map ``y = z W + b`` of the output of a norm with scale ``m`` and bias ``β``, with
    ``d`` the width::

        LayerNorm   W' = (I - 11ᵀ/d) diag(m) W,    b' = β W + b
        RMSNorm     W' = diag(m) W                 (Gemma: m = 1 + weight)

    The products are taken in fp64 and rounded once to the weight's dtype, so logits agree to
    rounding. :class:`UncentredLayerNorm` replaces a LayerNorm; an RMSNorm keeps its module, with a
    neutral weight. A linear map without a bias gets one if ``β`` needs it. :meth:`Folding.restore`
    puts all original objects back::

        with fold(model) as folding:
            folding.folded, folding.refused
            ov_matrices.value_output(model, 0).head(3)   # W_VO of the folded weights
            with ContextPatcher(model) as patcher: ...   # patches of the folded model

    A pass over a few tokens shows the linear maps that read a norm's output, and its logits are
    compared after each norm. By name refused, and left as they are, with the reason in
    :attr:`Folding.refused`:

    - a norm with an output that no linear map reads, such as Gemma's post-norms;
    - a norm with an output that is read elsewhere too, which the logits show: by a residual sum
      (post-LN models), by rotary embeddings, by a linear map that has other inputs;
    - a norm that does not run, or that is none of the formulas above;
    - a reader that shares its weight with another module, such as a tied output embedding: folding
      would make the two drift apart (untie them first);
    - a reader with a quantised weight.

    Args:
        model: a causal language model in eval mode, without a patcher attached.

    Returns:
        The folding, a context manager.

    Raises:
        UnsupportedModelError: no norm can be folded.
        ValueError: the model is training, or a patcher is attached.

    Source: "Folding weights in transformers", Reformulating LayerNorm and Self-Attention.
    """
    _require_unpatched(model)
    if model.training:
        raise ValueError("expected a model in eval mode, got one that is training")
    candidates = [path for path, module in model.named_modules() if _is_norm(module)]
    ids = random_tokens(model, 7, seed=0)
    expected, readers = _run_and_watch(model, ids, candidates)
    folding = Folding(model)
    tied = _tied(model)
    try:
        for path in candidates:
            form, reads = norm_form(model.get_submodule(path)), readers.get(path)
            reason = _reason(model, reads, form, tied)
            if reason is None and form is not None and reads is not None:
                made = len(folding._undo)
                folding._fold(norm := FoldedNorm(path, form, tuple(reads)))
                error = (model(input_ids=ids, use_cache=False).logits - expected).abs().max()
                if error <= rounding_limit(model.dtype) * expected.abs().max():
                    folding.folded += (norm,)
                    continue
                folding._undo_down_to(made)
                reason = f"the model computes something else with it folded, {float(error):.1e} off"
            folding.refused[path] = str(reason)
        if not folding.folded:
            refused = "; ".join(f"{path}: {why}" for path, why in folding.refused.items())
            raise UnsupportedModelError(
                f"{type(model).__name__} has no norm that can be folded: {refused or 'it has none'}"
            )
    except BaseException:
        folding.restore()
        raise
    return folding


def _run_and_watch(
    model: PreTrainedModel, ids: Tensor, norms: Sequence[str]
) -> tuple[Tensor, dict[str, list[str]]]:
    """The logits of a pass, and the linear maps that read the output of every norm that ran, or
    whole rows of it: each by its path.
    """
    readers: dict[str, list[str]] = {}
    outputs: dict[int, tuple[str, Tensor]] = {}  # by the address; a tensor keeps it its own

    def note_output(path: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        readers.setdefault(path, [])
        outputs[output.untyped_storage().data_ptr()] = path, output

    def note_reader(path: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        norm, output = outputs.get(x.untyped_storage().data_ptr(), (None, x))
        if norm is not None and x.shape[-1] == output.shape[-1] and path not in readers[norm]:
            readers[norm].append(path)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path in norms:
                noting = functools.partial(note_output, path)
                hooks.callback(module.register_forward_hook(noting).remove)
            elif isinstance(module, LINEAR):
                reading = functools.partial(note_reader, path)
                hooks.callback(module.register_forward_pre_hook(reading).remove)
        return model(input_ids=ids, use_cache=False).logits, readers


@torch.no_grad()
def norm_form(norm: nn.Module) -> NormForm | None:
    """How a norm computes: the formula that gives its output on random numbers up to rounding, or
    None.
    """
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), _eps(norm)
    assert isinstance(weight, Tensor) and eps is not None
    x = 0.7 + 2 * torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    try:
        output = norm(x).double()
    except TypeError:  # it has other inputs too, such as a gate
        return None
    # the sums in fp32; and in the dtype the normalised x, the scale, their product and the bias
    limit = 16 * torch.finfo(torch.float32).eps + 4 * torch.finfo(weight.dtype).eps
    for centred, offset in itertools.product((False, True), (0.0, 1.0)):
        wide = x.double()
        wide = wide - wide.mean(-1, keepdim=True) if centred else wide
        rms = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        expected = wide / rms * (offset + weight.double())
        expected = expected if bias is None else expected + bias.double()
        if (output - expected).abs().max() <= limit * expected.abs().max():
            return NormForm(centred, offset, eps)
    return None


def _eps(norm: nn.Module) -> float | None:
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    return float(eps) if isinstance(eps, float) else None


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 1
        and weight.dtype in _FLOATS
        and not module._modules
        and _eps(module) is not None
    )


def _tied(model: nn.Module) -> dict[str, str]:
    """For every module that shares its weight with another module: the name of the other."""
    owners: dict[tuple[int, torch.Size], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault((parameter.data_ptr(), parameter.shape), []).append(name)
    return {
        name.rpartition(".")[0]: next(other for other in names if other != name)
        for names in owners.values()
        if len(names) > 1
        for name in names
    }


def _reason(
    model: nn.Module, readers: list[str] | None, form: NormForm | None, tied: dict[str, str]
) -> str | None:
    """Why a norm cannot be folded, or None."""
    if readers is None:
        return "it does not run in a pass over tokens"
    if not readers:
        return "no linear map reads its output"
    if form is None:
        return "it is neither a LayerNorm nor an RMSNorm"
    for path in readers:
        weight = model.get_submodule(path)._parameters.get("weight")
        if weight is None or not weight.is_floating_point() or weight.dtype not in _FLOATS:
            return f"{path} has no weight in fp64, fp32, bf16 or fp16"
        if path in tied:
            return f"{path}.weight is tied to {tied[path]}: the two would drift apart"
    return None


def _require_unpatched(model: nn.Module) -> None:
    if any(isinstance(module, PatchedModule) for module in model.modules()):
        raise ValueError(
            f"expected a model without patched modules, {type(model).__name__} has some: detach the"
            " patcher first"
        )


def _columns(module: nn.Module) -> Tensor:
    """The weight of a linear map as (N, K) fp64."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().double().T if isinstance(module, Conv1D) else weight.detach().double()
