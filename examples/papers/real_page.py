"""The page on a pretrained model: ``real_model_notes.md`` with every number from the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure_page import wrapped
from goldwaser_experiments import LAZY
from goldwaser_pictures import DTYPES, PAPER
from real_fidelity import KEPT, NOISE, RUNS

from icl_patch.evaluation.report import format_value, percent
from icl_patch.evaluation.report import markdown as table

NOTES = Path(__file__).with_name("real_model_notes.md")
PAGE = "real-model.md"
LOW = "bfloat16"
"""The dtype of the sentences about rounding."""


def write_page(folder: Path, numbers: dict[str, Any]) -> None:
    """Write the page; the conclusions about a model stand in a file with its name."""
    conclusions = NOTES.with_name(f"real_model_{numbers['model']}.md")
    about = conclusions.read_text(encoding="utf-8") if conclusions.exists() else ""
    notes = NOTES.read_text(encoding="utf-8").replace("{conclusions}", about)
    (folder / PAGE).write_text(wrapped(notes.format(**values(numbers))), encoding="utf-8")


def values(numbers: dict[str, Any]) -> dict[str, str]:
    """The texts that stand in the notes' braces."""
    config = numbers["config"]
    return {
        "model": numbers["model"],
        "low": DTYPES[LOW if LOW in numbers["agreement"] else next(iter(numbers["agreement"]))],
        "family": config["model_type"],
        "layers": str(config["num_hidden_layers"]),
        "width": str(config["hidden_size"]),
        "device": numbers["environment"]["device"],
        "torch": numbers["environment"]["torch"],
        "texts": _texts(numbers),
        "agreement": _agreement(numbers),
        "paper": _paper(numbers),
        **_agreeing(numbers),
        **_errors(numbers),
        **_protocol(numbers),
        **_changes(numbers),
        **_growth(numbers),
        **_control(numbers),
    }


def _texts(numbers: dict[str, Any]) -> str:
    """How many prompts there are, of which kinds, and how long they are."""
    kinds = numbers["prompts"]
    shares = ", ".join(f"{entry['prompts']} {kind}" for kind, entry in kinds.items())
    kept = sum(entry["kept_tokens"] for entry in kinds.values())
    lengths = [length for entry in kinds.values() for length in entry["context_tokens"]]
    return (
        f"{shares} prompts have contexts of {min(lengths)} to {max(lengths)} tokens, and {kept}"
        " kept tokens."
    )


def _interval(entry: dict[str, Any]) -> str:
    """``99.1 % (98.6 to 99.5)``."""
    low, high = (f"{100 * x:.2f}".rstrip("0").rstrip(".") for x in entry["interval"])
    return percent(entry["share"]) + ("" if low == high else f" ({low} to {high})")


def runs_shown(numbers: dict[str, Any]) -> list[str]:
    """All but direct where it has the errors of stable, because no norm's scale writes."""
    return [run for run in RUNS if run != "direct" or not numbers["direct_is_stable"]]


def _agreement(numbers: dict[str, Any]) -> str:
    rows = []
    for dtype, found in numbers["agreement"].items():
        if dtype == "float16":
            continue
        for run in runs_shown(numbers):
            entry = found[run]
            if run in NOISE and entry["identical"]["share"] == 1:
                continue  # the model has the same bits
            errors = [format_value(entry["linf"][i]) for i in (0, 3)]
            rows.append(
                [
                    DTYPES[dtype],
                    f"the model, {run}" if run in NOISE else run,
                    _interval(entry["match"]),
                    percent(entry["identical"]["share"]),
                    *errors,
                ]
            )
    columns = ["dtype", "run", "same token", "identical logits", "L∞: median", "largest"]
    return table(columns, rows)


def _paper(numbers: dict[str, Any]) -> str:
    """The paper's shares in the dtypes that were measured."""
    claims = [
        f"{claim} % of the tokens in {DTYPES[dtype]} with the {update} update"
        for (dtype, update), claim in PAPER.items()
        if dtype in numbers["agreement"]
    ]
    return f"The paper's Gemma 3 1B keeps {' and '.join(claims)}." if claims else ""


def _low(numbers: dict[str, Any], key: str) -> Any:
    found = numbers[key]
    return found.get(LOW, next(iter(found.values())))


def _agreeing(numbers: dict[str, Any]) -> dict[str, str]:
    found, lost = numbers["agreement"], _low(numbers, "lost")
    low = _low(numbers, "agreement")
    exact = [entry["exact"] for entry in found.values()]
    identical = sum(round(x["identical"]["share"] * x["tokens"]) for x in exact)
    return {
        "exact_tokens": str(sum(x["tokens"] for x in exact)),
        "exact_identical": str(identical),
        "rule_of_three": _rule_of_three(exact[0]["prompts"]),
        "low_stable": _interval(low["stable"]["match"]),
        "low_kept": _interval(low[KEPT]["match"]),
        "low_no_cache": _interval(low["no cache"]["match"]),
        "low_worst": format_value(low["stable"]["linf"][3]),
        "low_worst_kept": format_value(low[KEPT]["linf"][3]),
        "low_worst_no_cache": format_value(low["no cache"]["linf"][3]),
        "lost": str(lost["stable"]["tokens"]),
        "lost_tokens": str(low["stable"]["tokens"]),
        "lost_too": str(lost["stable"]["lost_by_the_model_too"]),
        "lost_by_the_model": str(lost["stable"]["lost_by_the_model"]),
        "lost_margin": format_value(lost["stable"]["margin"]),
        "margin": format_value(lost["stable"]["margin_of_all"]),
        "lost_linf": format_value(lost["stable"]["linf"]),
    }


