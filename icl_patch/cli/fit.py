"""``icl-patch fit``: a static patch from a file of examples."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icl_patch.cli import common
from icl_patch.texts import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from icl_patch.static import Example

HELP = "fit one change of weights that stands for a context, for every token"
# As in static, which imports torch.
PARTS = ("mlp", "attention")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    parser.add_argument(
        "--examples",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON: [{"context": TEXT, "questions": [TEXT, …], "answers": [TEXT, …]}, …]; "system"'
        " in place of context makes chats; without answers the model gives them with the context",
    )
    parser.add_argument(
        "--held-out",
        type=Path,
        metavar="FILE",
        help="JSON like --examples: questions to measure on (default: some of the examples)",
    )
    parser.add_argument(
        "--preserve",
        type=Path,
        metavar="FILE",
        help="JSON: [TEXT, …], texts on which the model is to stay as it is (default: a hundred"
        " texts of many kinds)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="apply the tokenizer's chat template; a context begins the user's message",
    )
    parser.add_argument(
        "--end",
        type=lambda text: common.text(text).replace("\\n", "\n"),
        metavar="TEXT",
        help=r"the token that ends an answer, \n for a line end (default: end of sequence, in a"
        " chat the end of the turn)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["mlp"],
        help="the matrices that may change (default: mlp)",
    )
    parser.add_argument(
        "--rank", type=common.positive, default=8, metavar="R", help="of each change (default 8)"
    )
    parser.add_argument(
        "--first-block",
        type=int,
        default=0,
        metavar="N",
        help="the first block that changes (default 0): leaving out blocks takes less time",
    )
    parser.add_argument(
        "--kappa", type=float, default=1.0, help="weight of the preserved texts (default 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="a budget of time for the whole fit"
    )
    parser.add_argument("--steps", type=common.positive, default=60, help="at most (default 60)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="(default 0.005)")
    parser.add_argument("--start", type=Path, metavar="FILE", help="a patch to start from")
    common.add_max_new_tokens(parser, 64, "of an answer")
    parser.add_argument(
        "--accept-worse",
        action="store_true",
        help="write the patch even if it is worse than none, or moves preserved texts",
    )
    kind = common.writable(".safetensors")
    common.add_out(parser, "file to write (.safetensors)", kind, "FILE")


def run(options: argparse.Namespace) -> int:
    """Fit, report and save."""
    common.check_out(options)
    from icl_patch import static

    model, tokenizer = common.load(options)
    examples = read_examples(options, options.examples, model, tokenizer)
    held_out = []
    if options.held_out is not None:
        held_out = read_examples(options, options.held_out, model, tokenizer)
    preserve = None
    if options.preserve is not None:
        preserve = static.documents(model, tokenizer, _read_json(options.preserve, str))
    start = None if options.start is None else static.StaticPatch.load(options.start, model)
    settings = static.Distillation(
        steps=options.steps, learning_rate=options.learning_rate, seed=options.seed
    )
    with common.progress_bar("fitting") as progress:
        patch = static.fit(
            model,
            examples,
            tokenizer=tokenizer,
            held_out=held_out,
            preserve=preserve,
            kappa=options.kappa,
            parts=options.parts,
            rank=options.rank,
            first_block=options.first_block,
            seconds=options.seconds,
            distillation=settings,
            start=start,
            max_new_tokens=options.max_new_tokens,
            accept_worse=options.accept_worse,
            progress=progress,
        )
    patch.save(options.out)
    report = patch.report
    assert report is not None
    result = {"file": str(options.out), **vars(patch.info), "rank": patch.rank, **report.to_json()}
    common.print_result(options, result, f"{options.out}: {patch!r}", str(report))
    return 0


def read_examples(
    options: argparse.Namespace,
    file: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
) -> "list[Example]":
    """The examples of a file.

    Raises:
        ValueError: the file does not hold a list of examples.
    """
    from icl_patch import static

    found: list[Example] = []
    for entry in _read_json(file, dict):
        if not {"questions"} <= entry.keys() <= {"context", "system", "questions", "answers"}:
            raise ValueError(
                f"expected examples with questions, a context or a system message, and perhaps"
                f" answers in {file}, got {sorted(entry)}"
            )
        found += static.examples(model, tokenizer, **entry, chat=options.chat, end=options.end)
    return found


def _read_json(file: Path, kind: type) -> list[Any]:
    """A list of JSON values of one kind, not empty."""
    try:
        value = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"expected JSON in {file}, got {error}") from error
    if not isinstance(value, list) or not value or not all(isinstance(x, kind) for x in value):
        raise ValueError(f"expected a list of {kind.__name__} in {file}, got {value!r:.80}")
    return value
