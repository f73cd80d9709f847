"""``icl-patch fit``: a static patch from a file of examples."""

import argparse
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icl_patch.cli import arguments, inputs, output, progress
from icl_patch.texts import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from icl_patch.static import Example
    from icl_patch.static.answers import Answers

HELP = "fit one change of weights that stands for a context, for every token"
# As in static, which imports torch.
PARTS = ("mlp", "attention")
_OF_FIT = ("kappa", "parts", "rank", "first_block", "seconds", "max_new_tokens", "accept_worse")
_ANSWER = ("prompt", "end", "max_new_tokens", "answer")  # in the file of answers, as ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(lines=True)
    arguments.add_model(parser)
    parser.add_argument(
        "--examples",
        type=arguments.existing("a file of examples"),
        required=True,
        metavar="FILE",
        help='JSON: [{"context": TEXT, "questions": [TEXT, …], "answers": [TEXT, …]}, …]; "system"'
        " in place of context makes chats; without answers the model gives them with the context",
    )
    parser.add_argument(
        "--held-out",
        type=arguments.existing("a file of examples"),
        metavar="FILE",
        help="JSON like --examples: questions to measure on (default: some of the examples)",
    )
    parser.add_argument(
        "--preserve",
        type=arguments.existing("a file of texts"),
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
        type=lambda text: arguments.text(text).replace("\\n", "\n"),
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
        "--rank", type=arguments.positive, default=8, metavar="R", help="of each change (default 8)"
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
        "--seconds",
        type=float,
        default=math.inf,
        help="a budget of time for the whole fit; the model's own answers are kept in a file"
        " .answers.json next to --out, from which the next fit takes them",
    )
    parser.add_argument("--steps", type=arguments.positive, default=60, help="at most (default 60)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="(default 0.005)")
    parser.add_argument(
        "--start",
        type=arguments.existing("a patch file"),
        metavar="FILE",
        help="a patch to start from",
    )
    arguments.add_max_new_tokens(parser, 64, "of an answer")
    parser.add_argument(
        "--accept-worse",
        action="store_true",
        help="write the patch even if it is worse than none, or moves preserved texts",
    )
    kind = arguments.writable(".safetensors")
    arguments.add_out(parser, "file to write (.safetensors)", kind, "FILE")


def run(options: argparse.Namespace) -> int:
    """Fit, report and save."""
    arguments.check_out(options)
    entries = _read_entries(options.examples)
    held_out = [] if options.held_out is None else _read_entries(options.held_out)
    texts = None if options.preserve is None else _read_json(options.preserve, str)
    tokenizer = inputs.load_tokenizer(options)
    from icl_patch import static
    from icl_patch.errors import HarmfulPatchError, StaticPatchWarning

    start = None if options.start is None else static.StaticPatch.load(options.start)
    _check_prompts(options, tokenizer, [*entries, *held_out])
    model, _ = inputs.load(options, tokenizer)
    settings = static.Distillation(
        steps=options.steps, learning_rate=options.learning_rate, seed=options.seed
    )
    optional: dict[str, Any] = {
        "held_out": _examples(options, held_out, model, tokenizer),
        "preserve": None if texts is None else static.documents(model, tokenizer, texts),
        **{name: getattr(options, name) for name in _OF_FIT},
    }
    examples = _examples(options, entries, model, tokenizer)
    with (
        kept_answers(options, model, tokenizer) as answers,
        progress.progress_bar("fitting", options) as update,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", StaticPatchWarning)  # the report has them
        try:
            patch = static.fit(
                model,
                examples,
                tokenizer=tokenizer,
                distillation=settings,
                start=start,
                answers=answers,
                progress=update,
                say=partial(progress.say, options),
                **optional,
            )
        except HarmfulPatchError as error:
            for note in error.report.warnings:
                progress.say(options, f"warning: {note}")
            raise
    patch.save(options.out)
    report = patch.report
    assert report is not None
    result = {"file": str(options.out), **vars(patch.info), "rank": patch.rank, **report.to_json()}
    output.print_result(options, result, f"{options.out}: {patch!r}", str(report))
    return 0


def _read_entries(file: Path) -> list[dict[str, Any]]:
    """The examples of a file as they stand there.

    Raises:
        ValueError: the file does not hold a list of examples.
    """
    entries = _read_json(file, dict)
    for entry in entries:
        if not {"questions"} <= entry.keys() <= {"context", "system", "questions", "answers"}:
            raise ValueError(
                f"expected examples with questions, a context or a system message, and perhaps"
                f" answers in {file}, got {sorted(entry)}"
            )
        questions, answers = entry["questions"], entry.get("answers")
        if not isinstance(questions, list) or not isinstance(answers, list | None):
            raise ValueError(
                f"expected lists of questions and answers in {file}, got {questions!r:.40} and"
                f" {answers!r:.40}"
            )
        texts = [entry[name] for name in ("context", "system") if entry.get(name) is not None]
        wrong = [text for text in (*texts, *(answers or ())) if not isinstance(text, str)]
        if wrong:
            raise ValueError(
                f"expected the context, the system message and each answer in {file} as text, got"
                f" {wrong[0]!r:.80}"
            )
    return entries


def _check_prompts(
    options: argparse.Namespace,
    tokenizer: "PreTrainedTokenizerBase",
    entries: Sequence[dict[str, Any]],
) -> None:
    """Raises ValueError for questions that the tokenizer's chat template cannot write."""
    from icl_patch.models.prompts import make_prompt

    for entry in entries:
        for question in entry["questions"]:
            places = {name: entry.get(name) for name in ("context", "system")}
            make_prompt(tokenizer, question, chat=options.chat, **places)


def _examples(
    options: argparse.Namespace,
    entries: Sequence[dict[str, Any]],
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
) -> "list[Example]":
    from icl_patch import static

    parts = {"chat": options.chat, "end": options.end}
    found = [static.examples(model, tokenizer, **entry, **parts) for entry in entries]
    return [example for examples in found for example in examples]


@contextmanager
def kept_answers(
    options: argparse.Namespace, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> "Iterator[Answers]":
    """The model's own answers, kept in a file next to ``--out``. It is read at the beginning, if an
    earlier fit has written it, and written at the end, also when the fit fails.

    Raises:
        ValueError: the file there holds something else, or answers of another model.
    """
    from icl_patch.atomic_file import write_atomically
    from icl_patch.patch.fingerprints import weight_fingerprint

    file: Path = options.out.with_suffix(".answers.json")
    fingerprint, answers = weight_fingerprint(model), dict[tuple[Any, Any, int], Any]()
    try:
        answers = _read_answers(file, fingerprint) if file.exists() else answers
    except ValueError:
        if not options.force:
            raise
    if answers:
        progress.say(options, f"{file}: {len(answers)} answers of the model, from an earlier fit")
    known = len(answers)
    try:
        yield answers
    finally:
        if len(answers) > known:
            entries = [
                {
                    **dict(zip(_ANSWER, (*key, answer), strict=True)),
                    "text": tokenizer.decode(answer),
                }
                for key, answer in answers.items()
            ]
            content = json.dumps({"model": fingerprint, "answers": entries}, indent=1)
            write_atomically(file, [content.encode()])
            kept = f"{file}: the model's answers, which the next fit takes from there"
            progress.say(options, kept)


def _read_answers(file: Path, fingerprint: str) -> "Answers":
    """The answers of a file that :func:`kept_answers` has written."""
    try:
        content = json.loads(read_text(file))
        entries = [[entry[name] for name in _ANSWER] for entry in content["answers"]]
        answers = {
            (tuple(prompt), tuple(end), int(most)): tuple(answer)
            for prompt, end, most, answer in entries
        }
        of_model = content["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected answers that an earlier fit has kept in {file}, got something else: move it"
            " away, give another --out, or --force"
        ) from error
    if of_model != fingerprint:
        raise ValueError(
            f"expected answers of this model in {file}, got those of another, or of other weights:"
            " move it away, give another --out, or --force"
        )
    return answers


def _read_json(file: Path, kind: type) -> list[Any]:
    """A list of JSON values of one kind, not empty."""
    try:
        value = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"expected JSON in {file}, got {error}") from error
    if not isinstance(value, list) or not value or not all(isinstance(x, kind) for x in value):
        raise ValueError(f"expected a list of {kind.__name__} in {file}, got {value!r:.80}")
    return value
