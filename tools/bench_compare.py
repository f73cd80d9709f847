"""Compare the decode steps of two commits in alternating fresh processes.

    make bench-compare OLD=main NEW=HEAD
    build/python tools/bench_compare.py main HEAD --pairs 15 --modes shared_cache compiled

Each commit is checked out and built once, as a git worktree in ``build/compare``, with the
interpreter that runs this file. Then this file runs in turn, as ``bench_compare.py --time``, with
the package of OLD, NEW, NEW, OLD, OLD, and so on; what it times uses public names only. Two
consecutive runs are a pair, so a slow drift of the machine affects both. For each mode the table
shows the median of the pairs' ratios NEW/OLD with its interval.

- ``plain``: the model's own step, whose ratio shows the noise. ``replay``: the current token with a
  given patch, no context.
- ``two_pass``: the exact update in the model's own arithmetic. ``exact``: in one pass, in the
  batch-invariant one. ``two_stream``, ``shared_cache``: the stable update over one cache
  for each stream, and over one for both. ``compiled``: the latter with a compiled step.

The interval is that of order statistics. However the ratios are distributed, the number of ``n``
independent ones below their true median is Binomial(n, 1/2). The k-th smallest and the k-th largest
therefore enclose it with probability ``1 - 2 P(Binomial(n, 1/2) < k)``. This tool takes the largest
k for which that is at least 95 %, and shows the probability. For 6 to 8 pairs k is 1: the interval
reaches from the smallest ratio to the largest. With fewer than 6 pairs its probability is lower.

The exit status is 1 if the lower end of an interval is above the limit, 1.03 by default: NEW is
slower by more than that. It is 2 if a commit cannot be found, built or timed. OLD and NEW may be
the same commit, to see how large the noise is.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import icl_patch
from icl_patch import ContextPatcher

ROOT = Path(__file__).resolve().parent.parent
TIMER = Path(__file__).resolve()
MODES = ("plain", "exact", "two_pass", "two_stream", "shared_cache", "compiled", "replay")
# hidden, inner, layers, heads, width of a head, vocabulary. "large" is the model of `icl_patch
# bench generation` on a CPU, 0.22B. Python code takes a larger share of a step of "small", and most
# of "tiny".
SIZES = {
    "tiny": (32, 48, 2, 2, 16, 97),
    "small": (512, 1536, 8, 8, 64, 8192),
    "large": (1024, 3072, 12, 16, 128, 32000),
}
WARM_UP = 5  # steps; a compiled step is made at the first two
LEVEL = 0.95
Seconds = dict[str, float]  # of a step, by mode


@dataclass(frozen=True)
class Interval:
    """A median, and an interval that encloses the true one with probability ``level``."""

    median: float
    low: float
    high: float
    level: float


def median_interval(ratios: list[float]) -> Interval:
    """The median of some ratios with its interval of order statistics, see above.

    Raises:
        ValueError: there are no ratios.
    """
    if not ratios:
        raise ValueError("expected at least one ratio, got none")
    ordered, count = sorted(ratios), len(ratios)

    def level(k: int) -> float:
        return 1 - 2 * sum(math.comb(count, below) for below in range(k)) / 2**count

    k = max((k for k in range(1, (count + 1) // 2 + 1) if level(k) >= LEVEL), default=1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[-k], max(0.0, level(k)))


def schedule(pairs: int) -> Iterator[tuple[str, str]]:
    """The order of the runs in each pair: OLD, NEW; NEW, OLD; OLD, NEW; ..."""
    for number in range(pairs):
        yield ("OLD", "NEW") if number % 2 == 0 else ("NEW", "OLD")


def run(command: list[str], folder: Path) -> str:
    """The output of a command on stdout.

    Raises:
        ValueError: it fails.
    """
    # Variables of an outer make would overrule those of the commit's own makefile.
    outer = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment.setdefault("ICL_PATCH_NATIVE", "cpu")  # no GPU is timed, and nvcc takes minutes
    pipes = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=folder, env=environment, **pipes)
    if done.returncode:
        said = (done.stderr or done.stdout)[-2000:]
        raise ValueError(f"{' '.join(command)} failed in {folder}:\n{said}")
    return done.stdout


def check_out(commit: str) -> Path:
    """A worktree of the commit in ``build/compare``, built; one that is there is used again.

    Raises:
        ValueError: there is no such commit, or it cannot be built.
    """
    look_up = ["git", "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}"]
    full = run(look_up, ROOT).strip()
    folder = ROOT / "build" / "compare" / full[:12]
    if not folder.exists():
        run(["git", "worktree", "prune"], ROOT)
        run(["git", "worktree", "add", "--detach", str(folder), full], ROOT)
    run(["make", f"PYTHON={sys.executable}", "build/python"], folder)
    return folder


def measure(folder: Path, arguments: list[str]) -> Seconds:
    """The seconds of a step in each mode, in a fresh process with the package of a worktree.

    Raises:
        ValueError: it fails, or it has not run that package.
    """
    found = json.loads(
        run([str(folder / "build" / "python"), str(TIMER), "--time", *arguments], folder)
    )
    if not Path(found["package"]).is_relative_to(folder):
        raise ValueError(f"expected the package of {folder}, got {found['package']}")
    return found["seconds"]


def compare(folders: dict[str, Path], pairs: int, arguments: list[str]) -> list[dict[str, Seconds]]:
    """The seconds of each pair, by OLD and NEW."""
    console = Console(stderr=True)
    found = []
    for order in track(list(schedule(pairs)), "pairs", console=console, transient=True):
        found.append({side: measure(folders[side], arguments) for side in order})
    return found


def report(found: list[dict[str, Seconds]], limit: float) -> tuple[Table, bool]:
    """The table, and whether no mode is slower than the limit allows."""
    table = Table("step", "OLD ms", "NEW ms", "NEW/OLD", "interval", "level", "")
    good = True
    for mode in found[0]["OLD"]:
        ratio = median_interval([pair["NEW"][mode] / pair["OLD"][mode] for pair in found])
        slower = ratio.low > limit
        good = good and not slower
        times = (statistics.median(pair[side][mode] for pair in found) for side in ("OLD", "NEW"))
        table.add_row(
            mode,
            *(f"{1e3 * seconds:.3f}" for seconds in times),
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f} – {ratio.high:.3f}",
            f"{100 * ratio.level:.1f} %",
            f"slower than {limit:g}" if slower else "",
        )
    return table, good


def build_model(size: str) -> PreTrainedModel:
    """A random Qwen3 with matrices of unit gain, so that a context changes the logits."""
    hidden, inner, layers, heads, width, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def plain_steps(model: PreTrainedModel, ids: Tensor) -> Iterator[object]:
    """The model's own greedy decode steps, over its own cache."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:]
    while True:
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        yield token


