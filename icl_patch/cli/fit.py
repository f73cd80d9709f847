"""``icl-patch fit``: a static patch from a file of examples."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icl_patch.cli import common

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from icl_patch.static import Example

HELP = "fit one change of weights that stands for a context, for every token"
# As in static, which imports torch.
METHODS = ("auto", "ridge", "distill")
PARTS = ("readers", "writer", "o_proj", "qk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    parser.add_argument(
        "--examples",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON: [{"context": TEXT, "questions": [TEXT, …], "answers": [TEXT, …]}, …]; without'
        " answers the model gives them with the context",
    )
    parser.add_argument(
        "--preserve",
        type=Path,
        metavar="FILE",
        help="JSON: [TEXT, …], texts on which the model is to stay as it is",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a context is the system message of the tokenizer's chat template",
    )
    parser.add_argument(
        "--end",
        type=lambda text: text.replace("\\n", "\n"),
        metavar="TEXT",
        help=r"the token that ends an answer, \n for a line end (default: end of sequence)",
    )
    parser.add_argument(
        "--self-study",
        type=common.positive,
        metavar="N",
        help="the model writes further questions, up to N an example",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="auto",
        help="auto (the default): both, and of the two patches the better one",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["readers", "writer"],
        help="the matrices that may change (default: readers writer)",
    )
    parser.add_argument(
        "--rank",
        type=rank,
        default=8,
        metavar="R",
        help="a number (default: 8); with --method ridge also auto or full",
    )
    parser.add_argument(
        "--kappa", type=float, default=1.0, help="weight of the preserved texts (default 1)"
    )
    parser.add_argument(
        "--preserve-first",
        type=float,
        default=10.0,
        metavar="X",
        help="ridge multiplies kappa by X in the first block and divides by X in the last"
        " (default 10)",
    )
    parser.add_argument(
        "--folds", type=common.positive, default=4, metavar="K", help="of the questions (default 4)"
    )
    parser.add_argument(
        "--steps", type=common.positive, default=50, help="of distillation (default 50)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=1e-2, help="of distillation (default 0.01)"
    )
    parser.add_argument(
        "--start", type=Path, metavar="FILE", help="a patch to start --method distill from"
    )
    common.add_max_new_tokens(parser, 64, "of an answer")
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="continue a stopped fit from its files there"
    )
    parser.add_argument(
        "--hidden-folder",
        type=Path,
        metavar="DIR",
        help="--method ridge keeps the hidden states in this folder instead of in memory",
    )
    common.add_out(parser)


def rank(text: str) -> int | str | None:
    """The rank option: a number, "auto", or None for "full"."""
    return {"auto": "auto", "full": None}[text] if text in ("auto", "full") else int(text)


def run(options: argparse.Namespace) -> int:
    """Fit, report and save."""
    import sys

    from icl_patch import static

    model, tokenizer = common.load(options)
    examples = read_examples(options, tokenizer)
    if options.self_study is not None:
        study: Any = {"seed": options.seed, "max_new_tokens": options.max_new_tokens}
        examples = [
            static.self_study(model, example, options.self_study, **study) for example in examples
        ]
    texts = [] if options.preserve is None else _read_json(options.preserve, str)
    start = None if options.start is None else static.StaticPatch.load(options.start, model)
    settings = static.Distillation(
        steps=options.steps, learning_rate=options.learning_rate, seed=options.seed
    )
    with common.progress_bar("fitting") as progress:
        patch = static.fit(
            model,
            examples,
            options.method,
            parts=options.parts,
            rank=options.rank,
            preserve=static.documents(tokenizer, texts),
            kappa=options.kappa,
            preserve_first=options.preserve_first,
            folds=options.folds,
            distillation=settings,
            start=start,
            state=options.state,
            hidden_folder=options.hidden_folder,
            max_new_tokens=options.max_new_tokens,
            tokenizer=tokenizer,
            on_plan=lambda plan: print(plan, file=sys.stderr),
            progress=progress,
        )
    patch.save(options.out)
    report = patch.report
    assert report is not None
    result = {"file": str(options.out), **vars(patch.info), "rank": patch.rank, **report.to_json()}
    common.print_result(options, result, f"{options.out}: {patch!r}", str(report))
    return 0


def read_examples(
    options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase"
) -> "list[Example]":
    """The examples of the file.

    Raises:
        ValueError: the file does not hold a list of examples.
    """
    from icl_patch.static import Example

    examples = []
    for entry in _read_json(options.examples, dict):
        if not {"context", "questions"} <= entry.keys() <= {"context", "questions", "answers"}:
            raise ValueError(
                "expected examples with context, questions and perhaps answers in"
                f" {options.examples}, got {sorted(entry)}"
            )
        examples.append(Example.from_text(tokenizer, **entry, end=options.end, chat=options.chat))
    return examples


def _read_json(file: Path, kind: type) -> list[Any]:
    """A list of JSON values of one kind, not empty."""
    value = json.loads(common.read_text(file))
    if not isinstance(value, list) or not value or not all(isinstance(x, kind) for x in value):
        raise ValueError(f"expected a list of {kind.__name__} in {file}, got {value!r:.80}")
    return value
