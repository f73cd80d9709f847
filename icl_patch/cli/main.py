"""The command line: ``icl-patch demo | verify | generate | extract | inspect | bench | tune``.

Every command prints text and tables for people, or with ``--json`` one JSON object on stdout and
nothing else. Progress goes to stderr, and only to a terminal. Exit status: 0 fine, 1 the check
failed (a patch that is broken or of another model, an effect that no change of weights can have), 2
bad usage, 130 interrupted.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import icl_patch
from icl_patch.bench import BENCHMARKS
from icl_patch.bench.results import Results, default_folder
from icl_patch.bench.running import BenchOptions, redraw, run
from icl_patch.errors import ControllabilityError, FingerprintMismatch, PatchFormatError
from icl_patch.evaluation import architecture_suite, demo, embedded, report
from icl_patch.evaluation.verify import default_context, encode_contexts, load_model, verify
from icl_patch.generation.loop import LOGITS, GenerationStep
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.serialization import UPDATES
from icl_patch.patcher import ContextPatcher

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_TUNED = (torch.bfloat16, torch.float16, torch.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ∞ must not cost the result
    options = _parser().parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except (FingerprintMismatch, PatchFormatError, ControllabilityError) as error:
        print(f"icl-patch {options.command}: {error}", file=sys.stderr)
        return 1
    # whoever read stdout has seen enough; what is still buffered goes nowhere
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"icl-patch {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="icl-patch", description="A context as a change of weights: W + u vᵀ, one per token."
    )
    parser.add_argument("--version", action="version", version=f"icl-patch {icl_patch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _command(
        commands, "demo", _demo, "show the main job on the embedded model, and verify it"
    )
    command.add_argument(
        "--prompts", type=_positive, default=20, help="held-out prompts to verify (default 20)"
    )
    command.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=26,
        help="tokens to verify per prompt (default 26)",
    )
    command.add_argument(
        "--prompts-per-kind",
        type=_positive,
        default=25,
        help="prompts of each kind to answer (default 25)",
    )
    command.add_argument(
        "--report",
        type=Path,
        default=Path("icl-patch-report"),
        metavar="DIR",
        help="folder to write the report to",
    )

    command = _command(
        commands,
        "verify",
        _verify,
        "compare the patched model without context with the model with it, token by token",
    )
    _add_model(command)
    _add_context(
        command, "the paper's Mars prompt; for the embedded model its first held-out prompt"
    )
    _add_update(command)
    command.add_argument(
        "--max-new-tokens", type=_positive, default=50, metavar="N", help="steps (default 50)"
    )
    command.add_argument(
        "--keep-last",
        type=int,
        default=0,
        metavar="N",
        help="tokens before the current one to keep as context",
    )
    command.add_argument(
        "--plot",
        type=_writable(".png", ".svg", ".pdf"),
        metavar="FILE",
        help="write the paper's Figure 3 to FILE (.png, .svg or .pdf)",
    )

    command.add_argument(
        "--all-families",
        action="store_true",
        help="instead of MODEL: every block form, on small random models",
    )

    command = _command(
        commands, "generate", _generate, "generate with freshly patched weights at every token"
    )
    _add_model(command)
    _add_context(command, "as for verify")
    _add_update(command)
    command.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=50,
        metavar="N",
        help="at most so many tokens (default 50)",
    )
    command.add_argument(
        "--logits",
        choices=LOGITS,
        default="reduced",
        help="which logits to choose from (default: reduced)",
    )
    command.add_argument(
        "--fast",
        action="store_true",
        help="both streams over one cache; not for every model, nor for --update exact",
    )
    command.add_argument(
        "--compiled", action="store_true", help="compile the step, in seconds to minutes; likewise"
    )
    command.add_argument(
        "--check-every",
        type=_positive,
        default=0,
        metavar="N",
        help="replay every N-th token without the context",
    )
    command.add_argument(
        "--sample",
        action="store_true",
        help="sample, as the model's generation configuration says (default: greedy)",
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="with --sample: of the softmax"
    )

    command = _command(commands, "extract", _extract, "write the patch of a context to a file")
    _add_model(command)
    _add_context(command, "required", required=True)
    _add_update(command)
    command.add_argument(
        "--kept",
        required=True,
        metavar="TEXT",
        help="the tokens that are to run without the context",
    )
    command.add_argument("--prefix", metavar="TEXT", help="tokens before the context that stay")
    command.add_argument(
        "--out",
        type=_writable(".safetensors"),
        required=True,
        metavar="FILE",
        help="file to write (.safetensors)",
    )

    command = _command(
        commands, "inspect", _inspect, "read a patch file; with --model, check it and replay it"
    )
    command.add_argument("file", type=Path, metavar="FILE")
    command.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, hub id, or 'embedded': check that the patch fits it, and replay it",
    )
    _add_place(command)

    command = _command(
        commands, "bench", _bench, "time the kernels beside what they replace, and write the tables"
    )
    command.add_argument(
        "name", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)"
    )
    command.add_argument(
        "--device",
        type=_device,
        metavar="DEVICE",
        default=torch.device("cpu"),
        help="cpu, cuda, … (default: cpu)",
    )
    command.add_argument(
        "--threads", type=_positive, metavar="N", help="of the CPU (default: torch's)"
    )
    command.add_argument(
        "--quick", action="store_true", help="a few minutes: the most telling shapes, fewer rounds"
    )
    command.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        default=(1, 1),
        help="only the I-th of N parts of the cases",
    )
    command.add_argument(
        "--fresh",
        action="store_true",
        help="measure again what the tables have of this code and environment",
    )
    command.add_argument(
        "--seconds",
        type=_positive,
        metavar="S",
        default=math.inf,
        help="begin no case of a benchmark after S seconds",
    )
    command.add_argument(
        "--plots",
        action="store_true",
        help="measure nothing: draw the pictures and tables of what was measured",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the tables (default: $ICL_RESULTS, else bench/results)",
    )

    command = _command(
        commands,
        "tune",
        _tune,
        "choose the kernels' configurations for this GPU, by measuring, and write its data file",
    )
    command.add_argument(
        "--device",
        type=_device,
        metavar="DEVICE",
        default=torch.device("cpu"),
        help="cuda, cuda:1, … (required)",
    )
    command.add_argument(
        "--dtype",
        type=_dtype,
        nargs="+",
        metavar="DTYPE",
        default=list(_TUNED),
        help="default: bf16 fp16 fp32",
    )
    command.add_argument(
        "--quick", action="store_true", help="minutes: a shape per class, fewer numbers of rows"
    )
    command.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        default=os.cpu_count(),
        help="compiling processes (default: the cores)",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the data file (default: where the kernels look for it)",
    )
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], description: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=description, description=description.capitalize() + "."
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    command.set_defaults(run=run)
    return command


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="local folder or hub id (default: the embedded model)",
    )
    _add_place(command)
    command.add_argument(
        "--dtype",
        type=_dtype,
        metavar="DTYPE",
        help="fp32, bf16 or fp16 (default: as saved; embedded: fp32)",
    )
    command.add_argument(
        "--seed", type=int, default=0, help="of the random number generators (default 0)"
    )


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    command.add_argument(
        "--device", type=_device, metavar="DEVICE", help="cpu, cuda, cuda:1, … (default: cpu)"
    )


def _add_context(command: argparse.ArgumentParser, default: str, required: bool = False) -> None:
    given = command.add_mutually_exclusive_group(required=required)
    given.add_argument(
        "--context",
        metavar="TEXT",
        help=f"the context (default: {default})" if not required else "the context",
    )
    given.add_argument(
        "--context-file", type=Path, metavar="FILE", help="read the context from a UTF-8 file"
    )
    command.add_argument(
        "--chat", action="store_true", help="apply the tokenizer's chat template to the context"
    )


def _add_update(command: argparse.ArgumentParser) -> None:
    command.add_argument("--update", choices=UPDATES, default="exact", help="default: exact")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number ≥ 1, got {text}")
    return number


def _part(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 ≤ I ≤ N, got {text!r}")
    return int(i), int(n)


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}, got {text!r}")
    return _DTYPES[text]


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a device of this machine, got {text!r}: {str(error).splitlines()[0]}"
        ) from error
    return device


def _writable(*suffixes: str) -> Callable[[str], Path]:
    """A path in a folder that is there, so that no result is lost to a mistyped name."""

    def check(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(
                f"expected a file name ending in {', '.join(suffixes)}, got {text!r}"
            )
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"expected a folder that exists, got {str(path.parent)!r}"
            )
        return path

    return check


def _load(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _check_revision(options)
    torch.manual_seed(options.seed)
    return load_model(options.model, None, options.dtype, options.device, options.revision)


def _check_revision(options: argparse.Namespace) -> None:
    if options.revision is not None and options.model in (None, "embedded"):
        raise ValueError("expected no --revision of the embedded model")


def _context(options: argparse.Namespace) -> str | None:
    if options.context_file is not None:
        return str(options.context_file.read_text(encoding="utf-8"))
    context: str | None = options.context
    return context


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal: call what it yields with (done, total)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to :func:`main`, for which it is no error."""
        raise BrokenPipeError


