"""``icl-patch verify``: is the patched model without a context the model with it?"""

import argparse

from icl_patch.cli import arguments, inputs, output, progress

HELP = "compare the patched model without context with the model with it, token by token"
_MOST_CHARACTERS = 400  # of a prompt that is printed
_OF_ONE = ("question",)
_OF_MANY = (
    "context_column",
    "system_column",
    "kept_column",
    "task_column",
    "batch_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_model(parser)
    source = arguments.add_prompt(
        parser, "the paper's Mars prompt; for the embedded model its first held-out prompt"
    )
    arguments.add_update(parser)
    arguments.add_max_new_tokens(parser, 50, "steps at most: they stop where the answer ends")
    parser.add_argument(
        "--keep-last",
        type=int,
        default=0,
        metavar="N",
        help="tokens before the current one to keep as context",
    )
    arguments.add_verbose(parser)
    many = parser.add_argument_group("data sets", "every row's prompt, and a summary by task")
    arguments.add_dataset(many, source)
    many.add_argument("--task-column", metavar="NAME", help="of the tasks (default: one task)")
    many.add_argument(
        "--batch-size", type=arguments.positive, metavar="N", help="rows at once (default 8)"
    )


def run(options: argparse.Namespace) -> int:
    """Verify a model; 1 if the promise is not kept."""
    if options.dataset is not None:
        arguments.refuse(options, _OF_ONE, "with --dataset")
        return _verify_many(options)
    arguments.refuse(options, _OF_MANY, "without --dataset")
    return _verify_one(options)


def _verify_one(options: argparse.Namespace) -> int:
    prompt = inputs.prompt_text(options)
    tokenizer = inputs.load_tokenizer(options)
    inputs.check_chat(options, tokenizer)
    model, _ = inputs.load(options, tokenizer)
    from icl_patch.evaluation import report
    from icl_patch.evaluation.loading import default_context
    from icl_patch.evaluation.verify import verify

    prompt = default_context(model) if prompt is None else prompt
    with progress.progress_bar("attaching, then verifying each token", options) as update:
        result = verify(
            model,
            tokenizer,
            context=prompt,
            max_new_tokens=options.max_new_tokens,
            update=options.update,
            keep_last=options.keep_last,
            keep_first=options.keep_first,
            chat=options.chat,
            system=options.system,
            progress=update,
            name=options.model,
        )
    text = "".join(str(tokenizer.decode([token.token_id])) for token in result.steps)
    tables = report.verify_tables([result])
    details = [*tables, report.legend(tables)] if options.verbose else ["details: --verbose"]
    output.print_result(
        options,
        result.to_dict(),
        f"{result.model}, {result.family}",
        f"prompt: {_shortened(prompt)!r}",
        f"generated: {text!r}",
        report.verdict_lines(result),
        *details,
    )
    return 0 if result.passed else 1


def _shortened(prompt: str) -> str:
    """A prompt of any length with its end, where the question is."""
    return prompt if len(prompt) <= _MOST_CHARACTERS else f"…{prompt[-_MOST_CHARACTERS:]}"


def _verify_many(options: argparse.Namespace) -> int:
    """Verify the rows of a data set; 1 if the promise is not kept, or rows were rejected."""
    columns = inputs.dataset_columns(options, options.task_column)
    tokenizer = inputs.load_tokenizer(options)
    inputs.check_prompts(tokenizer, columns)
    model, _ = inputs.load(options, tokenizer)
    from icl_patch.evaluation import dataset_report
    from icl_patch.evaluation.verify_dataset import verify_dataset

    with progress.progress_bar("verifying each row", options) as update:
        result = verify_dataset(
            model,
            tokenizer,
            options.dataset,
            columns,
            max_new_tokens=options.max_new_tokens,
            update=options.update,
            keep_last=options.keep_last,
            keep_first=options.keep_first,
            batch_rows=options.batch_size or 8,
            progress=update,
            name=options.model,
        )
    lines = dataset_report.verdict_lines(result)
    output.print_result(options, result.to_dict(), dataset_report.table(result), *lines)
    return 0 if result.passed and not result.rejected else 1
