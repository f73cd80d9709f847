"""Table 1 of Goldwaser et al., a row a component, measured on every family with blocks that are
made of it.

    python examples/papers/table_1.py              # all families, as in docs/papers
    python examples/papers/table_1.py --quick      # one family a row, seconds

Small random models in fp32 and bf16, contexts of two absorbed spans, a prefix, ragged rows. For
every model ``icl_patch.controllability`` says how many (block, token) pairs are input- and
output-controllable. One thread, fixed seeds.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pages import Page, parse

from icl_patch import ContextPatcher, controllability, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.models import kv_cache
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.recording import forward_passes
from icl_patch.recording.sequences import assemble
from icl_patch.tolerances import noise_limit


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


def families_of(row: Row) -> list[str]:
    """The tiny models that use a statement; those that take images are measured elsewhere."""
    return [
        name
        for name, entry in tiny_models.SUPPORTED.items()
        if row.statement in entry.lemmas.split(", ") and not entry.images
    ]


def controllable(name: str, update: str) -> tuple[float, float]:
    """The shares of (block, kept token) pairs of a family's model that are input- and
    output-controllable.
    """
    generator = torch.Generator().manual_seed(0)
    context, kept = (
        torch.randint(1, tiny_models.IMAGE_TOKEN - 2, (3, width), generator=generator)
        for width in (9, 5)
    )
    with ContextPatcher(tiny_models.build(name, 0), update) as patcher:
        blocks = controllability(patcher, context, kept)
    sides = zip(*((x.input_controllable, x.output_controllable) for x in blocks), strict=True)
    given, taken = (float(torch.stack(side).double().mean()) for side in sides)
    return given, taken


def sequences_of(ragged: bool, copies: int = 1) -> dict[str, Any]:
    """Three rows, each ``copies`` times: a prefix, ragged for models that take padding, a context
    with two absorbed spans, up to seven kept tokens.
    """
    generator = torch.Generator().manual_seed(0)
    prefix, context, kept = (
        torch.randint(1, tiny_models.IMAGE_TOKEN - 2, (3, width), generator=generator)
        for width in (5, 11, 7)
    )
    lengths = torch.tensor([[5, 7], [3, 5], [1, 3]] if ragged else [[5, 7], [5, 5], [5, 3]])
    rows = {
        "context_ids": torch.cat([prefix, context], 1),
        "context_mask": torch.arange(16).flip(0) < 11 + lengths[:, :1],
        "kept_ids": kept,
        "kept_mask": torch.arange(7) < lengths[:, 1:],
    }
    repeated = {name: x.repeat(copies, 1) for name, x in rows.items()}
    return {**repeated, "absorbed": [(5, 10), (13, 15)]}


@torch.no_grad()
def baseline(model: Any, ragged: bool, copies: int) -> torch.Tensor:
    """The unmodified model's logits of the kept tokens; token by token if it is recurrent."""
    sequences = assemble(**sequences_of(ragged, copies))
    cache, width = kv_cache.new_cache(model), sequences.ids.shape[1] - sequences.head
    forward_passes.run_head(model, sequences, cache)
    step = 1 if is_recurrent(model) else width
    parts = [slice(start, start + step) for start in range(0, width, step)]
    logits = [forward_passes.run_tail(model, sequences, cache, part) for part in parts]
    return torch.cat(logits, 1)[:3, sequences.kept_columns]


def replay(name: str, update: str, dtype: torch.dtype) -> dict[str, float]:
    """A replay beside the unmodified model: the noise floor, the largest error, and the share of
    bit-identical tokens.
    """
    with ContextPatcher(tiny_models.build(name, 0, dtype), update) as patcher:
        ragged = patcher.attached_model.takes_padding
        patch = patcher.compute(**sequences_of(ragged))
        logits, mask = patcher.forward(patch.kept_ids, patch), patch.kept_mask
    model = tiny_models.build(name, 0, dtype)
    reference, doubled = (baseline(model, ragged, copies) for copies in (1, 2))
    return {
        "noise_floor": float(metrics.linf(doubled, reference)[mask].max()),
        "linf": float(metrics.linf(logits, reference)[mask].max()),
        "identical": float(metrics.bit_identical(logits, reference)[mask].double().mean()),
    }


def measure(name: str) -> dict[str, Any]:
    """Of a family: the replays of all updates, and controllability."""
    direct, stable, exact = (
        replay(name, update, torch.float32) for update in ("direct", "stable", "exact")
    )
    exact_bf16 = replay(name, "exact", torch.bfloat16)
    return {
        "noise_floor": direct["noise_floor"],
        "direct": direct["linf"],
        "stable": stable["linf"],
        "exact_fp32": exact["identical"],
        "exact_bf16": exact_bf16["identical"],
        "controllable": {update: controllable(name, update) for update in ("direct", "stable")},
        "passed": max(direct["linf"], stable["linf"]) <= noise_limit(direct["noise_floor"])
        and exact["identical"] == exact_bf16["identical"] == 1.0,
    }


def table(quick: bool) -> dict[str, Any]:
    """All families, and each row over its own: the worst of each measure."""
    chosen = {row: [row.family] if quick else families_of(row) for row in ROWS}
    names = dict.fromkeys(name for own in chosen.values() for name in own)
    families = {name: measure(name) for name in names}
    rows = []
    for row, own in chosen.items():
        found = [families[name] for name in own]
        update = "stable" if row.statement == "B" else "direct"
        shares = zip(*(one["controllable"][update] for one in found), strict=True)
        taken, given = map(min, shares)
        rows.append(
            {
                "component": row.component,
                "statement": row.statement,
                "update": row.update,
                "families": own,
                "linf": max(one[update] for one in found),
                "noise_floor": max(one["noise_floor"] for one in found),
                "bit_identical": min(min(one["exact_fp32"], one["exact_bf16"]) for one in found),
                "input_controllable": taken,
                "output_controllable": given,
            }
        )
    return {"rows": rows, "families": families}


PAGE = Page("table-1", ("table-1",), {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every row."""
    options = parse("Table 1 of Goldwaser et al., on every family.", arguments)
    PAGE.run(options, lambda _: table(options.quick))
    families = PAGE.read(options.out)["table-1"]["families"]
    failed = [name for name, one in families.items() if not one["passed"]]
    if failed:
        print(f"not within their limits: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
