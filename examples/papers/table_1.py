"""Table 1 of Goldwaser et al., a row a component, measured on every family with blocks that are
made of it.

    python examples/papers/table_1.py              # all families, as in docs/papers
    python examples/papers/table_1.py --quick      # one family a row, seconds

Small random models in fp32 and bf16, contexts of two absorbed spans, a prefix, ragged rows. For
every model ``icl_patch.controllability`` says how many (block, token) pairs are input- and
output-controllable. One thread, fixed seeds.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from icl_patch import ContextPatcher, controllability, metrics
from icl_patch.bench.results import environment
from icl_patch.bench.results import markdown as table
from icl_patch.evaluation import tiny_models
from icl_patch.evaluation.report import format_floor, percent, write_json
from icl_patch.models import kv_cache
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.recording import forward_passes
from icl_patch.recording.sequences import assemble
from icl_patch.tolerances import noise_limit

# Limit of the reader error and the correction, in units of the dtype's epsilon.
ROUNDINGS = 16


@dataclass(frozen=True)
class Row:
    """A row of the table: the component, the statement that proves it, the update, and the family
    of the quick form.
    """

    component: str
    statement: str
    update: str
    family: str


ROWS = (
    Row("input update for an MLP", "6", "ΔW = W(v_C - v) vᵀ / ‖v‖²", "olmo2"),
    Row("input update with pre-normalisation", "7", "ΔW = W(z_C - z) zᵀ / ‖z‖²", "llama"),
    Row("output update: outer bias", "8", "Δb = ΔA", "gpt2"),
    Row("output update: outer weight matrix", "9", "ΔW' = ΔA yᵀ / ‖y‖²", "llama"),
    Row("output update: elementwise multiply", "10", "Δm = ΔA ⊘ h", "gemma3"),
    Row("mixture of experts", "11", "ΔA / S for every active expert", "mixtral"),
    Row("parallel blocks", "12", "the output takes up all of ΔA", "gptj"),
    Row(
        "stable update of a norm's scale (Appendix B)",
        "B",
        "W_down by inverting RMSNorm, m by the rest",
        "gemma3",
    ),
)


_HEAD = """# Table 1 of Goldwaser et al., row by row

