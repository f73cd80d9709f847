"""Options, progress and printing that the commands share.

Nothing here imports torch before an option's value or a command asks for it.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.status import Status

from icl_patch.cli.output import OutputError, output
from icl_patch.texts import check_path, check_text, read_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from icl_patch.models.prompts import Prompt
    from icl_patch.patch.serialization import PatchInfo
    from icl_patch.patcher import ContextPatcher
    from icl_patch.scale import Columns
    from icl_patch.static import StaticInfo, StaticPatch

# As in patch.serialization, which imports torch.
UPDATES = ("direct", "stable", "exact")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every command has; :func:`print_result` follows it. A command that
    takes minutes sets ``lines``, for :func:`say`.
    """
    parser.set_defaults(lines=False)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add --verbose: tables of all measurements."""
    parser.add_argument(
        "--verbose", action="store_true", help="print all measurements as tables, with a legend"
    )


def add_out(
    parser: argparse.ArgumentParser,
    meaning: str,
    kind: Callable[[str], Path] | None = None,
    metavar: str = "DIR",
) -> None:
    """Add ``--out``, the file or folder that the command writes, and ``--force``, for
    :func:`check_out`.
    """
    kind = _nameable if kind is None else kind
    parser.add_argument("--out", type=kind, required=True, metavar=metavar, help=meaning)
    meaning = "replace an earlier result under --out"
    parser.add_argument("--force", action="store_true", default=None, help=meaning)


def check_out(options: argparse.Namespace) -> None:
    """Raises ValueError if ``--out`` would replace something, without ``--force``."""
    out: Path = options.out
    filled = any(out.iterdir()) if out.is_dir() else out.exists()
    if filled and not options.force:
        raise ValueError(
            f"expected a new name for --out, got {out}, which exists: --force replaces it"
        )


def add_patch(parser: argparse.ArgumentParser, *, required: bool = True, meaning: str) -> None:
    """Add ``--patch``."""
    parser.add_argument(
        "--patch", type=existing("a patch file"), metavar="FILE", required=required, help=meaning
    )


def add_model(
    parser: argparse.ArgumentParser,
    meaning: str = "local folder or hub id (default: the embedded model)",
    *,
    of_patch: bool = False,
) -> None:
    """Add MODEL, its revision and device, and its dtype and the seed unless it runs a patch file,
    which says the dtype, for :func:`load`.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help=meaning)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    add_device(parser)
    parser.set_defaults(dtype=None, seed=0)
    if not of_patch:
        parser.add_argument(
            "--dtype",
            type=dtype,
            metavar="DTYPE",
            help="fp32, bf16 or fp16 (default: as saved; embedded: fp32)",
        )
        meaning = "of the random number generators (default 0)"
        parser.add_argument("--seed", type=_seed, default=0, help=meaning)


def add_device(
    parser: argparse.ArgumentParser,
    default: str | None = None,
    meaning: str = "cpu, cuda, cuda:1, … (default: cpu)",
) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", type=device, metavar="DEVICE", default=default, help=meaning)


def add_max_new_tokens(parser: argparse.ArgumentParser, default: int, meaning: str) -> None:
    """Add ``--max-new-tokens``."""
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        default=default,
        help=f"{meaning} (default {default})",
    )


def add_keep_first(parser: argparse.ArgumentParser) -> None:
    """Add ``--keep-first``, which means the same in every command."""
    parser.add_argument(
        "--keep-first",
        type=_not_negative,
        default=0,
        metavar="N",
        help="the prompt's first N tokens stay, with the patch as without it; 1 keeps <bos>"
        " (default 0)",
    )


def add_prompt(
    parser: argparse.ArgumentParser, default: str | None = None
) -> "argparse._MutuallyExclusiveGroup":
    """Add a context, its question, ``--chat`` and ``--keep-first``, for :func:`read_prompt`, which
    requires the first two, or with a default for :func:`prompt_text`.

    Returns:
        The options that give the context; one of them is allowed.
    """
    required = default is None
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument(
        "--context",
        type=text,
        metavar="TEXT",
        help="the context, before the question"
        + ("" if required else f" (default, without a question: {default})"),
    )
    source.add_argument(
        "--context-file",
        type=existing("a file with the context"),
        metavar="FILE",
        help="read the context from a UTF-8 file",
    )
    source.add_argument(
        "--system", type=text, metavar="TEXT", help="the context is the system message of a chat"
    )
    parser.add_argument(
        "--question",
        *(["--kept"] if required else []),
        type=text,
        metavar="TEXT",
        help="the text after the context; in a chat the user's message"
        + ("; it runs without the context" if required else ""),
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a chat by the tokenizer's template: the context begins the user's message",
    )
    add_keep_first(parser)
    return source


def check_question(options: argparse.Namespace) -> None:
    """Raises ValueError without ``--question``, which a data set has in its rows."""
    if options.question is None:
        raise ValueError("expected --question, the text after the context, got none")


