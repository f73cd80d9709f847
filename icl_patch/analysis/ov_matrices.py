"""``W_VO = W_V W_O`` per head: the map from an attention head's input to its output in the residual
stream.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.linear import LINEAR, matrix_of
from icl_patch.metrics import linf
from icl_patch.models.language_model import layers_of, text_config
from icl_patch.models.model_checks import check_eval
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.tolerances import coarsest, rounding_limit


class _Packing(Enum):
    ALONE = "v"  # the matrix holds values only
    JOINED = "qkv"  # all queries, all keys, all values
    BY_HEAD = "head"  # for each head its query, key and value


# Names of the matrices that make values and outputs, and how values are packed: tried in order, and
# checked on numbers.
_LAYOUTS = (
    ("v_proj", "o_proj", _Packing.ALONE),
    ("v_proj", "out_proj", _Packing.ALONE),
    ("v_proj", "dense", _Packing.ALONE),
    ("c_attn", "c_proj", _Packing.JOINED),
    ("qkv_proj", "o_proj", _Packing.JOINED),
    ("query_key_value", "dense", _Packing.BY_HEAD),
)


@dataclass(frozen=True, eq=False)
class ValueOutput:
    """The value and output matrices of one layer by head, kept as factors; vectors are rows, ``x
    W``.

    Attributes:
        value: W_V (H, d, d_head); heads of one group have the same.
        output: W_O (H, d_head, d).
        bias: ``b_VO = b_V W_O + b_O`` (d,), of all heads together, since the attention weights of a
            head sum to 1.
    """

    value: Tensor
    output: Tensor
    bias: Tensor

    def __len__(self) -> int:
        """The number of heads."""
        return len(self.value)

    def head(self, index: int) -> Tensor:
        """``W_VO = W_V W_O`` of one head: (d, d)."""
        return self.value[index] @ self.output[index]

    def matrices(self) -> Tensor:
        """``W_VO`` of all heads: (H, d, d)."""
        return self.value @ self.output


@torch.no_grad()
def value_output(model: PreTrainedModel, layer: int) -> ValueOutput:
    """``attention(X)_i = Σ_h Σ_j α_ijh x_j W_VO_h + b_VO``, with ``W_VO_h = W_V_h W_O_h`` and
    ``b_VO = b_V W_O + b_O``.

    ``x_j`` is the attention's input: the norm's output, or ``x/σ(x)`` in a model that
    :func:`icl_patch.analysis.norm_folding.fold` has folded; there ``W_VO`` and ``b_VO`` contain the
    norm's centring, scale and bias. With grouped heads, head h has the values of its group. A norm
    after the attention (Gemma) is not included.

    The formula is checked on two tokens. The value matrix's outputs are replaced by integers from 1
    to 255, equal for both, and queries by 0, where possible: the output matrix must read these
    integers, of the first token to the last bit. So no value is clipped, normed or gated, and the α
    of a head sum to 1.

    Args:
        model: a causal language model in eval mode.
        layer: which block; negative ones count from the end.

    Returns:
        The factors, fp32 or fp64, on the weights' device.

    Raises:
        UnsupportedModelError: the attention has another form.
        IndexError: there is no such layer.
        ValueError: the model is training.

    Source: "Folding weights in transformers", Original and Reformulating Self-Attention.
    """
    check_eval(model.modules())
    block = list(layers_of(model).values())[layer]
    config: Any = text_config(model)
    value, output, packing = _find(block)
    heads = int(config.num_attention_heads)
    (weight_v, bias_v), (weight_o, bias_o) = _affine(value), _affine(output)
    if weight_o.shape[0] % heads:
        raise UnsupportedModelError(
            f"expected an output matrix in {type(block).__name__} that {heads} heads divide, got"
            f" {weight_o.shape[0]} columns"
        )
    weight_o = weight_o.unflatten(0, (heads, -1))  # (H, d_head, d)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    columns = _value_columns(weight_v.shape[1], packing, heads, weight_o.shape[1], groups)
    bias = bias_o + torch.einsum("hk,hkd->d", bias_v[columns], weight_o)
    factors = ValueOutput(weight_v[:, columns].transpose(0, 1), weight_o, bias)
    _check(model, block, value, output, columns)
    return factors


def _find(block: nn.Module) -> tuple[nn.Module, nn.Module, _Packing]:
    for value, output, packing in _LAYOUTS:
        attentions = [
            module
            for module in block.modules()
            if isinstance(module._modules.get(value), LINEAR)
            and isinstance(module._modules.get(output), LINEAR)
        ]
        if len(attentions) > 1:
            raise UnsupportedModelError(
                f"expected one attention in {type(block).__name__}, got {len(attentions)}"
            )
        for attention in attentions:
            return attention.get_submodule(value), attention.get_submodule(output), packing
    raise UnsupportedModelError(
        f"expected value and output matrices under a known name in {type(block).__name__}, got"
        f" none of {', '.join(f'{value} and {output}' for value, output, _ in _LAYOUTS)}"
    )


def _affine(module: nn.Module) -> tuple[Tensor, Tensor]:
    """(K, N) and (N,) of a linear map of rows, fp32 at least."""
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    try:
        weight = matrix_of(module).T
    except TypeError as error:
        raise UnsupportedModelError(str(error)) from error
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    return wide, wide.new_zeros(wide.shape[1]) if bias is None else bias.detach().to(wide)


def _value_columns(count: int, packing: _Packing, heads: int, width: int, groups: int) -> Tensor:
    """The columns (H, d_head) of each head's values among the outputs of the matrix that makes
    them.
    """
    if packing is _Packing.BY_HEAD:
        groups = heads
    expected = groups * width if packing is _Packing.ALONE else (heads + 2 * groups) * width
    if count != expected:
        raise UnsupportedModelError(
            f"expected {expected} outputs of the matrix that makes values, got {count}"
        )
    columns = torch.arange(count)
    if packing is _Packing.BY_HEAD:
        return columns.unflatten(0, (heads, 3, width))[:, 2]
    columns = columns[-groups * width :].unflatten(0, (groups, width))
    return columns.repeat_interleave(heads // groups, 0)


def _check(
    model: PreTrainedModel, block: nn.Module, value: nn.Module, output: nn.Module, columns: Tensor
) -> None:
    """Raises UnsupportedModelError unless the block's attention is ``Σ_h Σ_j α_ijh x_j W_VO_h +
    b_VO`` with ``Σ_j α_ijh = 1``.
    """
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # input and output
    # every dtype holds these, and models clip to smaller ones
    values = torch.randint(1, 256, columns.shape, generator=torch.Generator().manual_seed(1))
    values = values[:: len(columns) // len(columns.unique(dim=0))]  # one for each group
    values = values.repeat_interleave(len(columns) // len(values), 0)

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        calls[module] = args[0], out

    def replace(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        keep(module, args, out)
        out = torch.zeros_like(out)  # queries too, if they are here: all scores are 0
        out[..., columns] = values.to(out)
        return out

    attention = next(x for x in block.modules() if value in x._modules.values())
    with ExitStack() as hooks:
        hooks.enter_context(value.register_forward_hook(replace))
        hooks.enter_context(output.register_forward_hook(keep))
        if (query := attention._modules.get("q_proj")) is not None:
            zeros = query.register_forward_hook(lambda _module, _args, out: torch.zeros_like(out))
            hooks.enter_context(zeros)
        model(input_ids=trial_tokens(model, 2, seed=1, starts=[0]), use_cache=False)
    if calls.keys() == {value, output}:
        mixed, expected = calls[output][0], values.flatten().to(calls[output][0])
        if _is_mix(mixed.flatten(0, -2), expected) and all(
            (linf(out, _product(module, x)) <= rounding_limit(model.dtype)).all()
            for module, (x, out) in calls.items()
        ):
            return
    raise UnsupportedModelError(
        f"expected an attention of {type(block).__name__} that is Σ α x W_V W_O + b with α that sum"
        " to 1, got another form, as with clipped values, a gate or sinks: choose another model"
    )


def _is_mix(mixed: Tensor, values: Tensor) -> bool:
    """Whether the attention's sums (2, H d_head) over two tokens with the same values are these."""
    if mixed.shape != (2, len(values)) or not torch.equal(mixed[0], values):
        return False
    # two rounded α; of a softmax in fp32 too
    return bool(linf(mixed[1], values) <= 2 * torch.finfo(coarsest(mixed.dtype, torch.float32)).eps)


def _product(module: nn.Module, x: Tensor) -> Tensor:
    """``x W + b``, fp32 at least."""
    weight, bias = _affine(module)
    return x.to(weight) @ weight + bias
