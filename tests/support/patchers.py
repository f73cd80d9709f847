"""What the tests of the patcher share: the parametrizations, and the question whether a patcher
still works.
"""

import copy

import pytest
import torch
from support.numeric import is_noise
from support.random_models import case, tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, UnsupportedModelError, metrics

UPDATES = ("direct", "stable", "exact")

families = pytest.mark.parametrize("family", ("gemma3", "llama"))
updates = pytest.mark.parametrize("update", UPDATES)


def plain_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens(90, 2, 9)).logits


def works(patcher: ContextPatcher, inputs: dict | None = None) -> None:
    """The patcher still computes patches, and they still replay: bit for bit if exact, else but for
    the model's noise.
    """
    patch = patcher.compute(**inputs or case("prefix"))
    logits = patcher.forward(patch.kept_ids, patch)
    off = metrics.linf(logits, patch.logits)[patch.kept_mask].max()
    assert off == 0 if patcher.update == "exact" else is_noise(off, patcher, patch)


def refuses(
    model: nn.Module, message: str | None, error: type[Exception] = UnsupportedModelError
) -> None:
    """No patcher attaches to the model; the error has the message."""
    with pytest.raises(error, match=message):
        ContextPatcher(model)


IDS, KEPT = tokens(0, 2, 5), tokens(1, 2, 3)


class Snapshot:
    """Everything about a model that attaching could change: modules, hooks, parameters (who they
    are and their bits), configs, outputs. As a context it checks at its end that nothing has
    changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.attributes = {name: list(vars(module)) for name, module in self.modules.items()}
        self.hooks = {name: self._hooks(module) for name, module in self.modules.items()}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.state = copy.deepcopy(model.state_dict())
        self.configs = [
            copy.deepcopy(vars(config)) for config in (model.config, model.generation_config)
        ]
        self.attention = model.config._attn_implementation
        self.logits, self._model = plain_logits(model), model

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.check(self._model)

    @staticmethod
    def _hooks(module: nn.Module) -> dict[str, dict]:
        own = {name: x for name, x in vars(module).items() if "hooks" in name}
        found = {name: dict(x) for name, x in own.items() if isinstance(x, dict)}
        assert found
        return found

    def check(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        assert list(modules) == list(self.modules)
        assert all(modules[name] is module for name, module in self.modules.items())
        assert {name: list(vars(module)) for name, module in modules.items()} == self.attributes
        assert {name: self._hooks(module) for name, module in modules.items()} == self.hooks
        assert [vars(config) for config in (model.config, model.generation_config)] == self.configs
        assert model.config._attn_implementation == self.attention
        self.check_parameters(model)
        assert torch.equal(plain_logits(model), self.logits)

    def check_parameters(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        assert list(parameters) == list(self.parameters)
        assert all(parameters[name] is parameter for name, parameter in self.parameters.items())
        state = model.state_dict()
        assert list(state) == list(self.state)
        for name, value in self.state.items():
            assert state[name].dtype == value.dtype and torch.equal(state[name], value)
