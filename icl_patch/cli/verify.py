"""``icl-patch verify``: is the patched model without a context the model with it?"""

import argparse

from icl_patch.cli import common

HELP = "compare the patched model without context with the model with it, token by token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    common.add_prompt(
        parser, "the paper's Mars prompt; for the embedded model its first held-out prompt"
    )
    common.add_update(parser)
    common.add_max_new_tokens(parser, 50, "steps")
    parser.add_argument(
        "--keep-last",
        type=int,
        default=0,
        metavar="N",
        help="tokens before the current one to keep as context",
    )
    parser.add_argument(
        "--plot",
        type=common.writable(".png", ".svg", ".pdf"),
        metavar="FILE",
        help="write the paper's Figure 3 to FILE (.png, .svg or .pdf)",
    )
    common.add_verbose(parser)


def run(options: argparse.Namespace) -> int:
    """Verify a model; 1 if the promise is not kept."""
    model, tokenizer = common.load(options)
    from icl_patch.evaluation import report
    from icl_patch.evaluation.verify import verify

    with common.progress_bar("attaching, then verifying each token") as progress:
        result = verify(
            model,
            tokenizer,
            context=common.prompt_text(options),
            max_new_tokens=options.max_new_tokens,
            update=options.update,
            keep_last=options.keep_last,
            chat=options.chat,
            system=options.system,
            progress=progress,
            name=options.model,
        )
    tokens = [str(tokenizer.decode([token.token_id])) for token in result.steps]
    if options.plot is not None:
        from icl_patch.evaluation import figures

        figures.plot(result, tokens, options.plot)
    text = "".join(tokens)
    tables = report.verify_tables([result])
    details = [*tables, report.legend(tables)] if options.verbose else ["details: --verbose"]
    common.print_result(
        options,
        result.to_dict(),
        f"{result.model}, {result.family}, generated: {text!r}",
        report.verdict_lines(result),
        *details,
    )
    return 0 if result.passed else 1