Small random models of every block form ([models](../models.md#block-forms)), with a prefix, a
context of two absorbed spans, and ragged rows. L∞ compares the logits of a whole replay without the
context with those of the unmodified model with it, relative to the largest logit, in fp32, for the
worst family; the update is direct (last row: stable). The noise floor is how much the unmodified
model's logits vary when only batching or caching changes, here at twice the batch; *0 here*: this
changed no rounding."""


def families_of(row: Row) -> list[str]:
    """The tiny models that use a statement; those that take images are measured elsewhere."""
    return [
        name
        for name, entry in tiny_models.SUPPORTED.items()
        if row.statement in entry.lemmas.split(", ") and not entry.images
    ]


def controllable(name: str, seed: int) -> dict[str, float]:
    """The shares of (block, kept token) pairs of a family's model that are controllable, for its
    direct and stable updates.
    """
    generator = torch.Generator().manual_seed(seed)
    context, kept = (
        torch.randint(1, tiny_models.IMAGE_TOKEN - 2, (3, width), generator=generator)
        for width in (9, 5)
    )
    found = {}
    for update in ("direct", "stable"):
        with ContextPatcher(tiny_models.build(name, seed), update) as patcher:
            blocks = controllability(patcher, context, kept)
        for side in ("input", "output"):
            rows = torch.stack([getattr(block, f"{side}_controllable") for block in blocks])
            found[f"{side}_{update}"] = float(rows.double().mean())
    return found


def sequences_of(seed: int, ragged: bool, copies: int = 1) -> dict[str, Any]:
    """Three rows, each ``copies`` times: a prefix, ragged for models that take padding, a context
    with two absorbed spans, up to seven kept tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    prefix, context, kept = (
        torch.randint(1, tiny_models.IMAGE_TOKEN - 2, (3, width), generator=generator)
        for width in (5, 11, 7)
    )
    lengths = torch.tensor([[5, 7], [3, 5], [1, 3]] if ragged else [[5, 7], [5, 5], [5, 3]])
    rows = {
        "context_ids": context,
        "kept_ids": kept,
        "prefix_ids": prefix,
        "prefix_mask": torch.arange(5).flip(0) < lengths[:, :1],
        "kept_mask": torch.arange(7) < lengths[:, 1:],
    }
    repeated = {name: x.repeat(copies, 1) for name, x in rows.items()}
    return {**repeated, "absorbed": [(0, 5), (8, 10)]}


@torch.no_grad()
def baseline(model: Any, seed: int, ragged: bool, copies: int) -> torch.Tensor:
    """The unmodified model's logits of the kept tokens; token by token if it is recurrent."""
    sequences = assemble(**sequences_of(seed, ragged, copies))
    cache, width = kv_cache.new_cache(model), sequences.tail_ids.shape[1]
    forward_passes.run_head(model, sequences, cache)
    step = 1 if is_recurrent(model) else width
    parts = [slice(start, start + step) for start in range(0, width, step)]
    logits = [forward_passes.run_tail(model, sequences, cache, part) for part in parts]
    return torch.cat(logits, 1)[:3, sequences.kept_columns]


def replay(name: str, update: str, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """A replay beside the unmodified model: errors relative to the largest logit, the share of
    bit-identical tokens, and whether readers' errors and corrections are a few roundings.
    """
    with ContextPatcher(tiny_models.build(name, seed, dtype), update) as patcher:
        ragged = patcher.attached_model.takes_padding
        patch = patcher.compute(**sequences_of(seed, ragged))
        logits, mask, report = patcher.forward(patch.kept_ids, patch), patch.kept_mask, patch.report
    model = tiny_models.build(name, seed, dtype)
    reference, doubled = (baseline(model, seed, ragged, copies) for copies in (1, 2))
    assert report is not None
    largest = max(float(report.reader_error.max()), float(report.correction.max()))
    return {
        "noise_floor": float(metrics.linf(doubled, reference)[mask].max()),
        "linf": float(metrics.linf(logits, reference)[mask].max()),
        "identical": float(metrics.bit_identical(logits, reference)[mask].double().mean()),
        "rounding": largest <= ROUNDINGS * torch.finfo(dtype).eps,
    }


def measure(families: Iterable[str], seed: int) -> dict[str, dict[str, Any]]:
    """Per family the replays of all updates, and controllability."""
    found = {}
    for name in families:
        direct, stable, fp32 = (
            replay(name, update, torch.float32, seed) for update in ("direct", "stable", "exact")
        )
        bf16 = replay(name, "exact", torch.bfloat16, seed)
        limit = noise_limit(direct["noise_floor"])
        found[name] = {
            "noise_floor": direct["noise_floor"],
            "direct": direct["linf"],
            "stable": stable["linf"],
            "exact_fp32": fp32["identical"],
            "exact_bf16": bf16["identical"],
            "controllable": controllable(name, seed),
            "passed": max(direct["linf"], stable["linf"]) <= limit
            and fp32["identical"] == bf16["identical"] == 1.0
            and all(run["rounding"] for run in (fp32, bf16)),
        }
    return found


def summary(
    row: Row, families: Sequence[str], measures: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """One row over its families: the worst of each measure."""
    found = [measures[name] for name in families]
    update = "stable" if row.statement == "B" else "direct"
    return {
        "component": row.component,
        "statement": row.statement,
        "update": row.update,
        "families": list(families),
        "linf": max(one[update] for one in found),
        "noise_floor": max(one["noise_floor"] for one in found),
        "bit_identical": min(min(one["exact_fp32"], one["exact_bf16"]) for one in found),
        "input_controllable": min(one["controllable"][f"input_{update}"] for one in found),
        "output_controllable": min(one["controllable"][f"output_{update}"] for one in found),
    }


def page(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The table as a page."""
    cells = [
        [
            *(row[key] for key in ("component", "statement", "update")),
            str(len(row["families"])),
            f"{row['linf']:.1e}",
            format_floor(row["noise_floor"]),
        ]
        for row in rows
    ]
    identical = min(row["bit_identical"] for row in rows)
    controllable = min(row[f"{x}_controllable"] for x in ("input", "output") for row in rows)
    parts = [
        _HEAD,
        table(["component", "lemma", "update", "families", "L∞", "noise floor"], cells),
        f"Exact patches reproduce the logits of {percent(identical)} of the tokens bit for bit,\n"
        f"in fp32 and in bf16. Of the (block, token) pairs {percent(controllable)} are input- and\n"
        "output-controllable (Definitions 3 and 4).",
        "- The paper: each component has a perfect implicit update where its condition holds.\n"
        "- Numbers, by family: [table-1.json](table-1.json)\n"
        f"- Command: `{command}`",
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every row."""
    parser = argparse.ArgumentParser(
        description="Table 1 of Goldwaser et al., measured on every family."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/papers"), help="folder for the page and its numbers"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the models and the tokens")
    parser.add_argument("--quick", action="store_true", help="one family a row")
    options = parser.parse_args(arguments)
    seed = options.seed
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {row: [row.family] if options.quick else families_of(row) for row in ROWS}
    measures = measure(dict.fromkeys(name for names in chosen.values() for name in names), seed)
    rows = [summary(row, names, measures) for row, names in chosen.items()]
    command = f"python examples/papers/table_1.py --seed {seed}{' --quick' * options.quick}"
    write_json(
        options.out / "table-1.json",
        {
            "command": command,
            "seed": seed,
            "environment": environment(torch.device("cpu")),
            "rows": rows,
            "families": measures,
        },
    )
    (options.out / "table-1.md").write_text(page(rows, command), encoding="utf-8")
    failed = [name for name, one in measures.items() if not one["passed"]]
    for row in rows:
        print(
            f"{row['component']}: L∞ {row['linf']:.1e}, {100 * row['bit_identical']:.0f} %"
            " bit-identical",
            file=sys.stderr,
            flush=True,
        )
    if failed:
        print(f"not within their limits: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
