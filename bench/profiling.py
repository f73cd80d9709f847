"""Profiles of the headline kernels and of a decode step: ``make profile``.

python -m icl_patch.bench.profiling kernels            # launch the headline kernels for ncu
python -m icl_patch.bench.profiling metrics            # the metrics for ncu
python -m icl_patch.bench.profiling page FOLDER [CSV]  # this device's page, with ncu's CSV
"""

import csv
import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from icl_patch import ContextPatcher
from icl_patch.bench.cases import linear, throughput
from icl_patch.bench.cases.random_models import twin
from icl_patch.bench.harness import format_seconds
from icl_patch.bench.results import environment, write_whole

# Matrix, rows and rank of the calls that Nsight Compute profiles.
HEADLINE = (
    ("Gemma-3-1B up", 1, 1),
    ("Gemma-3-1B down", 1, 1),
    ("Llama-3-8B up", 1, 1),
    ("Llama-3-8B up", 8, 1),
    ("Llama-3-8B up", 32, 1),
)
STEPS = 8
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM throughput, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy, % of warps",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "wait",
    "barrier",
    "mio_throttle",
    "lg_throttle",
    "math_pipe_throttle",
    "not_selected",
    "membar",
)


def metric_names() -> str:
    """For ``ncu --metrics``."""
    return ",".join(
        [
            *METRICS,
            *(
                f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
                for name in STALLS
            ),
        ]
    )


def launch_headline(device: torch.device) -> None:
    """Every headline call, once each after a warm-up, in a range that ``ncu --nvtx`` can name."""
    for matrix, rows, rank in HEADLINE:
        setting = linear.Setting(matrix, torch.bfloat16, rows, rank)
        call = linear.comparison(setting, device).calls["patched_linear"]
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push("icl-patch")
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()


def read_ncu(text: str) -> list[dict[str, Any]]:
    """The kernels in the output of ``ncu --csv --page raw`` (one line a kernel, a line of units
    below the names).

    Returns:
        Per kernel its name, the metrics by our names, time in seconds, and the three largest stall
        reasons with their cycles per issue.

    Raises:
        ValueError: the text holds no such table; it says what ncu said instead.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [
            line for line in lines if line.startswith("==ERROR==") or "ERR_NVGPUCTRPERM" in line
        ]
        raise ValueError(
            "expected a table of Nsight Compute, got"
            f" {said[0] if said else text.strip()[-200:] or 'nothing'}"
        )
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, kernels = rows[0], rows[1:]
    seconds = {
        "nsecond": 1e-9,
        "ns": 1e-9,
        "usecond": 1e-6,
        "us": 1e-6,
        "msecond": 1e-3,
        "ms": 1e-3,
        "second": 1.0,
        "s": 1.0,
    }
    found = []
    for row in kernels:
        numbers = {
            METRICS[name]: float(value.replace(",", ""))
            for name, value in row.items()
            if name in METRICS and value
        }
        if "time" in numbers:
            numbers["time"] *= seconds[units["gpu__time_duration.sum"]]
        stalls = {
            match[1]: float(value.replace(",", ""))
            for name, value in row.items()
            if (match := STALL.fullmatch(name or "")) and value
        }
        largest = sorted(stalls.items(), key=lambda entry: -entry[1])[:3]
        found.append({"kernel": row["Kernel Name"], "numbers": numbers, "stalls": largest})
    return found


def kernels_markdown(kernels: Sequence[dict[str, Any]]) -> Iterable[str]:
    """A table of what Nsight Compute saw."""
    yield "| kernel | " + " | ".join(METRICS.values()) + " | largest stalls, cycles per issue |"
    yield "|" + "---|" * (2 + len(METRICS))
    for entry in kernels:
        cells = []
        for name in METRICS.values():
            value = entry["numbers"].get(name)
            cells.append(
                "-"
                if value is None
                else format_seconds(value)
                if name == "time"
                else f"{value:.1f}"
            )
        stalls = ", ".join(
            f"{name.replace('_', ' ')} {value:.1f}" for name, value in entry["stalls"]
        )
        yield f"| `{entry['kernel']}` | " + " | ".join(cells) + f" | {stalls} |"


def decode_profile(device: torch.device, name: str, steps: int) -> str:
    """The operators of decode steps that recompute and apply every layer's patch, and of plain
    ones, by their own time.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = throughput.MODELS[name].build(device, dtype)
    context = torch.randint(1024, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    parts = []
    with ContextPatcher(twin(model), "stable") as patcher:
        calls = {
            "patched": lambda: list(patcher.generate(context, max_new_tokens=steps)),
            "plain": lambda: model.generate(
                context, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0
            ),
        }
        for title, call in calls.items():
            call()
            with profile(activities=activities) as seen, record_function(title):
                call()
            parts += [
                f"### {title}, {steps} tokens",
                "",
                *_operators(seen.key_averages(), device, steps),
                "",
            ]
    return "\n".join(parts)


def _operators(averages: Any, device: torch.device, steps: int, most: int = 12) -> Iterable[str]:
    """The operators with the largest own time."""
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(
        (event for event in averages if getattr(event, own) > 0),
        key=lambda event: -getattr(event, own),
    )
    whole = sum(getattr(event, own) for event in events)
    yield (
        f"{format_seconds(whole / steps / 1e6)} a token in all,"
        f" {sum(event.count for event in events) / steps:.0f} calls a token."
    )
    yield ""
    yield "| operator | share | time a token | calls a token |"
    yield "|---|---|---|---|"
    for event in events[:most]:
        time = getattr(event, own)
        yield (
            f"| `{event.key[:90]}` | {100 * time / whole:.1f} % |"
            f" {format_seconds(time / steps / 1e6)} | {event.count / steps:g} |"
        )


def page(device: torch.device, ncu: str | None, reason: str) -> str:
    """One device's page: the headline kernels as Nsight Compute saw them, or why it did not, and a
    decode step.
    """
    found = environment(device)
    lines = [
        f"# {found['device']}",
        "",
        "Made by `make profile`: " + ", ".join(f"{k} {v}" for k, v in found.items() if v),
        "",
    ]
    lines += ["## The patched linear map", ""]
    if ncu is not None:
        try:
            cases = ", ".join(
                f"{matrix} {linear.SHAPES[matrix]} M={rows} R={rank}"
                for matrix, rows, rank in HEADLINE
            )
            lines += [f"bf16, in this order: {cases}.", "", *kernels_markdown(read_ncu(ncu))]
        except ValueError as error:
            lines.append(f"Skipped: {error}")
    else:
        lines.append(f"Skipped: {reason}")
    name = "Gemma-3-1B"
    lines += [
        "",
        (
            f"## Decoding, {throughput.MODELS[name].layers} layers of {name}, a context of 64"
            " tokens (torch.profiler)"
        ),
        "",
        decode_profile(device, name, STEPS),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str]) -> int:
    """``kernels``, ``metrics`` or ``page FOLDER [CSV | reason]``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments[:1] == ["metrics"]:
        print(metric_names())
        return 0
    if arguments[:1] == ["kernels"] and device.type == "cuda":
        launch_headline(device)
        return 0
    if len(arguments) == 3 and arguments[0] == "page":
        given = Path(arguments[2])
        text = given.read_text(encoding="utf-8", errors="replace") if given.is_file() else None
        words = environment(device)["device"].replace("(R)", "").replace("(TM)", "").split()
        target = Path(arguments[1]) / f"{'-'.join(words).lower()}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, page(device, text, arguments[2]))
        print(f"profile: {target}")
        return 0
    print(
        "expected kernels (with a CUDA device), metrics, or page FOLDER and a CSV file or a reason",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