def _rule_of_three(prompts: int) -> str:
    if prompts <= 3:
        return ""
    return (
        f"No exception among {prompts} prompts means, at 95 %, that at least"
        f" {percent(1 - 3 / prompts)} of such prompts are without one (the rule of three)."
    )


def _errors(numbers: dict[str, Any]) -> dict[str, str]:
    growth = numbers["disturbed"]
    lengths = _low(numbers, "by_length")
    ends = {name: f"{values[-1][1]:.2g}" for name, values in growth.items()}
    alike = _low(numbers, "rounded_alike")
    return {
        "alike_share": percent(alike["share"]),
        "alike_match": percent(alike["match"]),
        "unlike_match": percent(alike["others_match"]),
        "attention": percent(numbers["attention"]["mean"]),
        "grown_context": ends["with its context"],
        "grown_replayed": ends["replayed"],
        "disturbance": table(
            ["run", "25 %", "median", "75 %"],
            [[name, *(f"{x:.2g}" for x in rows[-1])] for name, rows in growth.items()],
        ),
        "shortest": str(lengths["stable"][0]["length"]),
        "longest": str(lengths["stable"][-1]["length"]),
        **{
            f"{end}_{_word(run)}": percent(entries[place]["match"])
            for run, entries in lengths.items()
            for end, place in (("shortest", 0), ("longest", -1))
        },
    }


def _word(run: str) -> str:
    """A run's name as a part of a placeholder's."""
    return "kept" if run == KEPT else run.replace(" ", "_").replace("-", "_")


def _protocol(numbers: dict[str, Any]) -> dict[str, str]:
    found = numbers["protocol"]
    curves = [
        [
            curve["update"],
            "first token kept" if curve["kept"] else "all absorbed",
            curve["held"],
            *(_of_protocol(x["curves"][place]) for x in found.values()),
        ]
        for place, curve in enumerate(next(iter(found.values()))["curves"])
    ]
    itself = [_of_protocol(x["one_pass"]) for x in found.values()]
    rows = [*curves, ["no patch", "", "the model in one pass", *itself]]
    first = next(iter(numbers["protocol"].values()))
    low = _low(numbers, "protocol")
    merged = {
        curve["kept"]: percent(curve["match"]) for curve in low["curves"] if curve["held"] != LAZY
    }
    columns = ["update", "context", "held", *(DTYPES[dtype] for dtype in found)]
    return {
        "protocol": table(columns, rows),
        "protocol_generations": str(first["generations"]),
        "merged_absorbed": merged[0],
        "merged_kept": merged[1],
    }


def _of_protocol(entry: dict[str, Any]) -> str:
    """The share of equal tokens, and the largest L∞."""
    return f"{percent(entry['match'])}; {format_value(entry['linf'][3])}"


def _changes(numbers: dict[str, Any]) -> dict[str, str]:
    rows, spans = [], numbers["spanned"]
    for run, prefix, name in (("exact", "0", "all absorbed"), (KEPT, "1", "first token kept")):
        for module, entry in numbers["sizes"][run].items():
            low, middle, high = entry["all"]
            directions = spans[prefix][f"{module}/directions per token"]
            shares = [percent(_mean([row[i] for row in directions])) for i in (0, 1)]
            mean = percent(_mean(spans[prefix][f"{module}/mean"]))
            sizes = [percent(x) for x in (low, middle, high)]
            rows.append([name, f"`{module}`", *sizes, *shares, mean])
    columns = ["context", "module", "‖ΔW‖/‖W‖: 5 %", "median", "95 %", "directions: 50 %"]
    found = spans["0"]
    ranks = [min(x) for name, x in found.items() if name.endswith("/rank per token")]
    return {
        "changes": table([*columns, "90 %", "the mean holds"], rows),
        "span_groups": str(found["groups"]),
        "span_tokens": f"{found['tokens'][0]:g}",
        "lowest_rank": percent(min(ranks)),
        "writer": list(numbers["sizes"]["exact"])[-1],
        "size_ratio": f"{_ratio_of_sizes(numbers):.2g}",
    }


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found)


def _ratio_of_sizes(numbers: dict[str, Any]) -> float:
    """How many times larger the last module's changes are if all is absorbed: median of blocks."""
    module = list(numbers["sizes"]["exact"])[-1]
    pairs = zip(
        *(numbers["sizes"][run][module]["quantiles"] for run in ("exact", KEPT)), strict=True
    )
    ratios = sorted(one[1] / other[1] for one, other in pairs)
    return ratios[len(ratios) // 2]


def _growth(numbers: dict[str, Any]) -> dict[str, str]:
    found, entries = {}, numbers["grown"]
    first = entries["right"]
    count = len(first["steps"])
    lines = [k for k in range(count + 1) if k & (k - 1) == 0]  # 0 and the powers of two
    rows = []
    for how, entry in entries.items():
        found[f"{how}_smaller"] = percent(entry["smaller"])
        steps = ["", *(f"{row[1]:.2f}" for row in entry["steps"])]
        rows.append([f"step of line k, {how} answers (median)", *(steps[k] for k in lines)])
        right = [f"{entry['right'][k]:.2f}" for k in lines]
        rows.append([f"probability of the right answer, {how}", *right])
    low, high = (percent(x) for x in first["smaller_by_task"])
    return found | {
        "growth": table(["lines", *map(str, lines)], rows),
        "grown_tasks": str(first["tasks"]),
        "grown_pairs": str(count),
        "grown_series": str(first["series"]),
        "smaller_by_task": f"{low} to {high}",
    }


def _control(numbers: dict[str, Any]) -> dict[str, str]:
    found = [entry for runs in numbers["control"].values() for entry in runs.values()]
    sums = {key: str(sum(entry[key] for entry in found)) for key in list(found[0])[1:]}
    return {"pairs": str(found[0]["pairs"]), **{_word(key): x for key, x in sums.items()}}