def _print(options: argparse.Namespace, value: dict[str, Any], *renderables: Any) -> None:
    if options.json:
        print(report.to_json(value))
        return
    console = _Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 160  # a file has no width to fit
    for renderable in renderables:
        if isinstance(renderable, str):
            print(renderable)  # as it is: rich would fold it
        else:
            console.print(renderable)


def _verify(options: argparse.Namespace) -> int:
    if options.all_families:
        return _verify_families(options)
    model, tokenizer = _load(options)
    with _progress("verifying") as progress:
        result = verify(
            model,
            tokenizer,
            context=_context(options),
            max_new_tokens=options.max_new_tokens,
            update=options.update,
            keep_last=options.keep_last,
            chat=options.chat,
            progress=progress,
            name=options.model,
        )
    tokens = [str(tokenizer.decode([step.token_id])) for step in result.steps]
    if options.plot is not None:
        report.plot(result, tokens, options.plot)
    text = "".join(tokens)
    _print(
        options,
        result.to_dict(),
        f"{result.model}, {result.family}, generated: {text!r}",
        report.verify_table([result]),
    )
    return 0 if result.passed else 1


def _verify_families(options: argparse.Namespace) -> int:
    defaults = vars(_parser().parse_args(["verify"]))
    own = ("all_families", "json", "seed")
    if ignored := [
        name for name, value in vars(options).items() if name not in own and value != defaults[name]
    ]:
        names = ", ".join(
            "MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in ignored
        )
        raise ValueError(
            "expected only --seed and --json beside --all-families, which makes models and"
            f" contexts, got {names}"
        )
    with _progress("verifying") as progress:
        reports = architecture_suite.run_suite(seed=options.seed, progress=progress)
    result = {
        "families": [entry.to_dict() for entry in reports],
        "passed": all(entry.passed for entry in reports),
    }
    _print(options, result, report.suite_table(reports), report.refused_table(reports))
    return 0 if result["passed"] else 1


