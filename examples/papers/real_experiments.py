"""The experiments of both papers on a pretrained model in a folder: a page with its pictures.

    python examples/papers/real_experiments.py FOLDER                      # to build/papers/NAME
    python examples/papers/real_experiments.py FOLDER --out docs/papers    # this repository's page
    python examples/papers/real_experiments.py --redraw --out docs/papers  # from its numbers
    python examples/papers/real_experiments.py FOLDER --quick              # few prompts

The folder holds a causal language model and its tokenizer, as ``save_pretrained`` writes them. Each
result is kept in build/papers as soon as it is measured: a stopped run goes on. One thread on the
CPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import real_statistics as statistics
import torch
from figure_page import rounded
from real_fidelity import KEPT
from real_page import write_page
from real_pictures import draw
from real_prompts import KINDS
from real_runs import Runs
from real_subject import FULL, QUICK, Store, Subject
from transformers.utils import logging as transformers_logging

from icl_patch.bench.results import environment

NUMBERS = "real-model.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write numbers, pictures and page."""
    parser = argparse.ArgumentParser(
        description="The papers' experiments on a pretrained model, with a page and pictures."
    )
    parser.add_argument("folder", type=Path, nargs="?", help="a model and its tokenizer")
    parser.add_argument("--name", help="the model's name on the page (default: the folder's)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for page, pictures and numbers (default: build/papers/NAME)",
    )
    parser.add_argument("--quick", action="store_true", help="few prompts")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: draw the numbers")
    options = parser.parse_args(arguments)
    if options.redraw == (options.folder is not None):
        parser.error("expected a folder, or --redraw with --out")
    if options.redraw and options.out is None:
        parser.error("expected --out with --redraw: the folder that holds the numbers")
    if options.redraw:
        redraw(options.out)
        return 0
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    subject = Subject(options.folder, QUICK if options.quick else FULL)
    name = options.name or options.folder.resolve().name
    store = Store(Path("build/papers") / f"{name}-{subject.key}")
    Runs(subject, store).run()
    out = options.out or Path("build/papers") / name
    out.mkdir(parents=True, exist_ok=True)
    numbers = rounded({"model": name, **collect(subject, store)})
    (out / NUMBERS).write_text(json.dumps(numbers, ensure_ascii=False) + "\n", encoding="utf-8")
    redraw(out)
    return 0


def redraw(folder: Path) -> None:
    """Draw the pictures and write the page from the numbers in a folder."""
    numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    draw(numbers, folder)
    write_page(folder, numbers)


def collect(subject: Subject, store: Store) -> dict[str, Any]:
    """The page's numbers from all results."""
    named = {dtype: _prompts(subject, store, dtype) for dtype in subject.sizes.dtypes}
    first = next(iter(named.values()))
    weights = store.load("weights")
    found: dict[str, Any] = {
        "sizes_of_run": asdict(subject.sizes),
        "config": _config(subject.config),
        "environment": environment(torch.device("cpu")),
        "prompts": _texts(subject, first),
        "direct_is_stable": all(statistics.same_updates(x) for x in named.values()),
        "sizes": {run: statistics.sizes(first, weights, run) for run in ("exact", KEPT)},
        "spanned": {str(k): statistics.spanned(_all(store, f"spans-{k}")) for k in (0, 1)},
        "grown": {
            how: statistics.grown(_all(store, f"growth-{how}")) for how in ("right", "shuffled")
        },
        "disturbed": statistics.disturbed(_all(store, "sensitivity")),
        "attention": statistics.on_first(_all(store, "attention")),
    }
    for key, summary in {
        "agreement": statistics.agreement,
        "by_place": statistics.by_place,
        "by_block": statistics.by_block,
        "lost": lambda results: {"stable": statistics.lost(results, "stable")},
        "control": statistics.control,
    }.items():
        found[key] = {dtype: summary(results) for dtype, results in named.items()}
    found["rounded_alike"] = {
        dtype: statistics.rounded_alike(results, "stable", torch.finfo(getattr(torch, dtype)).eps)
        for dtype, results in named.items()
    }
    found["by_length"] = {
        dtype: statistics.by_length(_by_length(subject, store, dtype))
        for dtype in subject.sizes.dtypes
    }
    found["protocol"] = {
        dtype: statistics.own_protocol(_all(store, f"protocol-{dtype}"))
        for dtype in subject.sizes.dtypes
    }
    return found


def _prompts(subject: Subject, store: Store, dtype: str) -> dict[str, Any]:
    return {prompt.name: store.load(f"{dtype}/{prompt.name}") for prompt in subject.prompts}


def _all(store: Store, folder: str) -> dict[str, Any]:
    """All results of a stage, by name."""
    paths = sorted((store.folder / folder).glob("*.npz"))
    return {path.stem: store.load(f"{folder}/{path.stem}") for path in paths}


def _by_length(subject: Subject, store: Store, dtype: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for prompt in subject.excerpts(dtype):
        arrays = store.load(f"{dtype}/{prompt.name}")
        found.setdefault(len(prompt.context), {})[prompt.name] = arrays
    return found


def _texts(subject: Subject, results: dict[str, Any]) -> dict[str, Any]:
    """Prompts, and their tokens, by kind."""
    found = {}
    for kind in KINDS:
        prompts = [prompt for prompt in subject.prompts if prompt.kind == kind]
        if prompts:
            kept = [len(results[prompt.name]["margin"]) for prompt in prompts]
            contexts = [len(prompt.context) for prompt in prompts]
            found[kind] = {
                "prompts": len(prompts),
                "contexts": len({prompt.group for prompt in prompts}),
                "context_tokens": [min(contexts), max(contexts)],
                "kept_tokens": sum(kept),
                "question_tokens": sum(len(prompt.question) for prompt in prompts),
            }
    return found


def _config(config: Any) -> dict[str, Any]:
    names = ("model_type", "num_hidden_layers", "hidden_size")
    return {name: getattr(config, name, None) for name in names}


if __name__ == "__main__":
    sys.exit(main())
