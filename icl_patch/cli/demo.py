"""``icl-patch demo``: answers with, without and with the patch, verified."""

import argparse
from itertools import groupby, islice
from operator import itemgetter
from statistics import mean
from typing import TYPE_CHECKING, Any

from icl_patch.cli import arguments, inputs, output, progress

if TYPE_CHECKING:
    from rich.table import Table

HELP = "show the main job on the embedded model, or on any other, and verify it"

_ANSWERS = {
    "with_context": "with context",
    "without": "without the context",
    "patched": "without it, but patched",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(lines=True)
    meaning = (
        "local folder or hub id of a model to answer few-shot prompts with, and chats with a system"
        " message or, without a chat template, a passage (default: the embedded model on held-out"
        " prompts)"
    )
    arguments.add_model(parser, meaning, of_patch=True)
    parser.add_argument(
        "--prompts",
        type=arguments.positive,
        default=20,
        help="held-out prompts of the embedded model to answer and verify (default 20)",
    )
    arguments.add_keep_first(parser)
    arguments.add_max_new_tokens(parser, 26, "most tokens to verify per prompt")
    arguments.add_verbose(parser)


def run(options: argparse.Namespace) -> int:
    """Answer and verify; 1 if an answer differs or a promise is not kept.

    On a model of the user's the promise is that of the exact update: errors of the closed forms can
    be above the model's noise, as on SmolLM2-135M-Instruct.
    """
    model, tokenizer = inputs.load(options)
    from icl_patch.evaluation import demo, report

    name, new, keep_first = options.model, options.max_new_tokens, options.keep_first
    prompts = demo.prompts_for(tokenizer) if name else demo.held_out(options.prompts)

    def show(*shown: Any) -> None:
        if not options.json:
            output.print_result(options, {}, *shown)

    answers = []
    title = "answering with the context, without it, and patched"
    with progress.progress_bar(title, options) as bar:
        for row in demo.answer_each(model, tokenizer, prompts, keep_first):
            answers.append(row)
            bar(len(answers), len(prompts))
    dtype = str(model.dtype).removeprefix("torch.")
    promise = f"patched: update exact in {dtype}, which promises every bit of the logits"
    show(_examples(answers), *([] if name else [_accuracy(answers)]), promise)
    # of a model of the user's the first chat or the passage, and the first few-shot prompt
    chosen = list({prompt.kind: prompt for prompt in reversed(prompts)}.values())
    chosen = chosen if name else prompts
    verified = []
    with progress.progress_bar("verifying each update and dtype", options) as bar:
        for one in demo.verify_grid(model, tokenizer, chosen, new, keep_first):
            verified.append(one)
            bar(len(verified), len(demo.GRID))
            if not options.verbose:
                show(f"{one.update}, {one.dtype}: {report.verdict(one)}")
    result: dict[str, Any] = {
        "answers": answers,
        "verify": [entry.to_dict() for entry in verified],
        "passed": (
            all(entry.passed for entry in verified if entry.update == "exact" or not name)
            and all(row["patched"] == row["with_context"] for row in answers)
        ),
    }
    tables = report.verify_tables(verified) if options.verbose else []
    output.print_result(options, result, *tables, *([report.legend(tables)] if tables else []))
    return 0 if result["passed"] else 1


def _examples(answers: list[dict[str, str]]) -> "Table":
    """The first three prompts of every kind."""
    from icl_patch.evaluation import report

    columns = ["task", "context", "question", "without: behind"]
    rows = [
        [
            kind,
            row["context"].strip().replace("\n", " / "),
            row["question"],
            report.visible_text(row["front"]) if row["front"] else "nothing",
            *(row[answer] for answer in _ANSWERS),
        ]
        for kind, asked in groupby(answers, itemgetter("kind"))
        for row in islice(asked, 3)
    ]
    return report.table("Answers", [*columns, *_ANSWERS.values()], rows)


def _accuracy(answers: list[dict[str, str]]) -> "Table":
    """The share of whole answers right, by kind."""
    from icl_patch.evaluation import embedded, report

    rows = []
    for kind, asked in groupby(answers, itemgetter("kind")):
        right = [[row[answer] == row["answer"] for answer in _ANSWERS] for row in asked]
        shares = [*map(mean, zip(*right, strict=True)), embedded.CHANCE[kind]]
        rows.append([kind, *map(report.percent, shares)])
    columns = ["task", *_ANSWERS.values(), "chance"]
    return report.table(f"Whole answer right, of {len(answers)} prompts", columns, rows)
