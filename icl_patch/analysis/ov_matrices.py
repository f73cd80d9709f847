"""``W_VO = W_V W_O`` per head: the map from an attention head's input to its output in the residual
stream.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.linear import LINEAR
from icl_patch.models.language_model import layers_of, text_config
from icl_patch.models.model_checks import check_eval
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.tolerances import rounding_limit


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

    The formula is checked against the layer on one token, for which every α is 1.

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
    weight_o, bias_o = _affine(output)
    if weight_o.shape[0] % heads:
        raise UnsupportedModelError(
            f"expected an output matrix in {type(block).__name__} that {heads} heads divide, got"
            f" {weight_o.shape[0]} columns"
        )
    weight_o = weight_o.unflatten(0, (heads, -1))  # (H, d_head, d)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    weight_v, bias_v = _values(*_affine(value), packing, heads, weight_o.shape[1], groups)
    factors = ValueOutput(weight_v, weight_o, bias_o + torch.einsum("hk,hkd->d", bias_v, weight_o))
    _check(model, block, value, output, factors)
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
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    if not weight.is_floating_point():
        raise UnsupportedModelError(
            f"expected a floating weight in {type(module).__name__}, got {weight.dtype}: load the"
            " model without quantisation"
        )
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    wide = wide.T if isinstance(module, nn.Linear) else wide
    return wide, wide.new_zeros(wide.shape[1]) if bias is None else bias.detach().to(wide)


def _values(
    weight: Tensor, bias: Tensor, packing: _Packing, heads: int, width: int, groups: int
) -> tuple[Tensor, Tensor]:
    """W_V (H, d, d_head) and b_V (H, d_head) out of the matrix that makes them, (d, N) and (N,)."""
    both = torch.cat([weight, bias[None]])  # (d + 1, N)
    if packing is _Packing.BY_HEAD:
        groups = heads
    expected = groups * width if packing is _Packing.ALONE else (heads + 2 * groups) * width
    if both.shape[1] != expected:
        raise UnsupportedModelError(
            f"expected {expected} outputs of the matrix that makes values, got {both.shape[1]}"
        )
    if packing is _Packing.BY_HEAD:
        both = both.unflatten(1, (heads, 3, width))[:, :, 2]
    else:
        both = both[:, -groups * width :].unflatten(1, (groups, width))
    both = both.transpose(0, 1).repeat_interleave(heads // groups, 0)  # (H, d + 1, d_head)
    return both[:, :-1], both[:, -1]


def _check(
    model: PreTrainedModel,
    block: nn.Module,
    value: nn.Module,
    output: nn.Module,
    factors: ValueOutput,
) -> None:
    """Raises UnsupportedModelError unless the block's attention on one token is ``Σ_h x W_VO_h +
    b_VO``.
    """
    recorded: list[Tensor] = []
    with (
        value.register_forward_pre_hook(lambda _module, args: recorded.append(args[0])),
        output.register_forward_hook(lambda _module, _args, out: recorded.append(out)),
    ):
        model(input_ids=trial_tokens(model, 1, seed=1, starts=[0]), use_cache=False)
    if len(recorded) == 2:
        x, y = (tensor.flatten().to(factors.value) for tensor in recorded)
        expected = torch.einsum("d,hdk,hke->e", x, factors.value, factors.output) + factors.bias
        limit = rounding_limit(model.dtype) * expected.abs().max()
        if (y - expected).abs().max() <= limit:
            return
    raise UnsupportedModelError(
        f"expected an attention of {type(block).__name__} that is x W_V W_O + b on one token, got"
        " another form"
    )