def attach(model: PreTrainedModel, mode: str) -> ContextPatcher:
    """A patcher with the update of a mode."""
    return ContextPatcher(model, "exact" if mode in ("exact", "two_pass") else "stable")


def patched_steps(patcher: ContextPatcher, mode: str, ids: Tensor, count: int) -> Iterator[object]:
    """Decode steps of the package: generated tokens, or one token replayed again and again."""
    if mode != "replay":
        cache = "shared_cache" if mode in ("compiled", "exact") else mode
        options = {"mode": cache, "compile": mode == "compiled"}
        return iter(patcher.generate(ids, max_new_tokens=count, **options))
    kept = ids[:, -1:]
    patch = patcher.compute(ids[:, :-1], kept)
    return (patcher.forward(kept, patch) for _ in range(count))


def step_seconds(steps: Iterator[object], count: int) -> float:
    """The lower quartile of the seconds of ``count`` steps after the first ones, which warm up.

    Interruptions only add to a step's time: the median would move with the machine's load.
    """
    for _ in range(WARM_UP):
        next(steps)
    samples = []
    for _ in range(count):
        begun = time.perf_counter()
        next(steps)
        samples.append(time.perf_counter() - begun)
    return statistics.quantiles(samples, n=4)[0]


@torch.no_grad()
def time_modes(size: str, modes: list[str], shape: tuple[int, int], steps: int) -> dict[str, float]:
    """The seconds of a step in each mode, after a context of ``shape`` (rows, tokens)."""
    model = build_model(size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES[size][-1], shape, generator=generator)
    found = {}
    for mode in modes:
        if mode == "plain":
            found[mode] = step_seconds(plain_steps(model, ids), steps)
            continue
        with attach(model, mode) as patcher:
            found[mode] = step_seconds(patched_steps(patcher, mode, ids, WARM_UP + steps), steps)
    return found


def time_steps(arguments: list[str]) -> None:
    """Print one JSON object: the package that was timed, and the seconds by mode."""
    made = argparse.ArgumentParser()
    made.add_argument("--modes", nargs="+")
    made.add_argument("--size")
    for name in ("rows", "context", "steps", "threads"):
        made.add_argument(f"--{name}", type=int)
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    seconds = time_modes(
        options.size, options.modes, (options.rows, options.context), options.steps
    )
    print(json.dumps({"package": icl_patch.__file__, "seconds": seconds}))


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number ≥ 1, got {text}")
    return number


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description="Compare the decode steps of two commits.")
    made.add_argument("old", metavar="OLD", help="commit, branch or tag to compare with")
    made.add_argument("new", metavar="NEW", help="commit, branch or tag that must not be slower")
    made.add_argument("--limit", type=float, default=1.03, help="the most NEW/OLD (default 1.03)")
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    made.add_argument("--size", choices=SIZES, default="small", help="of the model (default small)")
    numbers = {
        "pairs": (7, "pairs of runs"),
        "rows": (1, "rows of the batch"),
        "context": (256, "tokens of the context"),
        "steps": (40, "timed steps of a mode in a run"),
        "threads": (1, "threads of the CPU"),
    }
    for name, (default, meaning) in numbers.items():
        text = f"{meaning} (default {default})"
        made.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=text)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Compare two commits; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--time"]:
        time_steps(given[1:])
        return 0
    options = parser().parse_args(given)
    timed = ["--modes", *options.modes]
    for name in ("size", "rows", "context", "steps", "threads"):
        timed += [f"--{name}", str(getattr(options, name))]
    try:
        folders = {"OLD": check_out(options.old), "NEW": check_out(options.new)}
        table, good = report(compare(folders, options.pairs, timed), options.limit)
    except ValueError as error:
        print(f"bench_compare: {error}", file=sys.stderr)
        return 2
    table.title = ", ".join(f"{side} {folder.name}" for side, folder in folders.items())
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
