"""Time decode steps of a model that is split over two processes beside the model's own.

    build/python tools/split_steps.py MODEL    # writes docs/data/split-steps.json

MODEL is a folder or hub id; it is split by pipeline. A random model of 0.22B parameters is split by
pipeline and by shared matrices, which take a number of heads that two divides. A step is the
difference of two greedy generations of 24 and 8 tokens, after 256 tokens, in fp32 with one thread a
process; the model's own and the stable update's take turns. What the processes send is counted by
torch's profiler on the first of them. accelerate must be importable.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import CPU_SHAPE
from icl_patch.bench.results import environment
from icl_patch.evaluation.report import write_json

TARGET = Path(__file__).parents[1] / "docs" / "data" / "split-steps.json"
CONTEXT = 256  # tokens
LENGTHS = (8, 24)
STEPS = LENGTHS[1] - LENGTHS[0]
ROUNDS = 7
PROCESSES = 2


def counted(call: Callable[[], None]) -> dict[str, float]:
    """Operators, messages between the processes, and the messages' bytes, of the first process."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        call()
    events = found.key_averages(group_by_input_shape=True)
    sent = [event for event in events if event.key.startswith("gloo:")]
    return {
        "operators": sum(event.count for event in events if event.key.startswith("aten::")),
        "messages": sum(event.count for event in sent),
        # of fp32; the ranks' agreement is a few numbers
        "bytes": sum(
            4 * event.count * sum(map(math.prod, filter(None, event.input_shapes)))
            for event in sent
        ),
    }


def rank(folder: str, split: str) -> None:
    """The measurements of one process; the first one prints them."""
    config = DistributedConfig(**{split: PROCESSES})
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=config
    ).eval()
    ids = torch.randint(3, 900, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    patcher = ContextPatcher(model, "stable", rank_timeout=60)

    def generate(ours: bool, new: int) -> None:
        lengths: Any = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
        if ours:
            list(patcher.generate(ids, **lengths))
        else:
            model.generate(ids, attention_mask=torch.ones_like(ids), **lengths)

    def seconds(call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"own": [], "stable": []}
    counts = {}
    for number in range(ROUNDS + 1):
        for name in times:
            few, many = (seconds(partial(generate, name == "stable", new)) for new in LENGTHS)
            times[name] += [(many - few) / STEPS] if number else []  # the first is to warm up
    for name in times:
        few, many = (counted(partial(generate, name == "stable", new)) for new in LENGTHS)
        counts[name] = {key: (many[key] - few[key]) / STEPS for key in few}
    if os.environ["RANK"] == "0":
        print(json.dumps({"seconds": times, "a step": counts}), flush=True)
    os._exit(0)


def measure(folder: str, name: str, split: str) -> dict[str, Any]:
    """One model in one split."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={PROCESSES}", __file__, folder, "--rank-of", split]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    record = next(json.loads(x) for x in done.stdout.splitlines() if x.startswith("{"))
    found = {"model": name, "split": split, **record}
    medians = [statistics.median(found["seconds"][x]) for x in ("stable", "own")]
    print(name, split, f"{medians[0] / medians[1]:.2f}", found["a step"], flush=True)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if options.rank_of:
        rank(options.model, options.rank_of)
    rows = [measure(options.model, Path(options.model).name, "pp_size")]
    with tempfile.TemporaryDirectory() as folder:
        CPU_SHAPE.build(torch.device("cpu"), torch.float32).save_pretrained(folder)
        rows += [measure(folder, CPU_SHAPE.name, split) for split in ("pp_size", "tp_size")]
    where = environment(torch.device("cpu")) | {"threads": 1, "processes": PROCESSES}
    write_json(TARGET, {"environment": where, "context_tokens": CONTEXT, "rows": rows})


if __name__ == "__main__":
    main()
