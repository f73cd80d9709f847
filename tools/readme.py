"""Write the generated tables of the README and of docs/ again, from committed numbers.

    build/python tools/readme.py            # write
    build/python tools/readme.py --check    # only say which pages differ; exit status 1

A table stands between ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icl_patch.evaluation.report import format_value, percent
from icl_patch.evaluation.report import markdown as _table
from icl_patch.evaluation.tiny_models import REFUSED, SUPPORTED

ROOT = Path(__file__).parents[1]
UPDATES = {
    "exact": "`exact`",
    "stable": "`stable`, `direct`",
}
"""Rows of the table of fidelity; the closed forms are one where blocks end in a matrix."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
CALLS = ("", ", compile=True", ", compile=False")
OURS = [f"{update}{how}" for update in ("exact", "stable") for how in CALLS]
"""Decode steps, as the benchmark names them."""
OWN_STEP = "the model's own step"
OTHERS = ["PEFT: a LoRA adapter of rank 1, swapped", "the changed weights built as matrices"]
ENDS = {
    "scale": "`m ⊙ Norm(W h)`",
    "weight": "`W h`",
    "bias": "`W h + b`",
    "experts": "`Σ s_j W_j h_j`",
}
"""The last operation of a block by its writer, as the table of families names it."""
ERRORS = ("error", "error of fp32")
"""Errors of the inversion, as its measurement names them."""
TIMED_MODEL = "SmolLM2-135M-Instruct"
EPYC = "amd-epyc-avx512_bf16"
H100 = "nvidia-h100-80gb-hbm3"
H100_COPY = 3022
"""GB/s that a copy on it moved, read and written, in bench/results/nvidia-h100-80gb-hbm3.txt."""


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def families() -> str:
    """The families by their blocks' last operation, then the refused ones."""
    rows = []
    for writer, ends in ENDS.items():
        names = [name for name, model in SUPPORTED.items() if model.writer == writer]
        rows.append([ends, ", ".join(names), ""])
    rows += [["", name, model.note] for name, model in REFUSED.items()]
    return _table(["the block ends in", "families", "refused because"], rows)


def memory() -> str:
    """A kept token's patch beside the KV cache of the context, from tools/measure.py."""
    rows, measured = [], _read("docs/data/patch-memory.json")["rows"]
    for row in sorted(measured, key=lambda row: row["patch_bytes"]["exact"]):
        exact, stable = (row["patch_bytes"][update] for update in ("exact", "stable"))
        cells = [f"{row['cache_bytes'] / 1e3:.0f} kB", f"{exact / 1e6:.1f} MB"]
        ratios = [f"{size / row['cache_bytes']:.0f}" for size in (exact, stable)]
        rows.append([row["model"], *cells, *ratios])
    columns = [
        "model in bf16",
        "cache of one context token",
        "weight change of one token (`exact`)",
        "as much as the cache of … tokens (`exact`)",
        "as much as the cache of … tokens (`stable`)",
    ]
    return _table(columns, rows)


def fidelity() -> str:
    """Replays on a pretrained model, from the numbers of the papers' page on it."""
    found = _read("docs/papers/real-model.json")["agreement"]
    rows = []
    for update, name in UPDATES.items():
        for dtype, short in DTYPES.items():
            runs = found[dtype][update], found[dtype]["no cache"]
            shares = [percent(runs[0][key]["share"]) for key in ("match", "identical")]
            rows.append([name, short, *shares, *(format_value(run["linf"][3]) for run in runs)])
    columns = ["update", "dtype", "same token", "bit-identical logits", "largest error", "noise"]
    return _table(columns, rows)


def speed() -> str:
    """Decode steps of a pretrained model, the model's own step being 1."""
    found = [
        _seconds("generation")[f"{TIMED_MODEL} float32 B={batch} context=256"] for batch in (1, 4)
    ]
    rows = [
        [_marked(name), *(f"{seconds[name] / seconds[OWN_STEP]:.2f}×" for seconds in found)]
        for name in [*OURS, "exact, two passes", OWN_STEP, *OTHERS]
        if all(name in seconds for seconds in found)
    ]
    return _table(["a decode step", "batch 1", "batch 4"], rows)


def _marked(call: str) -> str:
    """A call as code, and how it runs in words."""
    words = r"^(exact|stable|model\.generate|generate|ask|forward|compute)\b|(compile=\w+)"
    return re.sub(words, lambda match: f"`{match[0]}`", call)


def _seconds(
    benchmark: str, processor: str = EPYC, model: str = TIMED_MODEL
) -> dict[str, dict[str, float]]:
    """The medians of a model's cases, or of all, on a processor, by case and call."""
    found: dict[str, dict[str, float]] = {}
    for row in _read(f"bench/results/{benchmark}-{processor}.json")["rows"]:
        if row["case"].startswith(model) and "seconds" in row:
            found.setdefault(row["case"], {})[row["call"]] = row["seconds"]["median"]
    return found


