"""Options, progress and printing that the commands share.

Nothing here imports torch before an option's value or a command asks for it.
"""

import argparse
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.status import Status

from icl_patch.cli.output import OutputError, output
from icl_patch.texts import check_text, read_text

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
    """Add ``--json``, which every command has; :func:`print_result` follows it."""
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
    kind: Callable[[str], Path] = Path,
    metavar: str = "DIR",
) -> None:
    """Add ``--out``, the file or folder that the command writes, and ``--force``, for
    :func:`check_out`.
    """
    parser.add_argument("--out", type=kind, required=True, metavar=metavar, help=meaning)
    meaning = "replace what is there already under --out"
    parser.add_argument("--force", action="store_true", default=None, help=meaning)


def check_out(options: argparse.Namespace) -> None:
    """Raises ValueError if ``--out`` would replace something, without ``--force``."""
    out: Path = options.out
    filled = any(out.iterdir()) if out.is_dir() else out.exists()
    if filled and not options.force:
        raise ValueError(f"expected a new name for --out, there is {out} already: --force replaces")


def add_patch(parser: argparse.ArgumentParser, *, required: bool = True, meaning: str) -> None:
    """Add ``--patch``."""
    parser.add_argument("--patch", type=Path, metavar="FILE", required=required, help=meaning)


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
        parser.add_argument("--seed", type=int, default=0, help=meaning)


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


def add_prompt(
    parser: argparse.ArgumentParser, default: str | None = None
) -> "argparse._MutuallyExclusiveGroup":
    """Add a context, its question and ``--chat``, for :func:`read_prompt`, which requires the first
    two, or with a default for :func:`prompt_text`.

    Returns:
        The options of which one gives the context.
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
        "--context-file", type=Path, metavar="FILE", help="read the context from a UTF-8 file"
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
    return source


def read_prompt(options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase") -> "Prompt":
    """The prompt that the options give, with its context and without it.

    Raises:
        ValueError: no question; or as :func:`icl_patch.models.prompts.make_prompt`.
    """
    from icl_patch.models.prompts import make_prompt

    if options.question is None:
        raise ValueError("expected --question, the text after the context")
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
        type=_existing,
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


def _existing(text: str) -> Path:
    """A path at which there is something."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"expected a data set, there is no {text!r}")
    return Path(text)


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


def positive(text: str) -> int:
    """An integer option ≥ 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number ≥ 1, got {text}")
    return number


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


def writable(suffix: str) -> Callable[[str], Path]:
    """An output file in an existing folder, so that no result is lost to a mistyped name."""

    def check(text: str) -> Path:
        path = Path(text)
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


def load(options: argparse.Namespace) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model that the options name, and its tokenizer; seeds torch.

    Raises:
        ValueError: a revision of the embedded model.
        OSError: nothing can be loaded.
    """
    if options.revision is not None and options.model in (None, "embedded"):
        raise ValueError("expected no --revision of the embedded model")
    torch = import_torch()
    with stage(f"loading {options.model or 'the embedded model'}"):
        from transformers.utils import logging

        from icl_patch.evaluation.loading import load_model

        torch.manual_seed(options.seed)
        logging.disable_progress_bar()
        return load_model(options.model, None, options.dtype, options.device, options.revision)


def load_for_patch(
    options: argparse.Namespace, info: "PatchInfo | StaticInfo"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """:func:`load` in the dtype of a patch, unless the options name another.

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
    return load(options)


def load_static(
    options: argparse.Namespace,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, StaticPatch]":
    """The model, its tokenizer and the static patch ``--patch``.

    Raises:
        PatchFormatError: the file is a patch for each token.
        ValueError: as :func:`load_for_patch`.
    """
    with stage("importing torch and transformers"):
        from icl_patch.static import StaticPatch

    model, tokenizer = load_for_patch(options, StaticPatch.load(options.patch).info)
    return model, tokenizer, StaticPatch.load(options.patch, model, tokenizer)


def attach(options: argparse.Namespace, model: Any, tokenizer: Any) -> "ContextPatcher":
    """A patcher of the update that the options name."""
    from icl_patch.patcher import ContextPatcher

    with stage("attaching: trying the model's blocks"):
        return ContextPatcher(model, options.update, tokenizer=tokenizer)


def context_text(options: argparse.Namespace) -> str | None:
    """The context that the options give, if they give one.

    Raises:
        ValueError: the file is empty; or as :func:`icl_patch.texts.read_text`.
    """
    if options.context_file is not None:
        if not (content := read_text(options.context_file)):
            raise ValueError(f"expected a context in {options.context_file}, got an empty file")
        return content
    context: str | None = options.context
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
    """With which token the prompts of a static patch are to begin, a line if it is known."""
    return [
        f"prompts must begin with the token {token}, {tokenizer.decode([token])!r}"
        for token in patch.info.front
    ]


def import_torch() -> Any:
    """torch, imported under a label: it takes seconds."""
    with stage("importing torch"):
        import torch
    return torch


def stage(title: str) -> Status:
    """A labelled spinner on stderr if that is a terminal, for work that cannot be counted."""
    return _stderr().status(title)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal; call the yielded function with (done, total)."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=_stderr(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _stderr() -> Console:
    """Stderr, to which nothing is written unless it is a terminal."""
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
