"""Models with the features of trained weights: the features are there, forms are read as they are
on random weights, and numbers beyond the range of fp16 are refused as such.
"""

from dataclasses import asdict

import pytest
import torch
from support.patchers import refuses
from support.random_models import of_the_zoo, shallow
from support.realistic_weights import OVERFLOWING, build
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.evaluation import tiny_models
from icl_patch.models.block_detection import blocks_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of each kind of writer, a Conv1D, a multiplier, a fused gate, experts, norms behind experts and
# after the sum, no MLP. The others run with the stress tests.
FAMILIES = ("llama", "gemma3", "gpt2", "granitemoe", "phi3", "gemma4-moe", "opt-post-norm", "mamba")
OTHERS = [name for name in tiny_models.SUPPORTED if name not in FAMILIES]
families = pytest.mark.parametrize("family", of_the_zoo(tiny_models.SUPPORTED, stress=OTHERS))


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
    if family == "mamba":
        pytest.skip("its blocks have no MLP")
    model, features = build(family, 0, torch.float16, OVERFLOWING)
    place = features.block.path.replace(".", r"\.")
    # of Gemma's scales the one of the neuron's norm is above the range itself
    refuses(model, rf"^{place}\S* (has outputs that float16 cannot|holds NaN or infinity)")
    ContextPatcher(build(family, 0, torch.bfloat16, OVERFLOWING)[0]).detach()
