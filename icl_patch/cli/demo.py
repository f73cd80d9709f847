"""``icl-patch demo``: answers with, without and with the patch, verified, and a report of them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icl_patch.cli import common

if TYPE_CHECKING:
    from rich.table import Table

    from icl_patch.evaluation.demo import Answers

HELP = "show the main job on the embedded model, or on any other, and verify it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="local folder or hub id of a model to answer six prompts with, chats with a system"
        " message among them (default: the embedded model on held-out prompts)",
    )
    parser.add_argument(
        "--prompts",
        type=common.positive,
        default=20,
        help="held-out prompts of the embedded model to verify (default 20)",
    )
    common.add_max_new_tokens(parser, 26, "tokens to verify per prompt")
    parser.add_argument(
        "--prompts-per-kind",
        type=common.positive,
        default=25,
        help="its prompts of each kind to answer (default 25)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("icl-patch-report"),
        metavar="DIR",
        help="folder to write the report to",
    )
    common.add_verbose(parser)


def run(options: argparse.Namespace) -> int:
    """Answer, verify and write the report; 1 if an answer differs or a promise is not kept.

    On a model of the user's the promise is that of the exact update: errors of the closed forms can
    be above the model's noise, as on SmolLM2-135M-Instruct.
    """
    options.report.mkdir(parents=True, exist_ok=True)
    common.import_torch()
    with common.stage("importing transformers"):
        from transformers.utils import logging

        from icl_patch.evaluation import demo, figures, report
        from icl_patch.evaluation.loading import load_model

    logging.disable_progress_bar()
    name = options.model
    with common.stage(f"loading {name or 'the embedded model'}"):
        model, tokenizer = load_model(name)
    prompts = demo.prompts_for(tokenizer) if name else []
    with common.stage("answering with the context, without it, and patched"):
        if name:
            answers = demo.answer_each(model, tokenizer, prompts)
        else:
            answers = demo.three_answers(model, tokenizer, options.prompts_per_kind)
    with common.progress_bar("verifying each update and dtype") as progress:
        new = options.max_new_tokens
        if name:
            context = demo.first_of_each_kind(tokenizer, prompts)
            verified = demo.verify_grid(context, new, progress, model, tokenizer)
        else:
            verified = demo.verify_grid(demo.held_out_texts(options.prompts), new, progress)
    tables = [_examples(answers), *([] if name else [_accuracy(answers)])]
    details = report.verify_tables(verified)
    page, data, figure = (
        options.report / name for name in ("report.md", "report.json", "exactness.png")
    )
    result: dict[str, Any] = {
        "answers": [{**vars(row.prompt), **row.texts()} for row in answers],
        "verify": [entry.to_dict() for entry in verified],
        "passed": (
            all(entry.passed for entry in verified if entry.update == "exact" or not name)
            and all(row.patched == row.with_context for row in answers)
        ),
        "report": [str(page), str(data), str(figure)],
    }
    page.write_text(
        "# icl-patch demo\n\n"
        + report.to_markdown([*tables, *details])
        + f"\n{report.legend(details)}\n"
        + f"\n![L∞ and TVD per token]({figure.name})\n",
        encoding="utf-8",
    )
    report.write_json(data, result)
    exact = next(one for one in verified if (one.update, one.dtype) == ("exact", "bfloat16"))
    generated = [step.token_id for step in exact.steps[: options.max_new_tokens]]
    chat = any(one.prompt.kind == "chat" for one in prompts)  # then verified first
    answer = demo.up_to_the_end(model, tokenizer, generated, one_line=not chat)
    figures.plot(exact, [str(tokenizer.decode([token])) for token in answer], figure)
    verdicts = [f"{one.update}, {one.dtype}: {report.verdict(one)}" for one in verified]
    meaning = report.legend(details)
    shown = [*tables, *([*details, meaning] if options.verbose else verdicts)]
    common.print_result(options, result, *shown, f"report: {page}, {data}, {figure}")
    return 0 if result["passed"] else 1


def _examples(answers: "list[Answers]") -> "Table":
    """The first three prompts of every kind."""
    from icl_patch.evaluation import report

    columns = ["task", "context (absorbed)", "question"]
    columns += ["with context", "without", "without, but patched"]
    rows = [
        [
            kind,
            row.prompt.context.strip().replace("\n", " / "),
            row.prompt.question,
            *row.texts().values(),
        ]
        for kind in dict.fromkeys(row.prompt.kind for row in answers)
        for row in [row for row in answers if row.prompt.kind == kind][:3]
    ]
    return report.table("Answers", columns, rows)


def _accuracy(answers: "list[Answers]") -> "Table":
    """The share of whole answers right, by kind."""
    from icl_patch.evaluation import embedded, report

    rows = []
    for kind in embedded.KINDS:
        right = [
            [text == row.prompt.answer for text in row.texts().values()]
            for row in answers
            if row.prompt.kind == kind
        ]
        shares = [sum(column) / len(right) for column in zip(*right, strict=True)]
        rows.append([kind, *map(report.percent, [*shares, embedded.CHANCE[kind]])])
    return report.table(
        f"Whole answer right, {len(answers) // len(embedded.KINDS)} prompts a task",
        ["task", "with context", "without", "without, but patched", "chance"],
        rows,
    )
