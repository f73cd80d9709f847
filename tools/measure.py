"""Measure the numbers of the pages on memory, the host's time and data sets, into docs/data.

    build/python tools/measure.py patches              # bytes of a patch, and of the KV cache
    build/python tools/measure.py host                 # the host's time of a decode step
    build/python tools/measure.py memory MODEL         # of a patch, offloaded or not; of steps
    build/python tools/measure.py extraction MODEL     # a data set beside the model's own passes

MODEL is a folder. accelerate must be importable. tools/readme.py writes the tables again.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
)

from icl_patch import ContextPatcher, scale
from icl_patch.bench.cases.models import RandomModel, random_ids
from icl_patch.bench.results import environment
from icl_patch.evaluation.loading import load_model
from icl_patch.models.forward import cache_in, cache_name
from tools.record_bits import tokens

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
MIB = 2**20


def write(name: str, data: Any) -> None:
    """Write a file of docs/data."""
    (DATA / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def apart(script: str, *arguments: str, ranks: int = 0) -> list[Any]:
    """The yields of a script's part, from a process of its own or the first of several ranks."""
    launcher = ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks else []), script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def load(folder: str, **options: Any) -> Any:
    """A saved model, of the class that its folder names."""
    [name] = AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, name).from_pretrained(folder, **options)


# -- patches: one block of each model has its true widths and random bf16 weights


def patches() -> None:
    """The models of docs/data/patch-memory.json again."""
    record = json.loads((DATA / "patch-memory.json").read_text(encoding="utf-8"))
    rows = [patch_bytes(name, settings) for name, settings in record["configs"].items()]
    write("patch-memory.json", record | {"torch": torch.__version__, "rows": rows})


