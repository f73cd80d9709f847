"""The paper's own protocol on a pretrained model: one token at a time, each with its own patch;
held as vectors, or merged into the weights.
"""

from typing import Any

import numpy as np
from goldwaser_experiments import LAZY, MERGED, VARIANTS, measure, untouched
from real_fidelity import Arrays

HELD = {"exact": (LAZY,), "stable": (LAZY, MERGED)}
"""The updates of the paper's protocol, and how their patches are held."""


CURVES = tuple(
    (update, how, keep) for keep in (0, 1) for update, held in HELD.items() for how in held
)
"""Update, how it is held, and how many of the context's first tokens stay."""


def protocol(model: Any, tokenizer: Any, text: str, count: int) -> Arrays:
    """One greedy generation of ``count`` tokens: match, L∞ and TVD of every token for each of
    :data:`CURVES`, (curves, N, 3); and of the unpatched model in one pass, (N, 3).
    """
    run = untouched(model, tokenizer, [text], count, bool(tokenizer.chat_template))
    found = {}
    for keep in (0, 1):
        for update, held in HELD.items():
            errors = measure(model, update, run, {how: VARIANTS[how] for how in held}, keep)
            found |= {(update, how, keep): errors[how].numpy() for how in held}
    tokens = [tokenizer.decode([token]) for token in run.tokens[run.counted].tolist()]
    return {
        "tokens": np.array(tokens),
        "curves": np.stack([found[curve] for curve in CURVES]),
        "one pass": run.at_once.numpy(),
    }
