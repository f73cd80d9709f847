"""Figures 3 and 4 of Goldwaser et al. on pretrained models, by their protocol: one greedy answer,
token by token, of which each has a patch of its own that absorbs everything before it.

    python examples/papers/real_protocol.py FOLDER                      # to build/papers/NAME
    python examples/papers/real_protocol.py FOLDER --out docs/papers    # this repository's page
    python examples/papers/real_protocol.py --redraw --out docs/papers  # from its numbers
    python examples/papers/real_protocol.py FOLDER --quick              # few tokens

The page is on all models in ``--out``, each measured by a call of its own. Each generation is kept
in build/papers as soon as it is measured: a stopped run goes on. One thread on the CPU.
"""

import copy
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import goldwaser_experiments as goldwaser
import numpy as np
import torch
from goldwaser import COLOURS
from goldwaser_experiments import LAZY, LAZY_FACTORS, LAZY_SCALE, MERGED, VARIANTS
from matplotlib.figure import Figure
from pages import DTYPES, Numbers, Page, error_curves, legend, panels, parse
from real_fidelity import scales
from real_prompts import INSTRUCTIONS
from real_runs import Results
from real_statistics import Arrays, Named, interval, quantiles
from torch import Tensor

from icl_patch import ContextPatcher
from icl_patch.evaluation.baseline import BaselineRun, in_one_pass
from icl_patch.evaluation.loading import load_model
from icl_patch.models.block_detection import blocks_of
from icl_patch.models.block_spec import Writer
from icl_patch.models.forward import cache_name
from icl_patch.models.kv_cache import new_cache
from icl_patch.recording.algorithm_1 import algorithm_1

CLOSED = "merged block by block"
"""Algorithm 1: each weight is changed and rounded just before its module runs."""
NOISE = "the model in one pass"


@dataclass(frozen=True)
class Sizes:
    """How large the measurement is: generations by dtype, and their tokens."""

    generations: dict[str, int]
    tokens: int = 24


FULL = Sizes({"float32": 2, "bfloat16": 4})
QUICK = Sizes({"bfloat16": 1}, tokens=1)


def generation(model: Any, tokenizer: Any, text: str, count: int) -> Arrays:
    """One greedy generation of ``count`` tokens: match, L∞ and TVD of every token, (N, 3), by
    ``KEPT/UPDATE/HELD``, where the first KEPT tokens of the context stay; and of the unpatched
    model in one pass.
    """
    run, counted = goldwaser.untouched(
        model, tokenizer, [text], count, bool(tokenizer.chat_template)
    )
    tokens = [tokenizer.decode([token]) for token in run.tokens[counted].tolist()]
    noise = goldwaser.errors_of(in_one_pass(model, run), run.logits)
    found = {NOISE: noise}
    for kept in (0, 1):
        for update, held in ways(model).items():
            variants = {how: VARIANTS[how] for how in held if how in VARIANTS}
            errors = goldwaser.measure(model, update, run, variants, kept)
            if CLOSED in held:
                errors[CLOSED] = closed_loop(model, update, run, kept)
            found |= {f"{kept}/{update}/{how}": errors[how] for how in held}
    arrays = {key: x[counted].numpy() for key, x in found.items()}
    return {"tokens": np.array(tokens)} | arrays | new_scales(model, run)


def new_scales(model: Any, run: BaselineRun) -> Arrays:
    """How unequal the scales are that the updates give the blocks, see :func:`scales`, if the
    prompt is absorbed and the generated tokens are kept: ``scales/UPDATE/NAME`` (L, N). Nothing of
    a model without such blocks.
    """
    kept, found = torch.cat([run.ids[:, -1:], run.tokens[:, :-1]], 1), {}
    for update in ("stable", "direct"):
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(run.ids[:, :-1], kept)
        found |= {
            key.replace("scale", f"scales/{update}", 1): x for key, x in scales(patch).items()
        }
    return found


def ways(model: Any) -> dict[str, tuple[str, ...]]:
    """The updates of the model, and how their patches are held."""
    merged = (LAZY, LAZY_FACTORS, CLOSED, MERGED)
    if not any(block.spec.writer is Writer.SCALE for block in blocks_of(model)):
        return {"exact": (LAZY,), "stable": merged}
    every = (LAZY, LAZY_FACTORS, LAZY_SCALE, CLOSED, MERGED)
    return {"exact": (LAZY,), "stable": every, "direct": every}


@torch.no_grad()
def closed_loop(model: Any, update: str, run: BaselineRun, keep_first: int) -> Tensor:
    """Match, L∞ and TVD (1, N, 3) of the tokens of ``run`` by Algorithm 1; the first columns of the
    context stay.
    """
    cache, kept, blocks = new_cache(model), new_cache(model), blocks_of(model)
    model(run.ids[:, :-1], **{cache_name(model): cache})
    if keep_first:
        model(run.ids[:, :keep_first], **{cache_name(model): kept})
    current, errors = torch.cat([run.ids[:, -1:], run.tokens[:, :-1]], 1), []
    start = run.ids.shape[1] - 1
    for step, (token, logits) in enumerate(
        zip(current.split(1, 1), run.logits.unbind(1), strict=True)
    ):
        position = torch.tensor([[start + step]])

        def patched(model: Any, token: Tensor = token, position: Tensor = position) -> Tensor:
            inputs: Any = {cache_name(model): copy.deepcopy(kept)}
            return model(token, position_ids=position, **inputs).logits[:, -1]

        def with_context(model: Any, token: Tensor = token) -> None:
            model(token, **{cache_name(model): cache})  # which holds it from now on

        with algorithm_1(model, blocks, with_context, patched, update) as found:
            errors.append(goldwaser.errors_of(found, logits))
    return torch.stack(errors, 1)