def patch_bytes(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The bytes of one model's cache for one token, and of one token's patch by update."""
    small = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(**(settings | small))
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = cache_in(model(torch.tensor([[5]]), use_cache=True)).layers[0]
    found = {}
    for update in ("stable", "exact"):
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(torch.tensor([[5, 6, 7]]), torch.tensor([[8]]))
        shared = sum(x.nbytes for layer in patch.layers for x in layer.values() if x.dim() == 1)
        found[update] = layers * (patch.nbytes - shared)  # a norm's own scale is the model's
    cached = layers * (cache.keys.nbytes + cache.values.nbytes)
    return {"model": name, "layers": layers, "cache_bytes": cached, "patch_bytes": found}


# -- the host: at these widths products take no time

NARROW = (
    RandomModel("Llama", LlamaConfig, 64, 128, 30, 4, 2, 16, 512),
    RandomModel("Gemma 3", Gemma3TextConfig, 64, 128, 26, 4, 1, 16, 512, 512),
)
WARM, STEPS = 8, 40  # of each way in a round


def host(rounds: str = "25") -> None:
    """The thread's CPU time of a decode step over a context of 64 tokens, all ways in turn: the
    median step of each round, and the median of the rounds' ratios to the model's own step.
    """
    models = []
    for shape in NARROW:
        model: Any = shape.build(torch.device("cpu"), torch.float32)
        model.generation_config.eos_token_id = None
        seconds: dict[str, list[float]] = {}
        for _ in range(int(rounds)):
            for name, steps in ways(model, random_ids(model, 1, 64)).items():
                with closing(steps):  # one patcher at a time
                    times = [thread_seconds(steps) for _ in range(WARM + STEPS)]
                seconds.setdefault(name, []).append(median(times[WARM:]))
        own = seconds["own"]
        ratios = {
            name: median(x / y for x, y in zip(found, own, strict=True))
            for name, found in seconds.items()
        }
        print(shape.name, {name: f"{ratio:.2f}" for name, ratio in ratios.items()}, flush=True)
        models.append({"model": shape.name, "own_seconds": median(own), "ratios": ratios})
    about = environment(torch.device("cpu")) | {"threads": 1}
    write("host-times.json", {"environment": about, "rounds": int(rounds), "models": models})


def ways(model: Any, ids: torch.Tensor) -> dict[str, Generator[object, None, None]]:
    """Steps after a context, by name: the model's own and ours."""
    found: dict[str, Generator[object, None, None]] = {"own": own_steps(model, ids)}
    for update in ("exact", "stable"):
        for how in ("auto", False):
            name = update if how else f"{update}, compile=False"
            found[name] = our_steps(model, ids, update, how)
    return found


@torch.no_grad()
def own_steps(model: Any, ids: torch.Tensor) -> Generator[object, None, None]:
    """The model's own greedy steps."""
    given = {cache_name(model): DynamicCache(config=model.config)}
    while True:
        ids = model(ids, **given).logits[:, -1:].argmax(-1)
        yield ids


def our_steps(
    model: Any, ids: torch.Tensor, update: str, how: Any
) -> Generator[object, None, None]:
    """Those of ``generate``."""
    mask = torch.ones_like(ids)  # the padding id may be among random ones
    with ContextPatcher(model, update) as patcher:
        yield from patcher.generate(
            ids, context_mask=mask, max_new_tokens=WARM + STEPS + 1, compile=how
        )


def thread_seconds(steps: Iterator[object]) -> float:
    """The CPU time of the next step on this thread."""
    began = time.thread_time()
    next(steps)
    return time.thread_time() - began


# -- memory

LONG = 8000  # tokens


def memory(folder: str) -> None:
    """How far a process grows beyond the imports while it loads the model, attaches, computes an
    exact patch and replays it, with the weights in memory and on disk; and beyond the loaded model
    while it generates two tokens after a long context.
    """
    found: dict[str, Any] = {"model": Path(folder).name, "dtype": "float32"}
    for place in ("memory", "disk"):
        [found[place]] = apart(__file__, "grown-by-patch", folder, place)
    found["generation"] = {"context_tokens": LONG}
    for call in ("own", "exact", "stable"):
        [measured] = apart(__file__, "grown-by-steps", folder, call)
        found["generation"] |= measured
    write("offload-memory.json", found)


def grown_by_patch(folder: str, place: str) -> Iterator[dict[str, int]]:
    """The sizes in MiB."""
    before, device_map = resident(), None
    if place == "disk":
        parts = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
        device_map = {**dict.fromkeys(parts, "disk"), "model.rotary_emb": "cpu"}
    with tempfile.TemporaryDirectory() as weights:
        options = {"device_map": device_map, "offload_folder": weights}
        model = load(folder, dtype=torch.float32, **options)
        ids = tokens(0, 1, 20)
        with ContextPatcher(model) as patcher:
            patch = patcher.compute(ids[:, :11], ids[:, 11:])
            logits = patcher.forward(patch.kept_ids, patch)
            assert patch.logits is not None and torch.equal(logits, patch.logits)
    sizes = [x.nbytes for x in model.parameters()]
    found = {"largest_weight": max(sizes) // MIB, "growth": (peak() - before) // MIB}
    # two modules that share a weight in memory have one each on disk
    yield found if place == "disk" else {"weights": sum(sizes) // MIB, **found}


def grown_by_steps(folder: str, call: str) -> Iterator[dict[str, int]]:
    """The growth in MiB by two tokens: the model's own, or of an update's steps."""
    model = load(folder, dtype=torch.float32)
    for weight in model.parameters():
        weight.sum()  # from_pretrained maps the file: read it before the count begins
    ids, before = tokens(0, 1, LONG), resident()
    given: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
    if call == "own":
        model.generate(ids, **given)
    else:
        list(ContextPatcher(model, call).generate(ids, **given))
    yield {call: (peak() - before) // MIB}


def peak() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """The bytes that it has."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * resource.getpagesize()


# -- extraction: one process and then two, of one thread, with a data set and a folder each

ROWS, ROUNDS = 24, 2  # of each process
CONTEXT, KEPT = (192, 320), 16  # tokens


def extraction(name: str) -> None:
    """Time ``scale.extract_dataset`` in its default batches, without attaching, beside the model's
    own passes over the same batches, without a cache and with the logits of the kept tokens only.
    """
    runs = []
    for update in ("stable", "exact"):
        for workers in (1, 2):
            work = [(__file__, "extract", name, update, str(rank)) for rank in range(workers)]
            with ThreadPoolExecutor() as pool:
                records = [x for part in pool.map(lambda each: apart(*each), work) for x in part]
            runs.append({"update": update, "workers": workers, "records": records})
            ratios = [record["seconds"]["all"] / record["seconds"]["own"] for record in records]
            print(update, workers, [f"{ratio:.2f}" for ratio in ratios], flush=True)
    result = {
        "model": Path(name).name,
        "environment": environment(torch.device("cpu")) | {"threads": 1},
        "context_tokens": CONTEXT,
        "kept_tokens": KEPT,
        "rows": ROWS,
    }
    write("extraction-speed.json", result | {"runs": runs})


def extract(name: str, update: str, rank: str, rows: int = ROWS) -> Iterator[dict[str, Any]]:
    """One process: its extractions and own passes, a record for each round."""
    model, tokenizer = load_model(name)
    texts = texts_of(tokenizer, range(int(rank) * rows, (int(rank) + 1) * rows))
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as made:
            data, folder = Path(made, "rows.jsonl"), Path(made, "patches")
            data.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
            with ContextPatcher(model, update, tokenizer=tokenizer) as patcher:
                start = time.perf_counter()
                summary = scale.extract_dataset(patcher, data, folder)
                seconds = {"all": time.perf_counter() - start}
            assert summary.rejected == 0
            seconds["own"] = own_passes(model, tokenizer, texts, scale.PatchDataset(folder))
        yield {"seconds": seconds, "patches": summary.patches, "peak_bytes": peak()}


def texts_of(tokenizer: Any, rows: range) -> list[dict[str, str]]:
    """Rows of a data set: pieces of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    ids = tokenizer("".join(page.read_text("utf-8") for page in pages), verbose=False).input_ids
    found = []
    for row in rows:
        start = row * 61 % (len(ids) - CONTEXT[1] - KEPT)
        cut = start + CONTEXT[0] + row * 37 % (CONTEXT[1] - CONTEXT[0] + 1)
        parts = {"context": ids[start:cut], "kept": ids[cut : cut + KEPT]}
        found.append({name: tokenizer.decode(part) for name, part in parts.items()})
    return found


@torch.no_grad()
def own_passes(model: Any, tokenizer: Any, texts: list[dict[str, str]], patches: Any) -> float:
    """Seconds of the model's own passes over the batches of a folder."""
    seconds = 0.0
    for index, patch in patches.batches():
        batch = ["".join(texts[row].values()) for row in index["row"].to_pylist()]
        inputs = tokenizer(batch, padding=True, padding_side="left", return_tensors="pt")
        start = time.perf_counter()
        model(**inputs, use_cache=False, logits_to_keep=patch.kept_ids.shape[1])
        seconds += time.perf_counter() - start
    return seconds


def main(
    usage: str | None,
    calls: Iterable[Callable[..., object]],
    parts: Iterable[Callable[..., Iterator[object]]],
) -> None:
    """Run the call, or the part of one, that the command line names."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, *arguments = sys.argv[1:] or [""]
    known: dict[str, Any] = {call.__name__.replace("_", "-"): call for call in (*calls, *parts)}
    if name not in known:
        sys.exit(usage)
    for found in known[name](*arguments) or ():
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
    if "RANK" in os.environ:
        os._exit(0)  # the other ranks may have ended before


if __name__ == "__main__":
    main(__doc__, (patches, host, memory, extraction), (grown_by_patch, grown_by_steps, extract))
