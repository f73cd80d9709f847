"""Numbers beyond the range of fp16, which models with the features of trained weights compute, are
refused where they begin.
"""

import pytest
import torch
from support.realistic_weights import OVERFLOWING, build

from icl_patch import ContextPatcher, UnsupportedModelError
from icl_patch.evaluation import tiny_models

# Of each kind of writer, a Conv1D, a multiplier, a fused gate, experts, norms behind experts and
# after the sum. The others run with the stress tests; Mamba's blocks have no MLP.
FAMILIES = ("llama", "gemma3", "gpt2", "granitemoe", "phi3", "gemma4-moe", "opt-post-norm")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FAMILIES else [pytest.mark.stress])
        for family in tiny_models.SUPPORTED
        if family != "mamba"
    ],
)
def test_numbers_beyond_the_range_of_fp16_are_refused_where_they_begin(family: str) -> None:
    model, features = build(family, 0, torch.float16, OVERFLOWING)
    assert features.block is not None
    place = features.block.path.replace(".", r"\.")
    with pytest.raises(
        UnsupportedModelError, match=rf"^{place}\S* has outputs that float16 cannot"
    ):
        ContextPatcher(model)
    ContextPatcher(build(family, 0, torch.bfloat16, OVERFLOWING)[0]).detach()