def measure(folder: Path, sizes: Sizes) -> Numbers:
    """The numbers of a model, of which each generation is measured where it is missing."""
    results_of, found = Results(folder, sizes), {}
    for dtype, count in sizes.generations.items():
        texts = {str(i): text for i, text in enumerate(INSTRUCTIONS[:count])}
        results = results_of.stage(
            f"protocol-{dtype}",
            texts,
            lambda dtype=dtype: nullcontext(load_model(folder, None, getattr(torch, dtype))),
            lambda loaded, text: generation(*loaded, text, sizes.tokens),
        )
        found[dtype] = summary(results)
    return {"model": folder.resolve().name, "sizes_of_run": asdict(sizes), "dtypes": found}


def summary(results: Named) -> Numbers:
    """The tokens that agree, with the interval, L∞ and TVD of each way; the first generation, token
    by token.
    """
    first = next(iter(results.values()))
    ways = [key for key in first if key != "tokens" and not key.startswith("scales")]
    sizes = {
        "/".join(key.split("/")[1:]): np.median(first[key], 1).tolist()
        for key in first
        if key.startswith("scales") and not key.endswith("channel")
    }
    return {
        "generations": len(results),
        "text": first["tokens"].tolist(),
        "scales": sizes,
        "curves": [curve_of(key, [x[key] for x in results.values()]) for key in ways],
    }


def curve_of(key: str, prompts: Sequence[np.ndarray]) -> Numbers:
    """One way's numbers, of match, L∞ and TVD (N, 3) of each prompt. A single prompt's interval is
    by resampling its tokens.
    """
    kept, update, held = key.split("/") if "/" in key else ("", "", key)
    parts = prompts if len(prompts) > 1 else np.split(prompts[0], len(prompts[0]))
    match, linf, tvd = np.concatenate(prompts).T
    return {
        "kept": kept,
        "update": update,
        "held": held,
        "tokens": len(match),
        "share": float(match.mean()),
        "interval": interval([x[:, 0] for x in parts], np.mean),
        "linf": quantiles(linf),
        "tvd": float(tvd.mean()),
        "tvd_interval": interval([x[:, 2] for x in parts], np.mean),
        "first": prompts[0].tolist(),
    }


STYLES = {LAZY: "-", CLOSED: "--", MERGED: ":", NOISE: "-."}


MEASURES = ("L∞ / max |logit|", "TVD")


def figure(numbers: Numbers) -> Figure:
    """Figure 3: L∞ and TVD of the first generation, token by token, with nothing kept."""
    cells = []
    for dtype, found in numbers["dtypes"].items():
        shown = [x for x in found["curves"] if x["held"] in STYLES and x["kept"] != "1"]
        shown = [x for x in shown if x["first"]]
        for place, name in enumerate(MEASURES, 1):
            # the committed numbers of SmolLM2 have no TVD in most ways
            own = [
                (list(zip(*x["first"], strict=True)), x)
                for x in shown
                if place == 1 or x["tvd"] is not None
            ]
            curves = [(errors[place], errors[0], style(x)) for errors, x in own]
            cells.append((dtype, found["text"], name, curves))
    cells = [cell for cell in cells if cell[-1]]
    drawn, axes = panels(len(cells), 1, (13, 1.2 + 2.7 * len(cells)))
    for axis, (dtype, text, name, curves) in zip(axes[:, 0], cells, strict=True):
        error_curves(axis, dtype, text, curves)
        axis.set_ylabel(f"{DTYPES[dtype]}: {name}")
    legend(drawn, axes[0, 0], 4)
    return drawn


def style(curve: Numbers) -> Numbers:
    """How a curve is drawn."""
    held = {CLOSED: ", block by block", MERGED: ", merged at once"}.get(curve["held"], "")
    return {
        "color": COLOURS.get(curve["update"], "0.5"),
        "label": curve["update"] + held if curve["update"] else NOISE,
        "linestyle": STYLES[curve["held"]],
    }


def page(out: Path, *further: str) -> Page:
    """The page on the models whose numbers are in a folder, and on further ones."""
    found = {path.stem for path in out.glob("protocol-*.json")} | {*further}
    names = sorted(found, key=str.lower)
    return Page("figures-3-and-4", names, dict.fromkeys(names, figure))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write numbers, pictures and page."""
    options = parse("Figures 3 and 4 of Goldwaser et al.", arguments, of_model=True)
    name = () if options.redraw else (f"protocol-{options.folder.resolve().name}",)
    sizes = QUICK if options.quick else FULL
    page(options.out, *name).run(options, lambda _: measure(options.folder, sizes), only=name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
