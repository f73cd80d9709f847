"""Measure split and offloaded models, into docs/data.

    build/python tools/measure_splits.py splits [FAMILY...]   # every family split and offloaded
    build/python tools/measure_splits.py split-steps MODEL    # decode steps over two processes

MODEL is a folder. accelerate must be importable. tools/readme.py writes the tables again.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import CPU_SHAPE
from icl_patch.bench.results import environment
from icl_patch.errors import RankError
from icl_patch.evaluation import tiny_models
from tools import measure
from tools.measure import DATA, load, write
from tools.record_bits import digest, tokens

UPDATES = ("direct", "stable", "exact")
apart = partial(measure.apart, __file__)


RANKS = {"pp 2": ("pp_size", 2), "pp 4": ("pp_size", 4), "tp 2": ("tp_size", 2)}


def splits(*families: str) -> None:
    """Patches of split and offloaded models beside those of the same models whole: the error of the
    replay (the largest difference of a logit from the run with the context, relative to the
    largest), and whether factors and logits have the bits of the whole model; or the refusal.
    """
    lines = []
    for family in families or tiny_models.SUPPORTED:
        with tempfile.TemporaryDirectory() as folder:
            tiny_models.build(family).save_pretrained(folder)
            whole = of_split(folder, "none")
            for split in ("cpu", "disk", *RANKS):
                for update, own, found in zip(UPDATES, whole, of_split(folder, split), strict=True):
                    if "digest" in found:
                        found["bits"] = found.pop("digest") == own["digest"]
                    line = {"family": family, "split": split, "update": update, **found}
                    lines.append(json.dumps(line))
                    print(lines[-1], flush=True)
    if not families:
        (DATA / "splits.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def of_split(folder: str, split: str) -> list[dict[str, Any]]:
    """The results of each update."""
    if split in RANKS:
        found = apart("split-rank", folder, split, ranks=RANKS[split][1])
        # the ranks lost each other, and all ended
        lost = {"refused": "its pipeline fails on one rank"}
        return found + [lost] * (len(UPDATES) - len(found))
    from accelerate import cpu_offload, disk_offload

    offloads: dict[str, Callable[[Any], Any]] = {
        "none": lambda model: model,
        "cpu": lambda model: cpu_offload(model, "cpu"),
        "disk": lambda model: disk_offload(model, f"{folder}/offloaded", "cpu"),
    }
    return [attempt(lambda: offloads[split](load(folder)), update) for update in UPDATES]


def split_rank(folder: str, split: str) -> Iterator[dict[str, Any]]:
    """The measurements of one rank."""
    option, count = RANKS[split]
    sizes: dict[str, Any] = {option: count}
    config = DistributedConfig(**sizes)
    for update in UPDATES:
        yield attempt(lambda: load(folder, distributed_config=config), update)


def attempt(make: Callable[[], Any], update: str) -> dict[str, Any]:
    """The error of a replay, and hashes of factors and logits; or the refusal."""
    ids = tokens(0, 2, 12)
    try:
        with ContextPatcher(make(), update, rank_timeout=30) as patcher:
            patch = patcher.compute(ids[:, :9], ids[:, 9:])
            logits = patcher.forward(patch.kept_ids, patch)
    except RankError:
        raise
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    assert patch.logits is not None
    largest = (logits - patch.logits).abs().max() / patch.logits.abs().max()
    factors = [layer[name] for layer in patch.layers for name in sorted(layer)]
    return {"error": float(largest), "digest": [digest(x) for x in (*factors, logits)]}


LENGTHS, STEP_CONTEXT, STEP_ROUNDS, PROCESSES = (8, 24), 256, 7, 2


def split_steps(folder: str) -> None:
    """A step is the difference of two greedy generations, in fp32 with one thread a process; the
    model's own and the stable update's take turns. A random model has a number of heads that two
    divides, which shared matrices need.
    """
    with tempfile.TemporaryDirectory() as made:
        CPU_SHAPE.build(torch.device("cpu"), torch.float32).save_pretrained(made)
        real, random = (folder, Path(folder).name), (made, CPU_SHAPE.name)
        rows = []
        for (where, name), split in ((real, "pp_size"), (random, "pp_size"), (random, "tp_size")):
            [found] = apart("steps-rank", where, split, ranks=PROCESSES)
            rows.append({"model": name, "split": split, **found})
            medians = [statistics.median(found["seconds"][x]) for x in ("stable", "own")]
            print(name, split, f"{medians[0] / medians[1]:.2f}", flush=True)
    machine = environment(torch.device("cpu")) | {"threads": 1, "processes": PROCESSES}
    data = {"environment": machine, "context_tokens": STEP_CONTEXT, "rows": rows}
    write("split-steps.json", data)


def steps_rank(folder: str, split: str) -> Iterator[dict[str, Any]]:
    """The measurements of one rank."""
    sizes: dict[str, Any] = {split: PROCESSES}
    config = DistributedConfig(**sizes)
    model = load(folder, dtype=torch.float32, distributed_config=config)
    ids, steps = tokens(0, 1, STEP_CONTEXT), LENGTHS[1] - LENGTHS[0]
    mask, patcher = torch.ones_like(ids), ContextPatcher(model, "stable", rank_timeout=60)
    calls: dict[str, Callable[..., Any]] = {
        "own": lambda **lengths: model.generate(ids, attention_mask=mask, **lengths),
        "stable": lambda **lengths: list(patcher.generate(ids, attention_mask=mask, **lengths)),
    }

    def seconds(call: Callable[..., Any], new: int) -> float:
        start = time.perf_counter()
        call(min_new_tokens=new, max_new_tokens=new, do_sample=False)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(STEP_ROUNDS + 1):
        for name, call in calls.items():
            few, many = (seconds(call, new) for new in LENGTHS)
            times[name].append((many - few) / steps)
    yield {"seconds": {name: found[1:] for name, found in times.items()}}  # the first is to warm up


if __name__ == "__main__":
    measure.main(__doc__, (splits, split_steps), (split_rank, steps_rank))
