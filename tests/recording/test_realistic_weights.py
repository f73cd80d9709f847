"""Patches of models with the features of trained weights: every update, decode steps, and static
patches.
"""

from dataclasses import replace

import pytest
import torch
from support import realistic_weights
from support.numeric import noise_limit
from support.patchers import UPDATES
from support.random_models import Stock, case_of, ragged, tokens
from support.static import random_examples
from torch import Tensor

from icl_patch import ContextPatcher, metrics
from icl_patch.errors import StaticPatchWarning
from icl_patch.evaluation import tiny_models
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.static import Distillation, fit

pytestmark = [
    pytest.mark.filterwarnings("error::icl_patch.errors.ExactnessWarning"),
    pytest.mark.filterwarnings("ignore::icl_patch.errors.SlowerStepsWarning"),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# All families in bf16 are in test_architectures.py, their steps in test_exact_one_pass.py.
USUAL = {("llama", FP32), ("gemma3", FP16), ("granitemoe", FP16)}
CASES = [
    pytest.param(family, dtype, marks=[] if (family, dtype) in USUAL else [pytest.mark.stress])
    for family in tiny_models.SUPPORTED
    for dtype in (FP32, BF16, FP16)
]


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_every_update_and_decode_step_replays(family: str, dtype: torch.dtype) -> None:
    """Direct and stable in fp32 only: in half precision these models' noise is as large as their
    logits.
    """
    model, features = realistic_weights.build(family, 0, dtype)
    stock = Stock(model)
    with ContextPatcher(model) as patcher:
        limit = noise_limit(model)
        for name in ("span", "prefix"):
            arguments = features.mark(case_of(family, name))
            reference = stock.logits(arguments)
            for update in UPDATES if dtype == FP32 else ("exact",):
                patcher.attached_model.update = update
                patch = patcher.compute(**arguments)
                logits, mask = patcher.forward(patch.kept_ids, patch), patch.kept_mask
                assert logits[mask].isfinite().all()
                if update == "exact":
                    assert torch.equal(logits[mask], reference[mask])
                    assert not patch.report.misses.any()
                else:
                    off = metrics.linf(logits, reference)[mask].max()
                    assert off <= limit, (update, name)
        ids, mask = tokens(3, 3, 11), ragged(3, 11, side="left")
        prompt = {"context_ids": ids} | ({} if is_recurrent(model) else {"context_mask": mask})
        greedy = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": False}
        for step in patcher.generate(**features.mark(prompt), **greedy):
            assert not step.patch.report.misses.any()
            assert torch.equal(patcher.forward(step.patch.kept_ids, step.patch)[:, -1], step.logits)


@pytest.mark.parametrize(
    "family",
    ["gemma3", *(pytest.param(x, marks=pytest.mark.stress) for x in ("llama", "olmo2", "qwen2"))],
)
def test_a_static_patch_takes_up_most_of_a_context(family: str) -> None:
    """Behind a token that draws the attention, on the questions of its fit."""
    model, features = realistic_weights.build(family)
    front = features.triggers[0]
    examples = [
        replace(x, with_context=(front, *x.with_context[1:]), without=(front, *x.without[1:]))
        for x in random_examples()
    ]

    @torch.no_grad()
    def log_probabilities(side: str) -> Tensor:
        rows = [[*getattr(x, side), *x.answer[:-1]] for x in examples]
        length = len(examples[0].answer)
        return model(torch.tensor(rows)).logits[:, -length:].double().log_softmax(-1)

    wanted, without = log_probabilities("with_context"), log_probabilities("without")
    # so many steps that what is left hardly depends on the processor's rounding
    long = Distillation(steps=150)
    options = {"rank": 4, "preserve": (), "accept_worse": True, "first_block": 0}
    with (
        pytest.warns(StaticPatchWarning, match="no texts to preserve"),
        fit(model, examples, distillation=long, **options).applied(model),
    ):
        patched = log_probabilities("without")
    kl, own = ((wanted.exp() * (wanted - x)).sum(-1).mean() for x in (patched, without))
    assert kl < 0.7 * own
