"""Modules found by their attributes: those that torch lists, each once."""

from torch import nn

from icl_patch.models.module_search import modules_holding


def test_shared_empty_and_missing_modules() -> None:
    shared, empty = nn.Linear(2, 3), nn.ModuleList()
    model = nn.Sequential(shared, nn.Sequential(shared), empty)
    model.register_module("missing", None)
    empty.append(model)  # a circle
    assert set(modules_holding(model, ("training",))) == {shared, model[1], empty, model}
    assert modules_holding(model, ("in_features",)) == [shared]
