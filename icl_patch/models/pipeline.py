"""transformers' pipelines: the blocks of a model on several ranks, which run one after another."""

from typing import Any

from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin


def stage_of(model: nn.Module) -> Any:
    """transformers' ``PipelineStage`` of this rank's part of a model; None for a whole model."""
    return getattr(model, "_pp_stage", None)


def is_elsewhere(module: nn.Module) -> bool:
    """Whether a module of a pipeline is on another rank: here stands one that does nothing."""
    return type(module).__name__ == "PipelineIdentityLayer"


def is_on_another_rank(model: nn.Module, path: str) -> bool:
    """Whether the module at a path is on another rank of a pipeline."""
    try:
        return is_elsewhere(model.get_submodule(path))
    except AttributeError:
        return False


def is_last(model: nn.Module) -> bool:
    """Whether this rank has the model's last block and its head."""
    stage = stage_of(model)
    return stage is None or stage.pp_is_last_stage


class ElsewhereLayer(CacheLayerMixin):
    """The place of a block of another rank in a cache: as long as that of a block that is here, and
    without keys and values.

    transformers sizes the masks of all blocks by the first one of their kind.
    """

    is_compileable = False

    def __init__(self, cache: Cache, like: int) -> None:
        super().__init__()
        self._cache, self._like = cache, like
        self.is_sliding = getattr(self._here, "is_sliding", False)

    @property
    def _here(self) -> Any:
        return self._cache.layers[self._like]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The sizes of the layer on this rank."""
        return self._here.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """The length of the layer on this rank."""
        return self._here.get_seq_length()

    def get_max_length(self) -> int:
        """The length of the layer on this rank."""
        return self._here.get_max_length()

    def _nothing(self, *_: Any, **__: Any) -> Any:
        """There is nothing to change, and nobody calls ``update``."""

    lazy_initialization = update = offload = prefetch = reset = crop = reorder_cache = _nothing
    batch_select_indices = batch_repeat_interleave = _nothing


def mark_elsewhere(model: PreTrainedModel, cache: Cache) -> None:
    """Give the blocks of other ranks their places in an empty cache."""
    stage = stage_of(model)
    if stage is None:
        return
    layers = cache.layers
    here = range(*stage.layer_range_for_rank(stage.pp_rank, len(layers)))
    kinds = {getattr(layers[i], "is_sliding", False): i for i in reversed(here)}
    for i, layer in enumerate(layers):
        if i not in here:
            like = kinds.get(getattr(layer, "is_sliding", False), here.start)
            layers[i] = ElsewhereLayer(cache, like)
