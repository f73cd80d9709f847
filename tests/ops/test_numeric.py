"""The noise floor, with which the tests compare logits, is below what a fault does."""

import dataclasses

import pytest
from support.models import case
from support.numeric import replay_limit

from icl_patch import ContextPatcher, metrics
from icl_patch.evaluation import tiny_models


@pytest.mark.parametrize(
    ("family", "update"),
    [("llama", "direct"), ("gemma3", "direct"), ("gemma3", "stable"), ("mixtral", "direct")],
)
def test_what_a_small_fault_does_is_above_it(family: str, update: str) -> None:
    """One factor of one layer that is off by a thousandth."""
    model = tiny_models.build(family)
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(**case("prefix"))
        limit = replay_limit(patcher, patch)
        assert (
            metrics.linf(patcher.attached_model.replay(patch)[0], patch.logits)[
                patch.kept_mask
            ].max()
            <= limit
        )
        for name in patch.layers[1]:
            if name.endswith((".u", ".new_scale")):
                layer = {**patch.layers[1], name: 1.001 * patch.layers[1][name]}
                wrong = dataclasses.replace(
                    patch, layers=(patch.layers[0], layer, *patch.layers[2:])
                )
                assert (
                    metrics.linf(patcher.attached_model.replay(wrong)[0], patch.logits)[
                        patch.kept_mask
                    ].max()
                    > limit
                ), name
