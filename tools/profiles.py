"""Write docs/profiles/<device>.md: Nsight Compute on the patched products, where there are a GPU
and ncu, and torch.profiler on decode steps.

    build/python tools/profiles.py [FOLDER]      # of the page
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import GPU_SHAPES, twin
from icl_patch.bench.results import environment, file_name

ROOT = Path(__file__).resolve().parents[1]
MODEL = replace(GPU_SHAPES[1], layers=4, vocabulary=1024)  # Gemma-3-1B
STEPS = 8
# the clocks are left as they are: the machine may be shared
NCU = "ncu --clock-control none --kernel-name regex:_linear_kernel --launch-count 40 --kill yes"
SECTIONS = ("SpeedOfLight", "Occupancy", "WarpStateStats")


def kernels(device: torch.device) -> str:
    """Nsight Compute's output, or why there is none."""
    if device.type != "cuda" or not shutil.which("ncu"):
        return "Skipped: there is no CUDA device, or no ncu"
    bench = [sys.executable, "-m", "icl_patch", "bench", "linear", "--device", "cuda", "--quick"]
    with tempfile.TemporaryDirectory() as folder:
        sections = [word for name in SECTIONS for word in ("--section", name)]
        command = [*NCU.split(), *sections, *bench, "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def steps(device: torch.device) -> str:
    """The operators of decode steps, patched and plain, by their own time."""
    model: Any = MODEL.build(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    context = torch.randint(1024, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    greedy = {"min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    parts = []
    with ContextPatcher(twin(model), "stable") as patcher:
        calls = {
            "patched": lambda: list(patcher.generate(context, max_new_tokens=STEPS)),
            "plain": lambda: model.generate(context, max_new_tokens=STEPS, **greedy),
        }
        for title, call in calls.items():
            call()
            with profile() as profiler:
                call()
            order = f"self_{device.type}_time_total"
            table = profiler.key_averages().table(sort_by=order, row_limit=12).strip()
            parts.append(f"### {title}, {STEPS} tokens\n\n```\n{table}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Profile this machine's GPU, or its CPU."""
    parser = argparse.ArgumentParser(description="Profile the products and a decode step.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "profiles")
    folder = parser.parse_args().folder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = environment(device)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{file_name(machine['device'])}.md"
    page.write_text(
        f"# {machine['device']}\n\n"
        f"Made by `make profile`: {', '.join(f'{k} {v}' for k, v in machine.items() if v)}\n\n"
        f"## The patched products (Nsight Compute)\n\n```\n{kernels(device).strip()}\n```\n\n"
        f"## Decoding, {MODEL.layers} layers of {MODEL.name}, a context of 64 tokens"
        f" (torch.profiler)\n\n{steps(device)}",
        encoding="utf-8",
    )
    print(f"profile: {page}")


if __name__ == "__main__":
    main()