def _demo(options: argparse.Namespace) -> int:
    options.report.mkdir(parents=True, exist_ok=True)
    model, tokenizer = embedded.load()
    rows = demo.three_answers(model, tokenizer, options.prompts_per_kind)
    with _progress("verifying") as progress:
        reports = demo.verify_grid(options.prompts, options.max_new_tokens, progress)
    shown = [
        [
            row.prompt.kind,
            row.prompt.context.strip().replace("\n", " / "),
            row.prompt.question,
            row.with_context,
            row.without,
            row.patched,
        ]
        for kind in embedded.KINDS
        for row in [row for row in rows if row.prompt.kind == kind][:3]
    ]
    columns = [
        "task",
        "context (absorbed)",
        "question",
        "with context",
        "without",
        "without, but patched",
    ]
    tables = [
        report.table("Answers on held-out prompts", columns, shown),
        _shares(rows),
        report.verify_table(reports),
    ]
    page, data, figure = (
        options.report / name for name in ("report.md", "report.json", "exactness.png")
    )
    result = {
        "answers": [
            {**vars(row.prompt), **{k: v for k, v in vars(row).items() if k != "prompt"}}
            for row in rows
        ],
        "verify": [entry.to_dict() for entry in reports],
        "passed": (
            all(entry.passed for entry in reports)
            and all(row.patched == row.with_context for row in rows)
        ),
        "report": [str(page), str(data), str(figure)],
    }
    text = (
        "# icl-patch demo\n\n"
        + report.to_markdown(tables)
        + f"\n![L∞ and TVD per token]({figure.name})\n"
    )
    page.write_text(text, encoding="utf-8")
    report.write_json(data, result)
    stable = next(
        entry for entry in reports if (entry.update, entry.dtype) == ("stable", "bfloat16")
    )
    report.plot(
        stable,
        [str(tokenizer.decode([step.token_id])) for step in stable.steps[: options.max_new_tokens]],
        figure,
    )
    _print(options, result, *tables, f"report: {page}, {data}, {figure}")
    return 0 if result["passed"] else 1


