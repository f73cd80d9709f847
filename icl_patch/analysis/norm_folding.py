"""Folding norms into the linear maps that follow them, for an analysis of the weights.

Source: "Folding weights in transformers", the reformulation used in "Weight-based Analysis of
Detokenization in Language Models". Its vectors are rows, ``x W``; a weight of ``nn.Linear`` is the
transpose of its ``W``.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from icl_patch.analysis.norm_readers import depends_on_its_sum, hidden, inputs_of_a_pass
from icl_patch.dtypes import FLOATS
from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.linear import LINEAR
from icl_patch.layers.patched_module import PatchedModule, has_hooks
from icl_patch.models.model_checks import check_eval
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.tolerances import rounding_limit


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


@dataclass(frozen=True)
class Folding:
    """The norms of a model after :func:`fold`.

    folded: the norms that were folded, in the model's order; refused: the reason for every norm
    that was left as it is, by its path.
    """

    folded: tuple[FoldedNorm, ...]
    refused: dict[str, str]


@contextmanager
def fold(model: PreTrainedModel) -> Iterator[Folding]:
    """Within this context norms are folded into the linear maps that follow: the model computes the
    same, with ``LN(x) = x/σ(x)``, ``RMSNorm(x) = x/rms(x)``.

    For a linear map ``y = z W + b`` of the output of a norm with scale ``m`` and bias ``β``, with
    ``d`` the width::

        LayerNorm   W' = (I - 11ᵀ/d) diag(m) W,    b' = β W + b
        RMSNorm     W' = diag(m) W                 (Gemma: m = 1 + weight)

    The products are taken in fp64 and rounded once to the weight's dtype, so logits agree to
    rounding. :class:`UncentredLayerNorm` replaces a LayerNorm; an RMSNorm keeps its module, with a
    neutral weight. A linear map without a bias gets one if ``β`` needs it, and one that shares its
    weight, such as a tied output embedding, gets one of its own. At the end all original objects
    are put back; the model must not be moved until then::

        with fold(model) as folding:
            folding.folded, folding.refused
            ov_matrices.value_output(model, 0).head(3)   # W_VO of the folded weights
            with ContextPatcher(model) as patcher: ...   # patches of the folded model

    A pass over a few tokens shows the linear maps that read a norm's output. In a second one the
    norm's output, and the parameters that would change, are NaN for everything else: logits without
    a NaN prove that nothing else reads them, in every dtype and at every depth. By name refused,
    and left as they are, with the reason in :attr:`Folding.refused`:

    - a norm with an output that no linear map reads, such as Gemma's post-norms;
    - a norm with an output that is read elsewhere too: by a residual sum (post-LN models), by
      experts, by rotary embeddings, by a linear map that has other inputs;
    - a norm that does not run, or that is none of the formulas above;
    - a norm that has hooks, or whose readers have some;
    - a reader with a quantised or offloaded weight.

    Args:
        model: a causal language model in eval mode, without a patcher attached.

    Yields:
        What was folded.

    Raises:
        UnsupportedModelError: no norm can be folded.
        ValueError: the model is training, or a patcher is attached, at the beginning or at the end.

    Source: "Folding weights in transformers", Reformulating LayerNorm and Self-Attention.
    """
    with ExitStack() as undo:
        yield _folded(model, undo)
        _require_unpatched(model)


@torch.inference_mode(False)  # so that a caller can train the folded weights
@torch.no_grad()
def _folded(model: PreTrainedModel, undo: ExitStack) -> Folding:
    _require_unpatched(model)
    check_eval(model.modules())
    candidates = [path for path, module in model.named_modules() if _is_norm(module)]
    ids = trial_tokens(model, 7, seed=0)
    expected, inputs = inputs_of_a_pass(model, ids, candidates)
    folded, refused = [], {}
    for path in candidates:
        # None if the norm did not run
        readers = [x for x, read in inputs.items() if path in read] if path in inputs else None
        form, reason = _examine(model, path, readers, inputs)
        if form is not None and readers is not None and reason is None:
            norm = FoldedNorm(path, form, tuple(readers))
            with ExitStack() as attempt:
                reason = _fold_on_trial(model, norm, ids, expected, attempt)
                if reason is None:
                    undo.push(attempt.pop_all())
                    folded.append(norm)
                    continue
        refused[path] = str(reason)
    if not folded:
        reasons = "; ".join(f"{path}: {why}" for path, why in refused.items())
        raise UnsupportedModelError(
            f"expected a norm that can be folded in {type(model).__name__}, got"
            f" {reasons or 'a model without norms'}"
        )
    return Folding(tuple(folded), refused)


def _fold_on_trial(
    model: PreTrainedModel, norm: FoldedNorm, ids: Tensor, expected: Tensor, undo: ExitStack
) -> str | None:
    """Fold one norm if the model then computes the same; else why not, and ``undo`` puts all
    back.
    """
    with hidden(model, norm.path, norm.readers):
        if model(input_ids=ids, use_cache=False).logits.isnan().any():
            return (
                f"its output, or a parameter of it or of {', '.join(norm.readers)}, is also read"
                " elsewhere"
            )
    _fold(model, norm, undo)
    error = (model(input_ids=ids, use_cache=False).logits - expected).abs().max()
    if error <= rounding_limit(model.dtype) * expected.abs().max():
        return None
    return f"the model computes something else with it folded, {float(error):.1e} off"


def _fold(model: PreTrainedModel, norm: FoldedNorm, undo: ExitStack) -> None:
    """Fold one norm; ``undo`` puts the same objects back."""

    def put(holder: dict[str, Any], name: str, value: Any) -> None:
        undo.callback(holder.__setitem__, name, holder[name])
        holder[name] = value

    def put_parameter(module: nn.Module, name: str, value: Tensor, like: Tensor) -> None:
        value = value.to(like.dtype).contiguous()
        put(module._parameters, name, nn.Parameter(value, like.requires_grad))

    module = model.get_submodule(norm.path)
    scale, shift = module.weight, getattr(module, "bias", None)
    assert isinstance(scale, Tensor)
    for path in norm.readers:
        reader = model.get_submodule(path)
        weight, bias = reader._parameters["weight"], reader._parameters["bias"]
        assert weight is not None
        transposed = isinstance(reader, Conv1D)
        matrix = weight.double().T if transposed else weight.double()  # (N, K)
        folded = matrix * (norm.form.offset + scale.double())
        if norm.form.centred:
            folded = folded - folded.mean(1, keepdim=True)
        put_parameter(reader, "weight", folded.T if transposed else folded, weight)
        if shift is not None:
            added = matrix @ shift.double()
            put_parameter(reader, "bias", added if bias is None else added + bias.double(), weight)
    if norm.form.centred:
        uncentred = UncentredLayerNorm(norm.form.eps).train(module.training)
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if child is module:
                    put(parent._modules, name, uncentred)
        return
    put_parameter(module, "weight", torch.full_like(scale, 1.0 - norm.form.offset), scale)
    if shift is not None:
        put_parameter(module, "bias", torch.zeros_like(shift), shift)


@torch.no_grad()
def norm_form(norm: nn.Module) -> NormForm | None:
    """The formula that gives a norm's output on random numbers up to rounding in fp32, or None."""
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), _eps(norm)
    assert isinstance(weight, Tensor) and eps is not None
    dtype = torch.promote_types(weight.dtype, torch.float32)
    wide = {name: x.to(dtype) for name, x in norm.named_parameters()}
    x = 0.7 + 2 * torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, dtype)
    try:
        output = functional_call(norm, wide, x).double()
    except TypeError:  # it has other inputs too, such as a gate
        return None
    # the sums; the normalised x, the scale, their product and the bias
    limit = 20 * torch.finfo(torch.float32).eps
    for centred, offset in itertools.product((False, True), (0.0, 1.0)):
        z = x.double()
        z = z - z.mean(-1, keepdim=True) if centred else z
        rms = (z.square().mean(-1, keepdim=True) + eps).sqrt()
        expected = z / rms * (offset + weight.double())
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
        and weight.dtype in FLOATS
        and not module._modules
        and _eps(module) is not None
    )


