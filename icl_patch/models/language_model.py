"""Questions about a model as a whole: its language model, blocks, vocabulary and positions."""

from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.module_search import outermost
from icl_patch.models.pipeline import is_elsewhere
from icl_patch.models.positions import NO_LIMIT, first_position, padding_id, steady_length


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model within a model."""
    return model.config.get_text_config(decoder=True)


def layers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The blocks of a model by path, in order; of a pipeline those on this rank.

    Raises:
        UnsupportedModelError: there is no list of as many modules as the configuration has layers,
            or more than one.
    """
    count = getattr(text_config(model), "num_hidden_layers", None)
    decoder = model.get_decoder()
    if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        decoder = model  # it calls its head so
    inner = {id(module) for module in decoder.modules()} - _other_modalities(model)
    lists = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    found = outermost(
        path for path, module in lists.items() if len(module) == count and id(module) in inner
    )
    if len(found) != 1:
        raise UnsupportedModelError(_no_single_list(model, count, lists))
    (path,) = found
    return {
        f"{path}.{index}": layer
        for index, layer in enumerate(lists[path])
        if not is_elsewhere(layer)
    }


def _no_single_list(
    model: PreTrainedModel, count: int | None, lists: dict[str, nn.ModuleList]
) -> str:
    """The refusal of a model without one list of ``count`` blocks among its lists."""
    outer = outermost(path for path, module in lists.items() if module)
    stacks = [path for path in lists if path in outer]
    found = ", ".join(f"{path} ({len(lists[path])})" for path in stacks) or "none"
    why = "its blocks hold several attentions and MLPs each"
    if len(stacks) != 1:
        why = (
            "a stack that runs several times, or over rows that are no tokens (BLT's patches of"
            " bytes), has no single change for a token"
        )
    return (
        f"expected one list of {count or 'all'} blocks in {type(model).__name__}, which each"
        f" run once for every token; found {found}: {why}"
    )


def _other_modalities(model: PreTrainedModel) -> set[int]:
    """The identities of the modules of models inside that are no language model: vision towers."""
    text = text_config(model)
    towers = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config not in (model.config, text)
    ]
    return {id(module) for tower in towers for module in tower.modules()}


def family_of(model: PreTrainedModel) -> str:
    """The name of a model's family: the type of its language model."""
    return str(getattr(text_config(model), "model_type", "")).removesuffix("_text")


def vocabulary(model: PreTrainedModel) -> int:
    """The number of token ids."""
    return text_config(model).vocab_size


def position_limit(model: PreTrainedModel) -> int:
    """How many positions the model has; more than there can be tokens if it sets no limit."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    positions = limit - first_position(model) if isinstance(limit, int) and limit > 0 else NO_LIMIT
    return min(positions, steady_length(model))


def check_length(model: PreTrainedModel, tokens: int, new: int = 0) -> None:
    """Raises ValueError if the model has no positions for so many tokens and ``new`` ones after
    them: those of a generation but the last, which is not run.
    """
    if (limit := position_limit(model)) < tokens + new:
        more = f" and {new} new ones before the last" if new else ""
        why = "as many as the model has positions for"
        if limit == steady_length(model):
            why = "beyond which dynamic NTK changes the rotary frequencies from call to call"
        raise ValueError(f"expected at most {limit} tokens, {why}, got {tokens}{more}")


def check_vocabulary(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
    """Raises ValueError if an id is not in the vocabulary, or a token has no position.

    RoBERTa and its relatives number only the tokens with another id than the padding id.
    """
    size, padding = vocabulary(model), padding_id(model)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        low, high = int(ids.min()), int(ids.max())
        raise ValueError(f"expected ids from 0 to {size - 1}, got {low} to {high}")
    if padding >= 0 and (found := (ids == padding) & mask).any():
        name, row = type(model).__name__, int(found.nonzero()[0, 0])
        why = f"{name} gives it no position"
        raise ValueError(
            f"expected no token with the padding id {padding}, {why}, got one in row {row}: mask it"
        )


def chooses_tokens(model: PreTrainedModel) -> bool:
    """Whether some layers attend only to the tokens that they score highest.

    DeepSeek-V3.2 and GLM-MoE-DSA do, with an indexer. Scores can be equal: a ReLU makes negative
    ones 0. So does Doge: its masks keep the ``keep_window_size`` highest.
    """
    if hasattr(text_config(model), "keep_window_size"):
        return True
    layers = DynamicCache(config=model.config).layers
    return any(hasattr(layer, "update_indexer") for layer in layers)