def steps(processor: str, model: str = TIMED_MODEL) -> str:
    """Decode steps of a pretrained model by dtype, context and batch, the model's own being 1; in
    bold those that are slower than it. Calls that no case has are left out.
    """
    rows, found = {}, _seconds("generation", processor, model)
    ours = [call for call in OURS if any(call in seconds for seconds in found.values())]
    for case, seconds in found.items():
        _, dtype, batch, context = case.split()
        own_step = seconds[OWN_STEP]
        ratios = [round(seconds[x] / own_step, 2) if x in seconds else None for x in ours]
        cells = ["–" if x is None else f"**{x:.2f}×**" if x > 1 else f"{x:.2f}×" for x in ratios]
        own = f"{1e3 * own_step:.0f} ms"
        sizes = int(context.partition("=")[2]), int(batch[2:])
        shown = [DTYPES[dtype], *(f"{size:,}" for size in sizes), own, *cells]
        rows[dtype != "float32", *sizes] = shown
    columns = ["dtype", "context", "batch", OWN_STEP, *map(_marked, ours)]
    return _table(columns, [row for _, row in sorted(rows.items())])


def host() -> str:
    """The host's time of a decode step, from tools/measure.py, the model's own step being 1."""
    rows, columns = [], ["model", OWN_STEP]
    for found in _read("docs/data/host-times.json")["models"]:
        ratios = {name: ratio for name, ratio in found["ratios"].items() if name != "own"}
        columns[2:] = map(_marked, ratios)
        cells = (f"{ratio:.2f}×" for ratio in ratios.values())
        rows.append([found["model"], f"{1e3 * found['own_seconds']:.1f} ms", *cells])
    return _table(columns, rows)


def gpu_steps() -> str:
    """Compiled decode steps on a GPU, the model's own being 1."""
    rows = []
    for case, seconds in _seconds("generation", H100, "").items():
        model, _, batch, _ = case.split()
        own = seconds[f"{OWN_STEP}, compiled"]
        ours = (seconds[f"{update}, compile=True"] for update in ("exact", "stable"))
        ratios = [f"{step / own:.2f}×" for step in ours]
        rows.append([model, batch[2:], f"{1e3 * own:.1f} ms", *ratios])
    return _table(["model", "batch", OWN_STEP, "`exact`", "`stable`"], rows)


def gpu_products() -> str:
    """The time of ``F.linear`` for one of ``patched_linear`` on a GPU, by rows, and the share of
    the copy's bandwidth.
    """
    rows: dict[str, list[str]] = {}
    for row in _read(f"bench/results/linear-{H100}.json")["rows"]:
        shape = row["case"].split(" bfloat16")[0]
        if row["call"] == "patched_linear" and "M=1 " in row["case"]:
            rows[shape] = [f"{row['GB/s'] / H100_COPY:.0%}"]
        if row["call"] == "F.linear":
            rows[shape].append(f"{row['ratio']:.2f}×")
    columns = ["W", "share of a copy's bandwidth, M = 1", *(f"M = {m}" for m in (1, 4, 8, 64))]
    return _table(columns, [[shape, *cells] for shape, cells in rows.items()])


def timed(benchmark: str) -> str:
    """A pretrained model's cases and calls: seconds, and how many times a case's first call."""
    table: dict[tuple[str, ...], list[str]] = {}
    for case, found in _seconds(benchmark).items():
        _, _, *name = case.split(" ", 2)
        own = next(iter(found.values()))
        for call, seconds in found.items():
            cell = f"{seconds:.2f} s ({seconds / own:.2f}×)"
            table.setdefault((*name, _marked(call)), []).append(cell)
    columns = ["case", "call"][-len(next(iter(table))) :]
    return _table([*columns, *DTYPES.values()], [[*key, *cells] for key, cells in table.items()])


def peaks() -> str:
    """The memory of a generation after a long context, from tools/measure.py."""
    found = _read("docs/data/offload-memory.json")["generation"]
    sizes = [f"{found[call]} MiB" for call in ("own", "exact", "stable")]
    return _table(["`model.generate`", "`exact`", "`stable`"], [sizes])


def extraction() -> str:
    """The time of an extraction beside the model's own passes, from tools/measure.py."""
    rows = []
    for run in _read("docs/data/extraction-speed.json")["runs"]:
        records = run["records"]
        seconds = statistics.median(record["seconds"]["all"] for record in records)
        ratio = statistics.median(x["seconds"]["all"] / x["seconds"]["own"] for x in records)
        rate = records[0]["patches"] * run["workers"] / seconds
        memory = max(record["peak_bytes"] for record in records)
        cells = [f"`{run['update']}`", str(run["workers"]), f"{rate:.2f}", f"{ratio:.2f}"]
        rows.append([*cells, f"{memory / 1e9:.2f} GB"])
    columns = ["update", "processes", "rows/s", "× the model's own time", "peak memory"]
    return _table(columns, rows)