def read_prompt(options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase") -> "Prompt":
    """The prompt that the options give, with its context and without it.

    Raises:
        ValueError: as :func:`icl_patch.models.prompts.make_prompt`.
    """
    from icl_patch.models.prompts import make_prompt

    return make_prompt(
        tokenizer,
        options.question,
        context=context_text(options),
        system=options.system,
        chat=options.chat,
    )


def add_dataset(
    group: "argparse._ArgumentGroup", source: "argparse._MutuallyExclusiveGroup"
) -> None:
    """Add ``--dataset``, in place of a context, and its columns, for :func:`dataset_columns`."""
    source.add_argument(
        "--dataset",
        type=existing("a data set"),
        metavar="FILE|FOLDER",
        help="JSON lines, Parquet, a folder of them, or one that Dataset.save_to_disk wrote",
    )
    columns = group.add_mutually_exclusive_group()
    columns.add_argument(
        "--context-column", metavar="NAME", help="of the contexts (default: context)"
    )
    columns.add_argument(
        "--system-column", metavar="NAME", help="the contexts are system messages of chats"
    )
    group.add_argument(
        "--kept-column", metavar="NAME", help="of the texts after the contexts (default: kept)"
    )


def existing(kind: str) -> Callable[[str], Path]:
    """An option that names a file or folder to read, which must be there."""

    def check(text: str) -> Path:
        if not Path(text).exists():
            raise argparse.ArgumentTypeError(f"expected {kind}, got {text!r}, which does not exist")
        return Path(text)

    return check


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


def check_template(tokenizer: "PreTrainedTokenizerBase", columns: "Columns") -> None:
    """Raises ValueError if the contexts of a data set are parts of chats, and the tokenizer's chat
    template cannot write them.
    """
    from icl_patch.models.prompts import chat_text

    if columns.chat or columns.system:
        chat_text(tokenizer, "a", "b" if columns.system else None)


def refuse(options: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Raises ValueError if one of these options is set."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"expected no --{name.replace('_', '-')} {where}")


def add_update(parser: argparse.ArgumentParser) -> None:
    """Add ``--update``."""
    parser.add_argument("--update", choices=UPDATES, default="exact", help="default: exact")


def text(value: str) -> str:
    """A text option."""
    try:
        check_text(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return value


def positive(text: str, least: int = 1) -> int:
    """An integer option ≥ 1, or ≥ ``least``."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a number ≥ {least}, got {text}")
    return number


def _seed(text: str) -> int:
    """A seed of torch's generators."""
    if not -(2**63) <= (number := int(text)) < 2**64:
        raise argparse.ArgumentTypeError(f"expected a seed from -2⁶³ to 2⁶⁴ - 1, got {text}")
    return number


def _not_negative(text: str) -> int:
    return positive(text, 0)


def dtype(text: str) -> "torch.dtype":
    """The dtype option."""
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}, got {text!r}")
    value: torch.dtype = getattr(import_torch(), name)
    return value


def device(text: str) -> "torch.device":
    """A device option; the device must exist on this machine."""
    imported = import_torch()
    try:
        value: torch.device = imported.device(text)
        imported.empty(0, device=value)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a device of this machine, got {text!r}: {str(error).splitlines()[0]}"
        ) from error
    return value


def _nameable(text: str) -> Path:
    """An output file or folder whose name safetensors can open again."""
    try:
        check_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def writable(suffix: str) -> Callable[[str], Path]:
    """An output file in an existing folder, so that no result is lost to a mistyped name."""

    def check(text: str) -> Path:
        path = _nameable(text)
        if path.suffix != suffix:
            raise argparse.ArgumentTypeError(
                f"expected a file name ending in {suffix}, got {text!r}"
            )
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"expected a folder that exists, got {str(path.parent)!r}"
            )
        return path

    return check


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


def import_torch() -> Any:
    """torch, imported under a label: it takes seconds."""
    with stage("importing torch"):
        import torch
    return torch


def stage(title: str, options: argparse.Namespace | None = None) -> Status:
    """A labelled spinner on stderr, for work that cannot be counted.

    If stderr is no terminal, a line as :func:`say` prints it. Without options, which may not be
    read yet, nothing.
    """
    console = _stderr()
    if options is not None and not console.is_terminal:
        say(options, title)
    return console.status(title)


def say(options: argparse.Namespace, text: str) -> None:
    """A line about the command's progress on stderr. Where that is no terminal, only a command that
    takes minutes prints it, and not with ``--json``.
    """
    if _stderr().is_terminal or (options.lines and not options.json):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, options: argparse.Namespace) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, or about ten lines of :func:`say` if that is no terminal; call the yielded
    function with (done, total).
    """
    console = _stderr()
    if not console.is_terminal:
        yield _lines(title, options)
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str, options: argparse.Namespace) -> Callable[[int, int], None]:
    """Says the first of (done, total), the last, and every tenth of the work between them."""
    last = (-1, -1)

    def update(done: int, total: int) -> None:
        nonlocal last
        is_new = total != last[1] or done < last[0] or done - last[0] >= max(1, total / 10)
        if is_new or (done == total and (done, total) != last):
            last = (done, total)
            say(options, f"{title}: {done} of {total}")

    return update


def _stderr() -> Console:
    """Stderr, on which a spinner is drawn only if it is a terminal."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to :func:`output`; rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_result(options: argparse.Namespace, result: dict[str, Any], *renderables: Any) -> None:
    """Print the result as one JSON object with ``--json``, else the texts and tables. A reader that
    has closed stdout, such as ``head``, does not change the command's exit status.
    """
    try:
        with output():
            _print(options, result, renderables)
    except OutputError as error:
        if error.errno != errno.EPIPE:
            raise


def _print(options: argparse.Namespace, result: dict[str, Any], renderables: Sequence[Any]) -> None:
    from icl_patch.evaluation.report import to_json

    if options.json:
        print(to_json(result))
        return
    console = _Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 160  # a file has no width to fit
    for renderable in renderables:
        if isinstance(renderable, str):
            print(renderable)  # as it is: rich would fold it
        else:
            console.print(renderable)
