"""``icl-patch report``: what one context does, as an HTML file."""

import argparse
from pathlib import Path
from typing import Any

from icl_patch.cli import common

HELP = "write an HTML page on one context: answers, sizes of the changes, errors, their sources"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(lines=True)
    common.add_model(parser)
    common.add_prompt(parser)
    common.add_update(parser)
    common.add_max_new_tokens(parser, 24, "longest answer")
    parser.add_argument(
        "--groups",
        type=common.positive,
        metavar="N",
        default=64,
        help="cut the context into about N groups of tokens, and leave out each in turn (default"
        " 64, at most 256)",
    )
    common.add_out(parser, "file to write (.html)", common.writable(".html"), "FILE")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the page; 1 if the update does not keep its promise."""
    common.check_question(options)
    common.check_out(options)
    tokenizer = common.load_tokenizer(options)
    prompt = common.read_prompt(options, tokenizer)
    model, _ = common.load(options, tokenizer)
    from icl_patch.atomic_file import write_atomically
    from icl_patch.evaluation import report
    from icl_patch.evaluation.context_report import context_report, to_html

    def answered(answers: dict[str, str], front: str) -> None:
        if not options.json:
            names = {"with_context": "with the context", "without": report.without_context(front)}
            lines = [f"{names.get(name, name)}: {text!r}" for name, text in answers.items()]
            common.print_result(options, {}, *lines)

    with common.progress_bar("measuring", options) as progress:
        result = context_report(
            model,
            tokenizer,
            prompt,
            update=options.update,
            max_new_tokens=options.max_new_tokens,
            keep_first=options.keep_first,
            groups=options.groups,
            name=_name(options.model),
            progress=progress,
            on_answers=answered,
        )
    # a token may be half a character
    page = to_html(result).encode("utf-8", errors="replace")
    write_atomically(options.out, [page])
    found: dict[str, Any] = {"file": str(options.out), "bytes": len(page), **result.to_dict()}
    common.print_result(
        options,
        found,
        report.verdict_lines(result.verified, result.failure),
        f"{options.out}: {len(page)} bytes",
    )
    return 0 if result.passed else 1


def _name(model: str | None) -> str | None:
    """A model's name for a page that is passed on: of a folder its last part, else the id."""
    return Path(model).resolve().name if model is not None and Path(model).exists() else model