def splits() -> str:
    """Families by what split models compute, from tools/measure_splits.py: families with equal
    cells share a row.
    """
    text = (ROOT / "docs/data/splits.jsonl").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in map(json.loads, text.splitlines()):
        found.setdefault(line["family"], {}).setdefault(line["split"], []).append(line)
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, by_split in found.items():
        rows.setdefault(tuple(map(_of_split, by_split.values())), []).append(family)
    names = {"cpu": "on the CPU", "disk": "on disk"}
    names |= {name: f"`{name[:2]}_size={name[3:]}`" for name in ("pp 2", "pp 4", "tp 2")}
    table = []
    for cells, families in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines = [line for family in families for line in found[family]["tp 2"]]
        largest = max((line["error"] for line in lines if "error" in line), default=0.0)
        table.append([", ".join(families), *cells, f"{largest:.0e}" if largest else ""])
    return _table(["families", *names.values(), "largest error"], table)


def _of_split(lines: list[dict[str, Any]]) -> str:
    """The updates that work for a family in one split."""
    if all(line.get("bits") for line in lines):
        return "all bits"
    works = [line["update"] for line in lines if "error" in line]
    return ", ".join(f"`{update}`" for update in works) or "refused"


def split_steps() -> str:
    """Decode steps of models that are split over two processes, from tools/measure_splits.py."""
    rows = []
    for row in _read("docs/data/split-steps.json")["rows"]:
        own, ours = (statistics.median(row["seconds"][name]) for name in ("own", "stable"))
        rows.append([row["model"], f"`{row['split']}=2`", f"{1e3 * own:.0f} ms"])
        rows[-1].append(f"{ours / own:.2f}×")
    return _table(["model", "split", "the model's own step", "`stable`"], rows)


def inversion() -> str:
    """The inversion on the rows of a real model, blocks whose scales hold a zero one by one."""
    blocks = _read("docs/data/real-inversion.json")["blocks"]
    others = [block for block in blocks if not block["zeros"]]
    parts = [(str(place), [x]) for place, x in enumerate(blocks) if x["zeros"]]
    rows = []
    for name, group in [*parts, (f"the other {len(others)}", others)]:
        for scale in ("own scale", "raised scale"):
            found = [x[scale] for x in group]
            smallest = min(x["smallest"] for x in group)
            counts = [
                sum(x["status"].get(status, 0) for x in found)
                for status in ("EASY", "HARD", "UNREACHABLE")
            ]
            errors = [format_value(max(x[key] for x in found)) for key in ERRORS]
            about = [f"{smallest:.2g}", str(sum(x["zeros"] for x in group))]
            rows.append([name, *about, scale.split()[0], *map(str, counts), *errors])
    columns = ["block", "smallest scale", "zeros", "inverted for", "`EASY`", "`HARD`"]
    return _table([*columns, "`UNREACHABLE`", "error, fp64", "error, fp32"], rows)


TABLES: dict[str, dict[str, Callable[[], Any]]] = {
    "README.md": {"fidelity": fidelity},
    "docs/kernels.md": {"inversion": inversion},
    "docs/models.md": {"families": families},
    "docs/scale.md": {
        "extraction": extraction,
        "splits": splits,
        "split-steps": split_steps,
    },
    "docs/performance.md": {
        "speed": speed,
        "steps": lambda: steps(EPYC),
        "steps-avx2": lambda: steps("amd-epyc-avx2"),
        "steps-gemma": lambda: steps(EPYC, "gemma-3-270m"),
        "steps-intel": lambda: steps("intel-xeon-processor-amx"),
        "host": host,
        "steps-gpu": gpu_steps,
        "products-gpu": gpu_products,
        "answers": lambda: timed("answer"),
        "passes": lambda: timed("passes"),
        "peaks": peaks,
        "memory": memory,
    },
}


def rewritten(page: str) -> str:
    """A page with its tables made again.

    Raises:
        ValueError: the page does not have the marks of a table exactly once.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        marked = re.compile(rf"(<!-- {name}: .*? -->\n\n).*?(<!-- end of {name} -->)", re.S)
        found = list(marked.finditer(text))
        if len(found) != 1:
            times = f"{len(found)}×"
            raise ValueError(f"expected the marks of {name} once in {page}, found them {times}")
        [marks] = found
        text = f"{text[: marks.end(1)]}{table()}\n\n{text[marks.start(2) :]}"
    return text


def main() -> int:
    """Write or check all pages."""
    check = sys.argv[1:] == ["--check"]
    stale = [page for page in TABLES if rewritten(page) != (ROOT / page).read_text("utf-8")]
    for page in stale:
        print(f"{page}: {'differs from its numbers' if check else 'written'}")
        if not check:
            (ROOT / page).write_text(rewritten(page), encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