def _examine(
    model: nn.Module, path: str, readers: list[str] | None, inputs: dict[str, set[str | None]]
) -> tuple[NormForm | None, str | None]:
    """The formula of a norm, and why it cannot be folded, or None."""
    norm = model.get_submodule(path)
    if readers is None:
        return None, "it does not run in a pass over tokens"
    if not readers:
        return None, "no linear map reads its output"
    for name in (path, *readers):
        if has_hooks(model.get_submodule(name)):
            whose = "it has" if name == path else f"{name}, which reads its output, has"
            return None, f"{whose} hooks, which would get other numbers: remove them first"
    for name in readers:
        if inputs[name] != {path}:
            return None, f"{name}, which reads its output, has other inputs too"
        reader = model.get_submodule(name)
        weight = reader._parameters.get("weight")
        if weight is None or weight.is_meta or weight.dtype not in FLOATS:
            return None, f"{name} has no weight in fp64, fp32, bf16 or fp16 in memory"
        if type(reader) not in LINEAR and not depends_on_its_sum(reader):
            return None, f"{name}, {type(reader).__name__}, is no function of W z + b alone"
    form = norm_form(norm)
    return form, None if form else "it is neither a LayerNorm nor an RMSNorm"


def _require_unpatched(model: nn.Module) -> None:
    if any(isinstance(module, PatchedModule) for module in model.modules()):
        raise ValueError(
            f"expected a model without patched modules, got a {type(model).__name__} with some:"
            " detach the patcher first"
        )
