"""The papers' Figure 3 as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from icl_patch.evaluation.report import visible_text
from icl_patch.evaluation.verify import VerifyReport


def plot(report: VerifyReport, tokens: Sequence[str], path: Path) -> None:
    """The papers' Figure 3: L∞ and TVD at every generated token of the first prompt, a red × where
    the tokens differ.

    Args:
        tokens: the text of each token, for the x axis.
        path: a file name ending in .png, .svg or .pdf.
    """
    steps = report.steps[: len(tokens)]
    positions = range(len(steps))
    figure = Figure(figsize=(max(6.4, 0.22 * len(steps) + 2), 6.0), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    panels = (("linf", "L∞ of logits / max |logit|"), ("tvd", "total variation distance"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        values, floor = [getattr(step, name) for step in steps], report.noise_floor[f"{name}_max"]
        axis.set_yscale("symlog", linthresh=1e-9)
        label_of_line = f"{report.update}, {report.dtype}"
        axis.plot(positions, values, "o-", markersize=4, linewidth=1.2, label=label_of_line)
        axis.axhline(floor, linestyle="--", linewidth=1, color="0.5", label="noise floor (max)")
        differing = [position for position in positions if not steps[position].match]
        if differing:
            crossed = [values[position] for position in differing]
            axis.plot(differing, crossed, "x", color="red", markersize=9, label="tokens differ")
        axis.set_ylim(bottom=-2e-10, top=10 * max(*values, floor, 1e-9))
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper left", bbox_to_anchor=(0, 1.2), ncols=3, frameon=False)
    names = [visible(token) for token in tokens]
    axes[1].set_xticks(positions, names, rotation=90, family="monospace", fontsize=8)
    axes[1].set_xlabel(f"generated tokens, {report.model}")
    figure.savefig(path, dpi=150)


def visible(token: str) -> str:
    """:func:`icl_patch.evaluation.report.visible_text` without what matplotlib reads as markup."""
    return visible_text(token).replace("$", r"\$")
