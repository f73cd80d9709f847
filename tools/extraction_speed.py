"""Time ``scale.extract_dataset`` beside the model's own forward passes over the same tokens.

    build/python tools/extraction_speed.py MODEL        # writes docs/data/extraction-speed.json

One process and then two, of one thread each, extract the patches of a data set each, into a folder
each, in the default batches. After every extraction they run the unmodified model once over the
padded batches, contexts and kept tokens together, without a cache and with the logits of the kept
tokens only. Processes start every part together. Attaching is not timed; the plan, with its first
patch, is.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch import ContextPatch, ContextPatcher, scale
from icl_patch.bench.results import environment
from icl_patch.evaluation.loading import load_model
from icl_patch.evaluation.report import write_json
from icl_patch.scale import extraction, extractor

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "data" / "extraction-speed.json"
UPDATES = ("stable", "exact")
WORKERS = (1, 2)
ROWS, ROUNDS = 24, 2  # of each process
CONTEXT, KEPT = (192, 320), 16  # tokens
PARTS = {
    "plan": (extraction, "make_plan"),
    "compute": (extractor, "compute_batch"),
    "write": (ContextPatch, "save"),
}
"""What an extraction calls; the rest are tokens, norms and the index."""


def write_rows(tokenizer: PreTrainedTokenizerBase, path: Path, rows: range) -> None:
    """Pieces of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    ids = tokenizer(text, verbose=False).input_ids
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            start = row * 61 % (len(ids) - CONTEXT[1] - KEPT)
            cut = start + CONTEXT[0] + row * 37 % (CONTEXT[1] - CONTEXT[0] + 1)
            texts = [tokenizer.decode(part) for part in (ids[start:cut], ids[cut : cut + KEPT])]
            file.write(json.dumps(dict(zip(("context", "kept"), texts, strict=True))) + "\n")


@contextmanager
def timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of every part; of a part within another, to the other's."""
    running: list[str] = []

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            running.append(part)
            result = call(*arguments, **named)
            running.pop()
            seconds[part] += 0 if running else time.perf_counter() - start
            return result

        return run

    parts = PARTS.items()
    patches = [mock.patch.object(x, f, timed(part, getattr(x, f))) for part, (x, f) in parts]
    for patch in patches:
        patch.start()
    yield
    mock.patch.stopall()


@torch.no_grad()
def own_forwards(model: PreTrainedModel, tokenizer: Any, rows: Path, folder: Path) -> float:
    """Seconds of the model's own passes over the batches of a folder."""
    texts = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    seconds = 0.0
    for index, patch in scale.PatchDataset(folder).batches():
        batch = [
            texts[number]["context"] + texts[number]["kept"] for number in index["row"].to_pylist()
        ]
        inputs = tokenizer(batch, padding=True, padding_side="left", return_tensors="pt")
        start = time.perf_counter()
        model(**inputs, use_cache=False, logits_to_keep=patch.kept_ids.shape[1])
        seconds += time.perf_counter() - start
    return seconds


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def work(
    name: str, update: str, rank: int, count: int, rounds: int, barrier: Any, queue: Any
) -> None:
    """One process: its extractions and own passes, as one record for each round."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(name)
    with tempfile.TemporaryDirectory() as made:
        rows, folder = Path(made) / "rows.jsonl", Path(made) / "patches"
        write_rows(tokenizer, rows, range(rank * count, (rank + 1) * count))
        for _ in range(rounds):
            seconds = dict.fromkeys(PARTS, 0.0)
            with ContextPatcher(model, update, tokenizer=tokenizer) as patcher:
                barrier.wait()
                start = time.perf_counter()
                with timed_parts(seconds):
                    summary = scale.extract_dataset(patcher, rows, folder)
                seconds["all"] = time.perf_counter() - start
            assert summary.rejected == 0
            barrier.wait()
            seconds["own"] = own_forwards(model, tokenizer, rows, folder)
            sizes = {part: size_of(folder / part) for part in ("shards", "index")}
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            queue.put(
                {"seconds": seconds, "patches": summary.patches, "peak_bytes": memory}
                | {"bytes": {**sizes, "rows": rows.stat().st_size}}
            )
            shutil.rmtree(folder)


def measure(name: str, update: str, workers: int) -> list[Any]:
    """The records of all processes and rounds."""
    context = get_context("spawn")
    barrier, queue = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=work, args=(name, update, rank, ROWS, ROUNDS, barrier, queue))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    records = [queue.get(timeout=900) for _ in range(workers * ROUNDS)]
    for process in processes:
        process.join()
    return records


def main() -> None:
    """Measure all, and write the numbers."""
    parser = argparse.ArgumentParser(description="Time the extraction of a data set.")
    parser.add_argument("model", help="local folder or hub id")
    name = parser.parse_args().model
    model, _ = load_model(name)
    result: dict[str, Any] = {
        "model": Path(name).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_bytes": sum(weight.nbytes for weight in model.parameters()),
        "environment": environment(torch.device("cpu")) | {"threads": 1},
        "context_tokens": CONTEXT,
        "kept_tokens": KEPT,
        "rows": ROWS,
        "runs": [],
    }
    del model
    for update in UPDATES:
        for workers in WORKERS:
            records = measure(name, update, workers)
            result["runs"].append({"update": update, "workers": workers, "records": records})
            ratios = [record["seconds"]["all"] / record["seconds"]["own"] for record in records]
            print(update, workers, [f"{ratio:.2f}" for ratio in ratios], flush=True)
    write_json(TARGET, result)


if __name__ == "__main__":
    main()