def _shares(rows: list[demo.Answers]) -> Any:
    def share(kind: str, name: str) -> str:
        chosen = [row for row in rows if row.prompt.kind == kind]
        return report.percent(
            sum(getattr(row, name) == row.prompt.answer for row in chosen) / len(chosen)
        )

    names = ("with_context", "without", "patched")
    body = [
        [kind, *(share(kind, name) for name in names), report.percent(embedded.CHANCE[kind])]
        for kind in embedded.KINDS
    ]
    count = len(rows) // len(embedded.KINDS)
    return report.table(
        f"Whole answer right, {count} prompts a task",
        ["task", "with context", "without", "without, but patched", "chance"],
        body,
    )


def _generate(options: argparse.Namespace) -> int:
    model, tokenizer = _load(options)
    if options.temperature is not None and not options.sample:
        raise ValueError("expected --sample with --temperature")
    context = _context(options)
    ids, mask = encode_contexts(
        tokenizer, [default_context(model) if context is None else context], chat=options.chat
    )
    choice: dict[str, Any] = {"do_sample": options.sample} | (
        {} if options.temperature is None else {"temperature": options.temperature}
    )
    steps: list[GenerationStep] = []
    with (
        ContextPatcher(model, options.update, tokenizer=tokenizer) as patcher,
        _progress("generating") as progress,
    ):
        for step in patcher.generate(
            ids.to(model.device),
            context_mask=mask.to(model.device),
            max_new_tokens=options.max_new_tokens,
            logits=options.logits,
            fast=options.fast,
            compiled=options.compiled,
            patches=False,
            check_every=options.check_every,
            **choice,
        ):
            steps.append(step)
            progress(len(steps), options.max_new_tokens)
    token_ids = [int(step.token_ids[0]) for step in steps]
    checks = [
        {
            "step": number,
            "linf": float(step.check.linf[0]),
            "same_argmax": bool(step.check.same_argmax[0]),
        }
        for number, step in enumerate(steps, 1)
        if step.check is not None
    ]
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    result = {
        "model": str(model.config._name_or_path),
        "update": options.update,
        "way": steps[0].way,
        "token_ids": token_ids,
        "text": text,
    }
    shown: list[Any] = [text]
    if options.check_every:
        result["checks"] = checks
        rows = [
            [check["step"], f"{check['linf']:.2g}", "yes" if check["same_argmax"] else "no"]
            for check in checks
        ]
        shown.append(
            report.table("Replays without the context", ["token", "L∞", "same choice"], rows)
        )
    _print(options, result, *shown)
    return 0 if all(check["same_argmax"] for check in checks) else 1


