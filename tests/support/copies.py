"""Ways to copy a model, and what a copy has to be."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from icl_patch.layers.patched_module import PatchedModule

Copy = Callable[[Any], Any]


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: tuple[Copy, ...] = (copy.deepcopy, pickled, saved)


def check_plain(model: nn.Module) -> None:
    """Nothing of ours is in the model: no module, forward or hook."""
    for module in model.modules():
        assert not isinstance(module, PatchedModule)
        assert not {"forward", "__reduce_ex__"} & set(vars(module))
        assert not module._forward_hooks and not module._forward_pre_hooks
