"""What the options name: the model, its tokenizer, the prompt, the columns of a data set, a patch.

Nothing here imports torch before a command asks for it.
"""

import argparse
from typing import TYPE_CHECKING, Any

from icl_patch.cli.progress import import_torch, stage
from icl_patch.texts import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from icl_patch.models.prompts import Prompt
    from icl_patch.patch.serialization import PatchInfo
    from icl_patch.patcher import ContextPatcher
    from icl_patch.scale import Columns
    from icl_patch.static import StaticInfo, StaticPatch


def check_question(options: argparse.Namespace) -> None:
    """Raises ValueError without ``--question``, which a data set has in its rows."""
    if options.question is None:
        raise ValueError("expected --question, the text after the context, got none")


def read_prompt(options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase") -> "Prompt":
    """The prompt that the options give, with its context and without it.

    Raises:
        ValueError: as :func:`icl_patch.models.prompts.make_prompt`, and for a tokenizer that cannot
            split it.
    """
    from icl_patch.models.prompts import check_offsets, make_prompt

    check_offsets(tokenizer)
    return make_prompt(
        tokenizer,
        options.question,
        context=context_text(options),
        system=options.system,
        chat=options.chat,
    )


def dataset_columns(options: argparse.Namespace, task: str | None = None) -> "Columns":
    """The columns that the options name; raises ValueError without pyarrow."""
    try:
        from icl_patch.scale import Columns
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    return Columns(
        context=options.context_column or options.system_column or "context",
        kept=options.kept_column or "kept",
        chat=options.chat,
        system=options.system_column is not None,
        task=task,
    )


def check_chat(options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises ValueError if the options give a chat that the tokenizer's template cannot write."""
    from icl_patch.models.prompts import chat_text

    if options.chat or options.system is not None:
        chat_text(tokenizer, prompt_text(options) or "a", options.system)


def check_prompts(tokenizer: "PreTrainedTokenizerBase", columns: "Columns") -> None:
    """Raises ValueError if the tokenizer cannot split the prompts of a data set, or if they are
    chats, and its chat template cannot write them.
    """
    from icl_patch.models.prompts import chat_text, check_offsets

    check_offsets(tokenizer)
    if columns.chat or columns.system:
        chat_text(tokenizer, "a", "b" if columns.system else None)


def load_tokenizer(options: argparse.Namespace) -> "PreTrainedTokenizerBase":
    """The tokenizer of the model that the options name. It takes little time to load, so that a
    prompt that it cannot write is refused before the model is loaded.

    Raises:
        ValueError: a revision of the embedded model.
        OSError: nothing can be loaded.
    """
    if options.revision is not None and options.model in (None, "embedded"):
        raise ValueError("expected no --revision with the embedded model: it has one version")
    with stage("importing torch and transformers", options):
        from icl_patch.evaluation import loading
    return loading.load_tokenizer(options.model, options.revision)


def load(
    options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model that the options name, and its tokenizer unless it is given; seeds torch.

    Raises:
        ValueError, OSError: as :func:`load_tokenizer`.
    """
    tokenizer = load_tokenizer(options) if tokenizer is None else tokenizer
    torch = import_torch()
    with stage(f"loading {options.model or 'the embedded model'}", options):
        from transformers.utils import logging

        from icl_patch.evaluation.loading import load_model

        torch.manual_seed(options.seed)
        logging.disable_progress_bar()
        return load_model(options.model, tokenizer, options.dtype, options.device, options.revision)


def use_patch(options: argparse.Namespace, info: "PatchInfo | StaticInfo") -> None:
    """Load the model, from now on, in the dtype of a patch, unless the options name another.

    Raises:
        ValueError: the options name no model, and the patch is not the embedded one's.
    """
    import torch

    if options.model is None and info.model != "embedded":
        raise ValueError(
            f"expected MODEL, {info.model} or its folder, as {options.patch} is a patch of it;"
            " without MODEL the command takes the embedded model"
        )
    if options.dtype is None:
        options.dtype = getattr(torch, str(info.dtype).removeprefix("torch."), None)


def load_static(
    options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, StaticPatch]":
    """The model, its tokenizer and the static patch ``--patch``, which is read first.

    Raises:
        PatchFormatError: the file is a patch for each token.
        ValueError: as :func:`use_patch`.
    """
    with stage("importing torch and transformers", options):
        from icl_patch.static import StaticPatch

    use_patch(options, StaticPatch.load(options.patch).info)
    model, tokenizer = load(options, tokenizer)
    return model, tokenizer, StaticPatch.load(options.patch, model, tokenizer)


def attach(options: argparse.Namespace, model: Any, tokenizer: Any) -> "ContextPatcher":
    """A patcher of the update that the options name."""
    from icl_patch.patcher import ContextPatcher

    with stage("attaching: trying the model's blocks", options):
        return ContextPatcher(model, options.update, tokenizer=tokenizer)


def context_text(options: argparse.Namespace) -> str | None:
    """The context that the options give, if they give one.

    Raises:
        ValueError: it is empty; or as :func:`icl_patch.texts.read_text`.
    """
    file, context = options.context_file, options.context
    if file is not None and not (context := read_text(file)):
        raise ValueError(f"expected a context in {file}, got an empty file")
    if context == "":
        raise ValueError("expected a context, got an empty --context: leave the option out")
    return context


def prompt_text(options: argparse.Namespace) -> str | None:
    """The context and the question as one text, in a chat the user's message; None without both.

    Raises:
        ValueError: a system message without a question.
    """
    if options.system is not None and options.question is None:
        raise ValueError("expected --question, the user's message, with --system")
    given = [text for text in (context_text(options), options.question) if text is not None]
    return "".join(given) if given else None


def front_of(patch: "StaticPatch", tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """A line on the token that prompts of a static patch must begin with, if it is known."""
    return [
        f"prompts must begin with the token {token}, {tokenizer.decode([token])!r}"
        for token in patch.info.front
    ]
