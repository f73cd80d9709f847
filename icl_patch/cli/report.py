"""``icl-patch report``: what one context does, as an HTML file."""

import argparse
from pathlib import Path
from typing import Any

from icl_patch.cli import arguments, inputs, output, progress

HELP = "write an HTML page on one context: answers, sizes of the changes, errors, their sources"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(lines=True)
    arguments.add_model(parser)
    arguments.add_prompt(parser)
    arguments.add_update(parser)
    arguments.add_max_new_tokens(parser, 24, "longest answer")
    parser.add_argument(
        "--groups",
        type=arguments.positive,
        metavar="N",
        default=64,
        help="cut the context into about N groups of tokens, and leave out each in turn (default"
        " 64, at most 256)",
    )
    arguments.add_out(parser, "file to write (.html)", arguments.writable(".html"), "FILE")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the page; 1 if the update does not keep its promise."""
    inputs.check_question(options)
    arguments.check_out(options)
    tokenizer = inputs.load_tokenizer(options)
    prompt = inputs.read_prompt(options, tokenizer)
    model, _ = inputs.load(options, tokenizer)
    from icl_patch.atomic_file import write_atomically
    from icl_patch.evaluation import report
    from icl_patch.evaluation.context_report import context_report, to_html

    def answered(answers: dict[str, str], front: str) -> None:
        if not options.json:
            names = {"with_context": "with the context", "without": report.without_context(front)}
            lines = [f"{names.get(name, name)}: {text!r}" for name, text in answers.items()]
            output.print_result(options, {}, *lines)

    with progress.progress_bar("measuring", options) as update:
        result = context_report(
            model,
            tokenizer,
            prompt,
            update=options.update,
            max_new_tokens=options.max_new_tokens,
            keep_first=options.keep_first,
            groups=options.groups,
            name=_name(options.model),
            progress=update,
            on_answers=answered,
        )
    # a token may be half a character
    page = to_html(result).encode("utf-8", errors="replace")
    write_atomically(options.out, [page])
    found: dict[str, Any] = {"file": str(options.out), "bytes": len(page), **result.to_dict()}
    output.print_result(
        options,
        found,
        report.verdict_lines(result.verified, result.failure),
        f"{options.out}: {len(page)} bytes",
    )
    return 0 if result.passed else 1


def _name(model: str | None) -> str | None:
    """A model's name for a page that is passed on: of a folder its last part, else the id."""
    return Path(model).resolve().name if model is not None and Path(model).exists() else model
