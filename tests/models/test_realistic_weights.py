"""Models with the features of trained weights: the features are there, forms are read as they are
on random weights, and numbers beyond the range of fp16 are refused as such.
"""

from dataclasses import asdict

import pytest
import torch
from support.excited_neuron import residual_after
from support.models import shallow
from support.numeric import EPSILON
from support.realistic_weights import (
    NORM_SCALES,
    OVERFLOWING,
    SIZE,
    SIZES,
    Features,
    attention_on_first,
    build,
    matrices_of,
    returning_attention,
    rows,
)
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher, UnsupportedModelError
from icl_patch.evaluation import tiny_models
from icl_patch.models.block_detection import blocks_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of each kind of writer, a Conv1D, a multiplier, a fused gate, experts, norms behind experts and
# after the sum, no MLP. The others run with the stress tests.
FAMILIES = ("llama", "gemma3", "gpt2", "granitemoe", "phi3", "gemma4-moe", "opt-post-norm", "mamba")
families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FAMILIES else [pytest.mark.stress])
        for family in tiny_models.SUPPORTED
    ],
)

FEATURES = {"neuron", "attention", "norms", "tied", "dependent rows", "near ties"}
# What a family cannot have, and why.
MISSING = {
    "mamba": {"neuron": "its blocks have no MLP", "attention": "it has none"},
}


@torch.no_grad()
def features_of(model: PreTrainedModel, features: Features) -> set[str]:
    """The features that a model has, measured on its weights and activations."""
    ids = rows(model, torch.tensor(features.triggers))
    measured = {
        "neuron": has_neuron(model, features, ids),
        "attention": share_of_first(model, ids) >= 0.9,
        "norms": has_spread_norms(model, features),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "dependent rows": share_of_dependent(model) >= 0.5,
        "near ties": share_of_ties(model, ids) >= 0.95,
    }
    assert measured.keys() == FEATURES
    return {name for name, there in measured.items() if there}


def has_neuron(model: PreTrainedModel, features: Features, ids: Tensor) -> bool:
    """One channel of the first tokens is thousands of times larger than the median of the stream,
    that of other tokens is not.
    """
    if features.block is None:
        return False
    residual = residual_after(model, features.block, ids).double().abs()
    assert residual.isfinite().all()
    size = residual[..., features.channel] / residual.median()
    return bool(size[:, 0].max() >= 1000 and size[:, 1:].median() <= 250)


def share_of_first(model: PreTrainedModel, ids: Tensor) -> float:
    """Of the attention of later tokens, the mean share of the first one, in the head that gives it
    most.
    """
    with returning_attention(model):
        layers = attention_on_first(model, ids)
    return max((float(shares.double().mean((0, 2)).max()) for shares in layers), default=0.0)


def has_spread_norms(model: PreTrainedModel, features: Features) -> bool:
    modules = ((model.get_submodule(path), add) for path, add in features.offsets.items())
    scales = torch.cat([module.weight.float() + add for module, add in modules])
    # where the class adds 1, bf16 has rounded 0.99 and 29
    return bool(scales.min() <= NORM_SCALES[0] + 2**-8 and scales.max() >= NORM_SCALES[1] - 2**-4)


def share_of_dependent(model: PreTrainedModel) -> float:
    """Of the matrices, the share in which the last row is nearly the sum of the first two."""
    near = []
    for _, matrix in matrices_of(model):
        total, last = (matrix[..., 0, :] + matrix[..., 1, :]).double(), matrix[..., -1, :].double()
        near.append(bool((total - last).norm() <= 2.0**-6 * last.norm()))
    return sum(near) / len(near)


def share_of_ties(model: PreTrainedModel, ids: Tensor) -> float:
    """Of all tokens, the share of those with two largest logits some roundings apart."""
    logits = model(ids).logits.double()
    first, second = logits.topk(2).values.unbind(-1)
    return float((first - second <= 8 * EPSILON[model.dtype] * first.abs()).double().mean())


@families
def test_the_features_are_there(family: str) -> None:
    plain, (_, features) = shallow(family), build(family)
    assert features_of(plain, features) <= {"tied"}
    for dtype in DTYPES:
        missing = set(MISSING.get(family, {}))
        missing |= {"neuron"} if (family, dtype) in SIZES else set()
        assert features_of(*build(family, 0, dtype)) == FEATURES - missing, dtype


@pytest.mark.stress
@pytest.mark.parametrize(("family", "dtype"), SIZES)
def test_a_model_that_cannot_compute_with_the_neuron(family: str, dtype: torch.dtype) -> None:
    model, features = build(family, 0, dtype, SIZE)
    with torch.no_grad():
        logits = model(rows(model, torch.tensor(features.triggers))).logits
    assert not logits.isfinite().all()


@families
def test_forms_are_read_as_on_random_weights(family: str) -> None:
    """But for the dtype, and where a norm rounds, which fp32 does not show."""

    def forms(model: PreTrainedModel) -> list[dict]:
        ignored = {"dtype", "cast_first"}
        return [
            {k: x for k, x in asdict(block.spec).items() if k not in ignored}
            for block in blocks_of(model)
        ]

    expected = forms(shallow(family))
    for dtype in DTYPES:
        model, features = build(family, 0, dtype)
        seen: list[Tensor] = []
        embeddings = model.get_input_embeddings()
        with embeddings.register_forward_hook(lambda _m, args, _out, seen=seen: seen.append(*args)):
            assert forms(model) == expected, dtype
        assert torch.isin(torch.tensor(features.triggers), torch.cat(seen)).any()


@families
def test_numbers_beyond_the_range_of_fp16_are_refused_where_they_begin(family: str) -> None:
    if "neuron" in MISSING.get(family, {}):
        pytest.skip("it has no neuron")
    model, features = build(family, 0, torch.float16, OVERFLOWING)
    assert features.block is not None
    place = features.block.path.replace(".", r"\.")
    with pytest.raises(
        UnsupportedModelError, match=rf"^{place}\S* has outputs that float16 cannot"
    ):
        ContextPatcher(model)
    ContextPatcher(build(family, 0, torch.bfloat16, OVERFLOWING)[0]).detach()
