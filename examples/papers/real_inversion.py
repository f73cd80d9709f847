"""Check the inversion of RMSNorm on the scales and rows of a real model, beside 80-bit numbers.

    python examples/papers/real_inversion.py FOLDER  # docs/data/real-inversion.json

FOLDER holds a model whose blocks end in a norm's scale, as Gemma's. The rows are those that the
stable update inverts, at every block and at 1,000 tokens of the papers' texts: twice, as Appendix B
reads, with the scales that the model has; and with the smallest ones raised, as the update does it.
tools/readme.py writes the table in docs/kernels.md. The processor must have 80-bit numbers.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from real_prompts import long_text
from torch import Tensor

from icl_patch import ContextPatcher, ops
from icl_patch.bench.results import environment
from icl_patch.evaluation.loading import load_model
from icl_patch.ops import InversionStatus
from icl_patch.ops.stable_update import floor_scale

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "data" / "real-inversion.json"
CONTEXT, KEPT, TEXTS = 100, 125, 8
STEPS = 120  # of a bisection between numbers that are 2⁹⁰⁰ apart, until 64 bits are certain
Wide = np.ndarray[Any, np.dtype[np.longdouble]]


class Rows(NamedTuple):
    """The inputs of ``ops.stable_scale`` at one block: (M, d), (d,) and (M, d), and the eps."""

    delta: Tensor
    scale: Tensor
    hidden_down: Tensor
    eps: float


@contextmanager
def observed() -> Iterator[list[Rows]]:
    """Within this context the inputs of the stable updates, in the order of the blocks."""
    found, own = [], ops.stable_scale

    def observing(delta: Tensor, scale: Tensor, hidden: Tensor, eps: float = 0.0) -> Any:
        found.append(Rows(delta.clone(), scale.clone(), hidden.clone(), eps))
        return own(delta, scale, hidden, eps)

    ops.stable_scale = observing
    try:
        yield found
    finally:
        ops.stable_scale = own


def rows_of(folder: Path) -> list[Rows]:
    """The rows of every block."""
    model, tokenizer = load_model(folder, dtype=torch.float32)
    encoded: Any = tokenizer(long_text(), return_tensors="pt")
    ids, parts = encoded.input_ids, []
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        for part in ids[:, 1:].split(CONTEXT + KEPT, 1)[:TEXTS]:
            context = torch.cat([ids[:, :1], part[:, :CONTEXT]], 1)
            with observed() as found:
                patcher.compute(context, part[:, CONTEXT:])
            parts.append(found)
    return [
        Rows(
            torch.cat([part.delta for part in block]),
            block[0].scale,
            torch.cat([part.hidden_down for part in block]),
            block[0].eps,
        )
        for block in zip(*parts, strict=True)
    ]


def reference(target: Tensor, scale: Tensor, rms: Tensor, eps: float) -> tuple[Wide, np.ndarray]:
    """``y √(C² + eps)`` in 80 bits (M, d), and which rows (M,) have a root of the secular equation;
    the others' numbers mean nothing.
    """
    g, m, c = (x.double().numpy().astype(np.longdouble) for x in (target, scale, rms))
    m = np.broadcast_to(m, g.shape)
    a, norm2 = np.abs(m), g.shape[1] * c**2 / (c**2 + np.longdouble(eps))
    smallest = a.min(1, keepdims=True)
    e, p = (a - smallest) * (a + smallest), a * np.abs(g)
    at_pole = np.where((e == 0) & (p > 0), np.inf, 0).max(1) > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        at_zero = np.where(p > 0, (p / e) ** 2, 0).sum(1)
    has_root = at_pole | (at_zero > norm2)
    high = np.sqrt((p**2).sum(1) / norm2) * (1 + np.longdouble(2) ** -50)
    low = high * np.longdouble(2) ** -900
    for _ in range(STEPS):
        middle = np.sqrt(low) * np.sqrt(high)
        left = ((p / (e + middle[:, None])) ** 2).sum(1) > norm2
        low, high = np.where(left, middle, low), np.where(left, high, middle)
    y = np.sign(m) * np.sign(g) * p / (e + high[:, None])
    return y * np.sqrt(c**2 + np.longdouble(eps))[:, None], has_root


def errors(found: Tensor, expected: Wide, rows: np.ndarray) -> float:
    """The largest error of an element, relative to the root mean square of its row."""
    own = found.double().numpy().astype(np.longdouble)
    size = np.sqrt((expected**2).mean(1, keepdims=True))
    return float((np.abs(own - expected) / size)[rows].max(initial=0))


def measure(rows: Rows) -> dict[str, Any]:
    """The numbers of a block."""
    h, m = rows.hidden_down.double(), rows.scale.double()
    square = h.square().mean(1)
    g = rows.delta.double() + m * h / (square + rows.eps).sqrt()[:, None]
    floored, rms = floor_scale(m, g), square.sqrt()
    about: dict[str, Any] = {
        "rows": len(g),
        "smallest": float(m.abs().min()),
        "largest": float(m.abs().max()),
        "zeros": int((m == 0).sum()),
        "raised": int((floored[0] != m).sum()),
        "channels": len(m),
    }
    for name, scale in (("own", m.expand(g.shape)), ("raised", floored)):
        inverse = ops.invert_rmsnorm(g, scale, rms, rows.eps, h)
        narrow = [x.float() for x in (g, scale, rms)]
        single = ops.invert_rmsnorm(*narrow, rows.eps, h.float())
        expected, has_root = reference(g, scale, rms, rows.eps)
        of_single, same = reference(*narrow, rows.eps)
        counts = Counter(InversionStatus(x).name for x in inverse.status.tolist())
        left = inverse.new_scale * (inverse.hidden / (square + rows.eps).sqrt()[:, None]) - g
        about[f"{name} scale"] = {
            "status": dict(counts),
            "without a root": int((~has_root).sum()),
            "error": errors(inverse.hidden, expected, has_root),
            "error of fp32": errors(single.hidden, of_single, same),
            "left over": float((left.abs().amax(1) / g.abs().amax(1)).max()),
            "evaluations": float(inverse.evaluations.double().mean()),
        }
    return about


def main() -> None:
    """Write the numbers of all blocks."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    assert np.finfo(np.longdouble).nmant >= 63, "expected a processor with 80-bit numbers"
    blocks = [measure(rows) for rows in rows_of(folder)]
    machine = environment(torch.device("cpu"))
    content = {"model": folder.resolve().name, "machine": machine, "blocks": blocks}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
