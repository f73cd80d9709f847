"""The experiments of both papers on a pretrained model in a folder: a page with its pictures.

    python examples/papers/real_experiments.py FOLDER                      # to build/papers/NAME
    python examples/papers/real_experiments.py FOLDER --out docs/papers    # this repository's page
    python examples/papers/real_experiments.py --redraw --out docs/papers  # from its numbers
    python examples/papers/real_experiments.py FOLDER --quick              # few prompts
    python examples/papers/real_experiments.py FOLDER --short --name gemma-3-270m --out docs/papers

``--short`` takes no fp16, fewer contexts of each length and fewer other measurements, but longer
answers: without chats, 5,000 tokens of replays. The folder holds a causal language model and its
tokenizer, as ``save_pretrained`` writes them. Each result is kept in build/papers as soon as it is
measured: a stopped run goes on. One thread on the CPU.
"""

import sys
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from pages import DTYPES, Numbers, Page, band, legend, panels, parser_of, read_options
from real_fidelity import KEPT, KEPT_DIRECT, NOISE, RUNS
from real_runs import FULL, QUICK, SHORT, Runs

COLOURS = {
    "exact": "#1b9e77",
    "stable": "#1f78b4",
    "direct": "#d95f02",
    KEPT: "#7570b3",
    KEPT_DIRECT: "#e7298a",
    "no cache": "0.55",
    "token by token": "0.35",
}


def dependence(numbers: Numbers) -> Figure:
    """Errors by block, and by the context's length."""
    scales, columns = numbers.get("scales", {}), len(numbers["by_block"])
    rows = 3 if any(scales.values()) else 2  # of blocks that end in a scale
    figure, axes = panels(rows, columns, (4.6 * columns, 3.7 * rows))
    for (top, bottom, *last), dtype in zip(axes.T, numbers["by_block"], strict=True):
        lengths = numbers["by_length"].get(dtype, {})
        for run in RUNS:
            same = run == "direct" and numbers["direct_is_stable"]
            if same or run not in numbers["by_block"][dtype]:
                continue
            # the noise has no place below: for most lengths it is 0, as the calls are the same
            of_length = [] if run in NOISE else lengths.get(run, [])
            for axis, x, values in (
                (top, None, numbers["by_block"][dtype][run]),
                (bottom, [x["length"] for x in of_length], [x["linf"][:2] for x in of_length]),
            ):
                if np.any(values):  # no line for exact zeros
                    both = [(middle, middle, high) for middle, high in values]
                    label = f"the model itself, {run}" if run in NOISE else run
                    band(axis, range(len(values)) if x is None else x, both, COLOURS[run], label)
        top.set(title=DTYPES[dtype], xlabel="block", yscale="log")
        top.locator_params("x", integer=True)
        bottom.set(xlabel="tokens of the context", yscale="log")
        bottom.set_xscale("log", base=2)
        bottom.xaxis.set_major_formatter("{x:g}")
        for axis in last:
            for run, found in scales[dtype].items():
                if run != "exact":  # stable, and then a little
                    both = [(middle, middle, high) for middle, high in found["largest"]]
                    band(axis, range(len(both)), both, COLOURS[run])
            axis.set(xlabel="block", yscale="log")
            axis.locator_params("x", integer=True)
    axes[0, 0].set_ylabel("relative error of the block's output")
    axes[1, 0].set_ylabel("L∞ / max |logit|")
    if rows == 3:
        axes[2, 0].set_ylabel("largest |m′| / RMS(m)")
    legend(figure, axes[0, 0], 2 * columns - 1)
    return figure


def sensitivity(numbers: Numbers) -> Figure:
    """The growth of a disturbance."""
    figure, ((axis,),) = panels(1, 1, (7.5, 4.4))
    colours = ("0.3", "0.65", COLOURS["exact"], COLOURS[KEPT])
    for (name, values), colour in zip(numbers["disturbed"].items(), colours, strict=True):
        band(axis, range(len(values)), values, colour, name)
    axis.set(yscale="log", xlabel="block", ylabel="disturbance, relative; 1 after block 0")
    axis.locator_params("x", integer=True)
    axis.legend(fontsize=9)
    return figure


def changes(numbers: Numbers) -> Figure:
    """Sizes of the changes by block, and the space that they span."""
    modules = list(numbers["sizes"]["exact"])
    size = (4.6 * len(modules), 7.6)
    figure, axes = panels(2, len(modules), size, sharey="row", sharex=True)
    for (top, bottom), module in zip(axes.T, modules, strict=True):
        for run, prefix, name in (("exact", "0", "all absorbed"), (KEPT, "1", "first token kept")):
            values = numbers["sizes"][run][module]["quantiles"]
            band(top, range(len(values)), values, COLOURS[run], name)
            directions = np.array(numbers["spanned"][prefix][f"{module}/directions per token"])
            for found, style, held in zip(directions.T, ":-", ("50 %", "90 %"), strict=False):
                label = f"{name}: {held}"
                bottom.plot(100 * found, style, color=COLOURS[run], label=label)
        top.set(yscale="log", title=module)
        bottom.set(xlabel="block", ylim=(0, 105))
        bottom.locator_params("x", integer=True)
    axes[0, 0].set_ylabel("‖ΔW‖ / ‖W‖: median, 5 to 95 % of tokens")
    axes[1, 0].set_ylabel("directions that hold 50 and 90 %\nof the squared norm, % of the tokens")
    axes[1, 0].legend(fontsize=9)
    legend(figure, axes[0, 0], 2)
    return figure


def growth(numbers: Numbers) -> Figure:
    """Steps of the weights, and the answers, as a few-shot context grows."""
    figure, ((left, right),) = panels(1, 2, (12, 4.4))
    colours = (COLOURS["exact"], "0.5")
    for (name, found), colour in zip(numbers["grown"].items(), colours, strict=True):
        label = f"{name} answers"
        band(left, range(1, len(found["steps"]) + 1), found["steps"], colour, label)
        right.plot(found["right"], color=colour, marker=".", label=label)
    left.set(yscale="log", ylabel="step / whole change, quartiles")
    right.set(ylim=(0, 1), ylabel="mean probability of the right answer")
    for axis in (left, right):
        axis.set_xlabel("pairs in the context")
        axis.legend()
    return figure


PICTURES = (dependence, sensitivity, changes, growth)


def page(name: str = "real-model") -> Page:
    """The page of this name, with its files."""
    pictures = {f"{name}-{draw.__name__}": draw for draw in PICTURES}
    return Page(name, (name,), pictures, template="real-model")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write numbers, pictures and page."""
    parser = parser_of("The papers' experiments on a pretrained model.", of_model=True)
    parser.add_argument("--short", action="store_true", help="no fp16, few contexts of each length")
    parser.add_argument("--name", default="real-model", help="of the page and its files")
    options = read_options(parser, arguments)
    sizes = QUICK if options.quick else SHORT if options.short else FULL
    page(options.name).run(options, lambda _: Runs(options.folder, sizes).numbers())
    return 0


if __name__ == "__main__":
    sys.exit(main())
