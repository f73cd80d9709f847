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
from pathlib import Path
from typing import Any

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
UPDATES = {"exact": "exact", "two_pass": "exact"}  # of the other modes: stable
Seconds = dict[str, float]  # of a step, by mode
Pair = dict[str, Seconds]  # by OLD and NEW


def median_interval(ratios: list[float]) -> tuple[float, float, float, float]:
    """The median of some ratios, the ends of its interval of order statistics, and the probability
    that it encloses the true median, see above.
    """
    ordered, count = sorted(ratios), len(ratios)

    def level(k: int) -> float:
        return 1 - 2 * sum(math.comb(count, below) for below in range(k)) / 2**count

    k = max((k for k in range(1, (count + 1) // 2 + 1) if level(k) >= LEVEL), default=1)
    return statistics.median(ordered), ordered[k - 1], ordered[-k], max(0.0, level(k))


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


def measure(folder: Path, settings: dict[str, Any]) -> Seconds:
    """The seconds of a step in each mode, in a fresh process with the package of a worktree.

    Raises:
        ValueError: it fails, or it has not run that package.
    """
    command = [str(folder / "build" / "python"), str(TIMER), "--time", json.dumps(settings)]
    found = json.loads(run(command, folder))
    if not Path(found["package"]).is_relative_to(folder):
        raise ValueError(f"expected the package of {folder}, got {found['package']}")
    return found["seconds"]


def compare(folders: dict[str, Path], pairs: int, settings: dict[str, Any]) -> list[Pair]:
    """The seconds of each pair, by OLD and NEW: OLD, NEW; NEW, OLD; OLD, NEW; ..."""
    found = []
    for number in track(range(pairs), "pairs", console=Console(stderr=True), transient=True):
        order = ("OLD", "NEW") if number % 2 == 0 else ("NEW", "OLD")
        found.append({side: measure(folders[side], settings) for side in order})
    return found


def report(found: list[Pair], limit: float) -> tuple[Table, bool]:
    """The table, and whether no mode is slower than the limit allows."""
    table = Table("step", "OLD ms", "NEW ms", "NEW/OLD", "interval", "level", "")
    good = True
    for mode in found[0]["OLD"]:
        ratios = [pair["NEW"][mode] / pair["OLD"][mode] for pair in found]
        median, low, high, level = median_interval(ratios)
        good = good and low <= limit
        times = (statistics.median(pair[side][mode] for pair in found) for side in ("OLD", "NEW"))
        table.add_row(
            mode,
            *(f"{1e3 * seconds:.3f}" for seconds in times),
            f"{median:.3f}",
            f"{low:.3f} – {high:.3f}",
            f"{100 * level:.1f} %",
            f"slower than {limit:g}" if low > limit else "",
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
def time_modes(
    size: str, modes: list[str], rows: int, context: int, steps: int, threads: int
) -> Seconds:
    """The seconds of a step in each mode, after a context of so many rows and tokens."""
    torch.set_num_threads(threads)
    model = build_model(size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES[size][-1], (rows, context), generator=generator)
    found = {}
    for mode in modes:
        if mode == "plain":
            found[mode] = step_seconds(plain_steps(model, ids), steps)
            continue
        with ContextPatcher(model, UPDATES.get(mode, "stable")) as patcher:
            found[mode] = step_seconds(patched_steps(patcher, mode, ids, WARM_UP + steps), steps)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Compare two commits; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--time"]:
        seconds = time_modes(**json.loads(given[1]))
        print(json.dumps({"package": icl_patch.__file__, "seconds": seconds}))
        return 0
    parser = argparse.ArgumentParser(
        description="Compare the decode steps of two commits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("old", help="commit, branch or tag to compare with")
    parser.add_argument("new", help="commit, branch or tag that must not be slower")
    parser.add_argument("--limit", type=float, default=1.03, help="the most NEW/OLD")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of a step")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--rows", type=int, default=1, help="of the batch")
    parser.add_argument("--context", type=int, default=256, help="tokens of the context")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a mode in a run")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    settings = vars(parser.parse_args(given))
    commits = {"OLD": settings.pop("old"), "NEW": settings.pop("new")}
    pairs, limit = settings.pop("pairs"), settings.pop("limit")
    try:
        folders = {side: check_out(commit) for side, commit in commits.items()}
        table, good = report(compare(folders, pairs, settings), limit)
    except ValueError as error:
        print(f"bench_compare: {error}", file=sys.stderr)
        return 2
    table.title = ", ".join(f"{side} {folder.name}" for side, folder in folders.items())
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
