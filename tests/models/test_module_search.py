"""Modules found by their attributes: those that torch lists, each once."""

import pytest
from support.models import build
from torch import nn

from icl_patch.models.module_search import modules_holding


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_finds_what_torch_lists(family: str) -> None:
    model = build(family)
    for names in (("rope_type",), ("weight", "in_features"), ("training",), ("absent",)):
        listed = [each for each in model.modules() if vars(each).keys() & set(names)]
        found = modules_holding(model, names)
        assert len(found) == len(listed) and set(found) == set(listed), names
    assert not listed and modules_holding(model, ("rope_type",))


def test_shared_empty_and_missing_modules() -> None:
    shared, empty = nn.Linear(2, 3), nn.ModuleList()
    model = nn.Sequential(shared, nn.Sequential(shared), empty)
    model.register_module("missing", None)
    empty.append(model)  # a circle
    assert set(modules_holding(model, ("training",))) == {shared, model[1], empty, model}
    assert modules_holding(model, ("in_features",)) == [shared]
