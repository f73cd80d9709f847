"""Profiles of the headline kernels and of a decode step: ``make profile``.

python -m icl_patch.bench.profiling kernels           # launch the headline kernels for ncu
python -m icl_patch.bench.profiling page FOLDER TEXT  # this device's page, with ncu's output
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from icl_patch import ContextPatcher
from icl_patch.bench.cases import linear, throughput
from icl_patch.bench.cases.random_models import twin
from icl_patch.bench.results import environment, file_name
from icl_patch.patch.atomic_file import write_atomically

# Matrix, rows and rank of the calls that Nsight Compute profiles.
HEADLINE = (
    ("Gemma-3-1B up", 1, 1),
    ("Gemma-3-1B down", 1, 1),
    ("Llama-3-8B up", 1, 1),
    ("Llama-3-8B up", 8, 1),
    ("Llama-3-8B up", 32, 1),
)
MODEL, STEPS = "Gemma-3-1B", 8


def launch_headline(device: torch.device) -> None:
    """Every headline call, once each after a warm-up, in a range that ``ncu --nvtx`` can name."""
    for matrix, rows, rank in HEADLINE:
        setting = linear.Setting(matrix, torch.bfloat16, rows, rank)
        call = linear.comparison(setting, device).calls["patched_linear"]
        call()
        torch.cuda.synchronize()
        with torch.cuda.nvtx.range("icl-patch"):
            call()
            torch.cuda.synchronize()


def decode_profile(device: torch.device, name: str, steps: int) -> str:
    """The operators of decode steps that recompute and apply every layer's patch, and of plain
    ones, by their own time.
    """
    cuda = device.type == "cuda"
    model: Any = throughput.MODELS[name].build(device, torch.bfloat16 if cuda else torch.float32)
    context = torch.randint(1024, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
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
            with profile(activities=activities) as profiler:
                call()
            table = profiler.key_averages().table(sort_by=order, row_limit=12)
            parts += [f"### {title}, {steps} tokens", "", "```", table.strip(), "```", ""]
    return "\n".join(parts)


def page(device: torch.device, ncu: str) -> str:
    """One device's page: Nsight Compute's output on the headline kernels, or why there is none, and
    a decode step.
    """
    machine = environment(device)
    cases = ", ".join(
        f"{matrix} {linear.SHAPES[matrix]} M={rows} R={rank}" for matrix, rows, rank in HEADLINE
    )
    layers = throughput.MODELS[MODEL].layers
    return f"""# {machine["device"]}

Made by `make profile`: {", ".join(f"{name} {value}" for name, value in machine.items() if value)}

## The patched linear map (Nsight Compute)

bf16, in this order: {cases}.

```
{ncu.strip()}
```

## Decoding, {layers} layers of {MODEL}, a context of 64 tokens (torch.profiler)

{decode_profile(device, MODEL, STEPS)}"""


def main(arguments: Sequence[str]) -> int:
    """``kernels``, or ``page FOLDER TEXT``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments[:1] == ["kernels"] and device.type == "cuda":
        launch_headline(device)
        return 0
    if len(arguments) == 3 and arguments[0] == "page":
        ncu = Path(arguments[2]).read_text(encoding="utf-8", errors="replace")
        target = Path(arguments[1]) / f"{file_name(environment(device)['device'])}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, [page(device, ncu).encode()])
        print(f"profile: {target}")
        return 0
    print("expected kernels (with a CUDA device), or page FOLDER and a text file", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