def _extract(options: argparse.Namespace) -> int:
    model, tokenizer = _load(options)
    context = _context(options)
    assert context is not None
    prefix: dict[str, Any] = {}
    if options.prefix is not None:
        prefix["prefix_ids"] = encode_contexts(tokenizer, [options.prefix])[0].to(model.device)
    ids, _ = encode_contexts(tokenizer, [context], chat=options.chat)
    if prefix and tokenizer.bos_token_id is not None and ids[0, 0] == tokenizer.bos_token_id:
        ids = ids[:, 1:]  # one sequence has one beginning, and it is in the prefix
    kept = torch.tensor(
        [tokenizer(options.kept, add_special_tokens=False)["input_ids"]],
        device=model.device,
        dtype=torch.int64,
    )
    with ContextPatcher(model, options.update, tokenizer=tokenizer) as patcher:
        patch = patcher.compute(ids.to(model.device), kept, **prefix)
    patch.save(options.out)
    summary = {
        "file": str(options.out),
        **vars(patch.info),
        "context_tokens": ids.shape[1],
        "kept_tokens": kept.shape[1],
    }
    summary |= {"bytes": patch.nbytes, "layers": len(patch.layers)}
    _print(options, summary, f"{options.out}: {patch!r}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    if options.model is None and (options.revision, options.device) != (None, None):
        raise ValueError("expected --model with --revision or --device")
    patch = ContextPatch.load(options.file)
    norms = {
        name: size.double().flatten(1).mean(1).tolist() for name, size in patch.norms().items()
    }
    summary: dict[str, Any] = {
        "file": str(options.file),
        **vars(patch.info),
        "layers": len(patch.layers),
        "bytes": patch.nbytes,
    }
    summary |= {
        "kept_ids": patch.kept_ids.tolist(),
        "prefix_ids": patch.prefix_ids.tolist(),
        "norms": norms,
    }
    facts = report.table(
        str(options.file),
        ["entry", "value"],
        [[name, value] for name, value in summary.items() if name != "norms"],
    )
    rows = [[layer, *(norms[name][layer] for name in norms)] for layer in range(len(patch.layers))]
    sizes = report.table(
        "Size of the change, mean over tokens: ‖ΔW‖, ‖Δm‖", ["layer", *norms], rows
    )
    lines: list[Any] = [facts, sizes]
    if options.model is not None:
        summary["next_tokens"] = _replay(options, patch)
        lines.append(f"replayed, next token of each row: {summary['next_tokens']}")
    _print(options, summary, *lines)
    return 0


def _replay(options: argparse.Namespace, patch: ContextPatch) -> list[str]:
    _check_revision(options)
    dtype = getattr(torch, patch.info.dtype.removeprefix("torch."))
    model, tokenizer = load_model(options.model, None, dtype, options.device, options.revision)
    patch = ContextPatch.load(options.file, model, tokenizer)
    with ContextPatcher(model, patch.info.update, tokenizer=tokenizer) as patcher:
        logits = patcher.forward(patch.kept_ids, patch)
    last = patch.kept_mask.sum(1) - 1
    chosen = logits[torch.arange(len(last)), last].argmax(-1)
    return [str(tokenizer.decode([token_id])) for token_id in chosen.tolist()]


def _bench(options: argparse.Namespace) -> int:
    if unknown := [name for name in options.name if name not in BENCHMARKS]:
        raise ValueError(
            f"expected a benchmark of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}"
        )
    folder = options.out or default_folder()
    if options.plots:
        files = [str(path) for path in redraw(folder)]
        _print(options, {"files": files}, *files)
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plan = BenchOptions(options.device, options.quick, options.part, options.fresh, options.seconds)
    everything = [Results(name, options.device, folder) for name in options.name or BENCHMARKS]
    good = True
    for results in everything:
        for line, good_so_far in run(results, plan):
            print(f"{results.benchmark}: {line}", file=sys.stderr, flush=True)
            good = good and good_so_far
        if not options.json:
            _print(options, {}, results.table(), f"written to {results.path}")
    if options.json:
        _print(options, {results.benchmark: results.to_dict() for results in everything})
    return 0 if good else 1


def _tune(options: argparse.Namespace) -> int:
    if options.device.type != "cuda":
        raise ValueError(
            f"expected a CUDA device (--device cuda), got {options.device}: configurations are"
            " measured on their own GPU"
        )
    if find_spec("triton") is None:
        raise ValueError("expected triton, whose kernels are what is tuned: it is not installed")
    from icl_patch.bench import tuning

    plan = tuning.TuningOptions(
        options.device, tuple(options.dtype), options.quick, options.workers
    )
    path, entries = tuning.write(
        plan, options.out, lambda line: print(f"tune: {line}", file=sys.stderr, flush=True)
    )
    rows = [
        [entry.regime, entry.dtype, entry.max_n or "any", *vars(entry.config).values()]
        for entry in entries
    ]
    columns = ["regime", "dtype", "N up to", *vars(entries[0].config)]
    result = {"file": str(path), "entries": [dict(zip(columns, row, strict=True)) for row in rows]}
    _print(options, result, report.table(str(path), columns, rows))
    return 0
