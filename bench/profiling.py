"""Profiles of the headline kernels and of a decode step: ``make profile``.

python -m icl_patch.bench.profiling kernels           # launch the headline kernels for ncu
python -m icl_patch.bench.profiling page FOLDER TEXT  # this device's page, with ncu's output
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from icl_patch import ContextPatcher
from icl_patch.bench.cases import linear
from icl_patch.bench.cases.models import GPU_SHAPES, twin
from icl_patch.bench.costs import profile_of
from icl_patch.bench.results import environment, file_name
from icl_patch.patch.atomic_file import write_atomically

# Matrix and rows of the calls, of rank 1 in bf16, that Nsight Compute profiles.
HEADLINE = [
    linear.Setting(matrix, torch.bfloat16, rows, 1)
    for matrix, rows in (
        ("Gemma-3-1B up", 1),
        ("Gemma-3-1B down", 1),
        ("Llama-3-8B up", 1),
        ("Llama-3-8B up", 8),
        ("Llama-3-8B up", 32),
    )
]
MODEL = replace(GPU_SHAPES[1], layers=4, vocabulary=1024)  # Gemma-3-1B
STEPS = 8


def launch_headline(device: torch.device) -> None:
    """Every headline call, once each after a warm-up, in a range that ``ncu --nvtx`` can name."""
    for setting in HEADLINE:
        call = linear.comparison(setting, device).calls["patched_linear"]
        call()
        torch.cuda.synchronize()
        with torch.cuda.nvtx.range("icl-patch"):
            call()
            torch.cuda.synchronize()


def decode_profiles(device: torch.device) -> Iterator[str]:
    """The operators of decode steps that recompute and apply every layer's patch, and of plain
    ones, by their own time.
    """
    cuda = device.type == "cuda"
    model: Any = MODEL.build(device, torch.bfloat16 if cuda else torch.float32)
    context = torch.randint(1024, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    greedy = {"min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    with ContextPatcher(twin(model), "stable") as patcher:
        calls = {
            "patched": lambda: list(patcher.generate(context, max_new_tokens=STEPS)),
            "plain": lambda: model.generate(context, max_new_tokens=STEPS, **greedy),
        }
        for title, call in calls.items():
            call()
            times = profile_of(call, device).key_averages()
            order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            table = times.table(sort_by=order, row_limit=12).strip()
            yield f"### {title}, {STEPS} tokens\n\n```\n{table}\n```\n"


def page(device: torch.device, ncu: str) -> str:
    """One device's page: Nsight Compute's output on the headline kernels, or why there is none, and
    a decode step.
    """
    machine = environment(device)
    profiles = "\n".join(decode_profiles(device))
    return f"""# {machine["device"]}

Made by `make profile`: {", ".join(f"{name} {value}" for name, value in machine.items() if value)}

## The patched linear map (Nsight Compute)

In this order: {", ".join(setting.name for setting in HEADLINE)}.

```
{ncu.strip()}
```

## Decoding, {MODEL.layers} layers of {MODEL.name}, a context of 64 tokens (torch.profiler)

{profiles}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """``kernels``, or ``page FOLDER TEXT``."""
    parser = argparse.ArgumentParser(description="Profiles: make profile.")
    parser.add_argument("what", choices=("kernels", "page"))
    parser.add_argument("folder", type=Path, nargs="?", help="of the page")
    parser.add_argument("ncu", type=Path, nargs="?", help="Nsight Compute's output")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.what == "kernels":
        launch_headline(device)
        return
    target = options.folder / f"{file_name(environment(device)['device'])}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    ncu = options.ncu.read_text(encoding="utf-8", errors="replace")
    write_atomically(target, [page(device, ncu).encode()])
    print(f"profile: {target}")


if __name__ == "__main__":
    main()
