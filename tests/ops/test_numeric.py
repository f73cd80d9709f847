"""The noise floor, with which the tests compare logits, is below what a fault does."""

import dataclasses

import pytest
from support.numeric import replay_limit
from support.random_models import case
from torch import Tensor

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

        def off(layer: dict[str, Tensor]) -> float:
            """Of a replay with other factors of the second layer."""
            layers = (patch.layers[0], layer, *patch.layers[2:])
            logits = patcher.attached_model.replay(dataclasses.replace(patch, layers=layers))[0]
            return float(metrics.linf(logits, patch.logits)[patch.kept_mask].max())

        layer = patch.layers[1]
        assert off(layer) <= limit
        for name in layer:
            if name.endswith((".u", ".new_scale")):
                assert off({**layer, name: 1.001 * layer[name]}) > limit, name
