"""Loading a model with its tokenizer, and texts as its inputs."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from icl_patch.evaluation import embedded
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.model_checks import check_config
from icl_patch.models.prompts import chat_text, encode, padded

MARS_PROMPT = (
    "Write a single-sentence weather forecast for Mars, from the perspective of a slightly annoyed"
    " robot:"
)
"""The prompt of the paper's Figure 3."""


def load_tokenizer(
    model: str | Path | None, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a hub id; None and "embedded" mean the embedded model.

    Raises:
        UnsupportedModelError, OSError: as :func:`load_model`, without loading the weights.
    """
    where = embedded.MODEL_DIR if model is None or model == "embedded" else model
    revision = revision or "main"
    _check_loadable(where, revision)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, revision=revision)
    return tokenizer


def load_model(
    model: PreTrainedModel | str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode and its tokenizer: from an object, a local folder or a hub id; None and
    "embedded" mean the embedded model.

    Raises:
        ValueError: a model object without a tokenizer.
        UnsupportedModelError: the configuration is not that of a causal language model.
        OSError: nothing can be loaded from the path or id.
        TypeError: ``dtype`` is no dtype of torch.
    """
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"expected dtype as torch.float32, torch.bfloat16 …, got {dtype!r}")
    if model is None or model == "embedded":
        loaded, its_tokenizer = embedded.load(dtype or torch.float32, device or "cpu")
        return loaded, tokenizer or its_tokenizer
    if isinstance(model, (str, Path)):
        revision = revision or "main"
        _check_loadable(model, revision)
        options: Any = {"dtype": dtype or "auto", "revision": revision, "output_loading_info": True}
        try:
            pretrained: Any = AutoModelForCausalLM.from_pretrained(model, **options)
        except (SafetensorError, RuntimeError) as error:
            raise OSError(f"expected whole weights in {model}, got {error}") from error
        loaded, loading_info = pretrained
        if missing := sorted(loading_info["missing_keys"]):
            raise OSError(
                f"expected all weights in {model}, {len(missing)} are missing, as {missing[0]}"
            )
        loaded = loaded.to(device or loaded.device).eval()
        return loaded, tokenizer or load_tokenizer(model, revision)
    if tokenizer is None:
        raise ValueError("expected a tokenizer together with a model object, got none")
    device, dtype = torch.device(device or model.device), dtype or model.dtype
    if (device, dtype) == (model.device, model.dtype):
        return model, tokenizer
    copied: Any = copy.deepcopy(model)
    return copied.to(device, dtype), tokenizer


def _check_loadable(model: str | Path, revision: str) -> None:
    """Check that there is something, and that its configuration is a causal language model's."""
    try:
        config: Any = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        raise OSError(
            "expected a folder with a model, as save_pretrained writes it, or a hub id, got"
            f" {model}: {error}"
        ) from error
    check_config(config, model)


def encode_contexts(
    tokenizer: PreTrainedTokenizerBase,
    contexts: Sequence[str],
    *,
    chat: bool = False,
    system: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Texts as left-padded ids and mask, (B, T) int64 and bool; with ``chat`` or a system message
    as the user's messages of chats.

    Raises:
        ValueError: a text has no tokens, or as :func:`icl_patch.models.prompts.chat_text`.
    """
    chat = chat or system is not None
    if chat:
        contexts = [chat_text(tokenizer, text, system) for text in contexts]
    rows = [encode(tokenizer, text, front=not chat) for text in contexts]
    if not rows or not all(rows):
        raise ValueError("expected contexts of at least one token, got an empty one")
    return padded(rows, "left")


def default_context(model: PreTrainedModel) -> str:
    """The paper's Mars prompt; for the embedded model, its first held-out prompt."""
    if model.config.name_or_path != "embedded":
        return MARS_PROMPT
    prompt = embedded.held_out_prompts(embedded.KINDS[0], 1)[0]
    return prompt.context + prompt.question


def encode_inputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: str | Sequence[str] | Mapping[str, Tensor],
    chat: bool = False,
    system: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Contexts as ids and mask (B, T), and the model's further inputs; on its device, in its dtype.

    Raises:
        ValueError: a mapping without ``input_ids``, or with ``chat`` or ``system``; or as
            :func:`encode_contexts`.
    """
    if isinstance(context, Mapping):
        if "input_ids" not in context or chat or system is not None:
            raise ValueError(
                "expected input_ids in the context, and chat and system for text only, got"
                f" {', '.join(context) or 'nothing'}, {chat=} and {system=}"
            )
        inputs = {
            name: x.to(input_device(model), model.dtype if x.is_floating_point() else None)
            for name, x in context.items()
        }
        ids = inputs.pop("input_ids")
        return ids, inputs.pop("attention_mask", torch.ones_like(ids)).bool(), inputs
    texts = [context] if isinstance(context, str) else list(context)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(
            "expected a context as text, as several texts, or as a processor's output with"
            f" input_ids, got {type(context).__name__}"
        )
    ids, mask = encode_contexts(tokenizer, texts, chat=chat, system=system)
    device = input_device(model)
    return ids.to(device), mask.to(device), {}
