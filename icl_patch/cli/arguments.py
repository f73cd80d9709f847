"""The options that the commands share, and the types of their values.

Nothing here imports torch before an option's value asks for it.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from icl_patch.cli.progress import import_torch
from icl_patch.texts import check_path, check_text

if TYPE_CHECKING:
    import torch

# As in patch.serialization, which imports torch.
UPDATES = ("direct", "stable", "exact")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every command has; :func:`icl_patch.cli.output.print_result` follows
    it. A command that takes minutes sets ``lines``, for :func:`icl_patch.cli.progress.say`.
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


def check_apart(options: argparse.Namespace, foreign: str, what: str) -> None:
    """Raises ValueError if the folder ``--out`` has the file ``foreign``: ``what``, which
    transformers would load together with the result.
    """
    if (options.out / foreign).exists():
        raise ValueError(
            f"expected another --out than {options.out}, which holds {what} ({foreign}):"
            " transformers would load both, and change the weights twice"
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
    which says the dtype, for :func:`icl_patch.cli.inputs.load`.
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
    """Add a context, its question, ``--chat`` and ``--keep-first``, for
    :func:`icl_patch.cli.inputs.read_prompt`, which requires the first two, or with a default for
    :func:`icl_patch.cli.inputs.prompt_text`.

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


def add_dataset(
    group: "argparse._ArgumentGroup", source: "argparse._MutuallyExclusiveGroup"
) -> None:
    """Add ``--dataset``, in place of a context, and its columns, for
    :func:`icl_patch.cli.inputs.dataset_columns`.
    """
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
    """An output file in a folder that can be written, so that no result is lost to a mistyped
    name.
    """

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
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
        folder = Path(os.path.realpath(path)).parent  # as write_atomically replaces a link's target
        try:
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise argparse.ArgumentTypeError(
                f"expected a folder that can be written, got {str(folder)!r}: {error.strerror}"
            ) from error
        return path

    return check
