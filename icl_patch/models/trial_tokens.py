"""The tokens that trials of a model run on, which begin as its texts do."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.layers.device_hooks import input_device
from icl_patch.models.language_model import text_config, vocabulary
from icl_patch.models.positions import padding_id
from icl_patch.models.prompts import own_front


def trial_tokens(
    model: PreTrainedModel,
    columns: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    starts: Sequence[int] = (0, 0),
) -> Tensor:
    """Ids (B, columns) int64 to try a model on: its :func:`first_token`, on which trained weights
    have activations far larger than on any other, then random ids of text. Each has a position.

    starts: the column at which each of the B rows begins, behind padding.
    """
    ids, generator = _ids_of_text(model, tokenizer), torch.Generator().manual_seed(seed)
    tokens = ids[torch.randint(0, len(ids), (len(starts), columns), generator=generator)]
    if (first := first_token(model, tokenizer)) is not None:
        tokens[range(len(starts)), starts] = first
    return tokens.to(input_device(model))


def first_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> int | None:
    """The token, such as ``<bos>``, that the tokenizer puts before every text; without a tokenizer
    the one that a configuration of the model names. None if there is none.
    """
    named = [x for key, x in _special_ids(model) if key == "bos_token_id"]
    if tokenizer is not None:
        named = list(own_front(tokenizer))
    size, padding = vocabulary(model), padding_id(model)
    return next((token for token in named if 0 <= token < size and token != padding), None)


def _ids_of_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """The ids that texts have, (N,): none of special tokens, none beyond the tokenizer's."""
    size, special = vocabulary(model), {padding_id(model)}
    special.update(token for _, token in _special_ids(model))
    if tokenizer is not None:
        size = min(size, len(tokenizer))
        special.update(tokenizer.all_special_ids)
    ids = torch.arange(size)
    return ids[~torch.isin(ids, torch.tensor(sorted(special)))]


def _special_ids(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Name and id of each special token in the configurations of a model, those of images too."""
    configs = (text_config(model), model.config, getattr(model, "generation_config", None))
    for config in filter(None, configs):
        for key, value in vars(config).items():
            if key.endswith(("_token_id", "_token_index")):
                ids = value if isinstance(value, list | tuple) else [value]
                yield from ((key, token) for token in ids if isinstance(token, int))
