"""The numbers of the page on a pretrained model about the changes themselves: their sizes, spans
and growth; and the paper's protocol.
"""

from typing import Any

import numpy as np
from real_fidelity import Arrays
from real_protocol import CURVES
from real_statistics import Named, joined, of_key, quantiles


def sizes(results: Named, weights: Arrays, run: str) -> dict[str, Any]:
    """``‖ΔW‖_F / ‖W‖_F`` by module and block: the quantiles 5, 50 and 95 % over all tokens, and the
    median of each prompt's first kept token.
    """
    found = {}
    for key in next(iter(results.values())):
        if not key.startswith(f"{run}/norm/"):
            continue
        module = key.removeprefix(f"{run}/norm/")
        own = np.array([x for name, x in weights.items() if name.endswith(f"{module}.weight")])
        every = joined(results, key) / own[:, None]
        first = np.stack([x[:, 0] for x in of_key(results, key)], 1) / own[:, None]
        found[module] = {
            "quantiles": np.quantile(every, [0.05, 0.5, 0.95], axis=1).T.tolist(),
            "first": np.median(first, 1).tolist(),
            "all": np.quantile(every, [0.05, 0.5, 0.95]).tolist(),
        }
    return found


def spanned(results: Named) -> dict[str, Any]:
    """Over the groups: tokens, and by module and block the medians of :func:`real_changes.spans`'
    numbers; ranks and directions as shares of the tokens.
    """
    tokens = np.array([x["tokens"] for x in results.values()])
    found: dict[str, Any] = {"groups": len(tokens), "tokens": quantiles(tokens)}
    for key in next(iter(results.values())):
        if key == "tokens":
            continue
        values = np.stack([x[key] for x in results.values()])
        if not key.endswith("/mean"):
            key, values = f"{key} per token", values / tokens.reshape(-1, *[1] * (values.ndim - 1))
        found[key] = np.median(values, 0).tolist()
    return found


def grown(results: Named) -> dict[str, Any]:
    """Over tasks, questions and parameters: the steps relative to the whole change, quartiles by
    pair; how often a step is smaller than the one before; the right answer's probability.
    """
    relative = [x["steps"] / x["total"] for x in results.values()]
    steps = np.concatenate([x.reshape(len(x), -1) for x in relative], 1)
    right = np.concatenate([x["right"] for x in results.values()], 1)
    smaller = steps[2:] < steps[1:-1]
    by_task = [(x[2:] < x[1:-1]).mean() for x in relative]
    return {
        "tasks": len(relative),
        "series": steps.shape[1],
        "steps": np.quantile(steps, [0.25, 0.5, 0.75], axis=1).T.tolist(),
        "smaller": float(smaller.mean()),
        "smaller_by_task": [min(by_task).item(), max(by_task).item()],
        "right": right.mean(1).tolist(),
    }


def disturbed(results: Named) -> dict[str, Any]:
    """The growth of a disturbance by block: quartiles over all tokens."""
    return {
        name: np.quantile(joined(results, name), [0.25, 0.5, 0.75], axis=1).T.tolist()
        for name in next(iter(results.values()))
    }


def on_first(results: Named) -> dict[str, Any]:
    """The attention on the context's first token: by block, quartiles over all tokens, and the mean
    of all.
    """
    share = joined(results, "share")
    by_block = np.quantile(share, [0.25, 0.5, 0.75], axis=1).T.tolist()
    return {"by_block": by_block, "mean": float(share.mean())}


def own_protocol(results: Named) -> dict[str, Any]:
    """The paper's protocol: each curve's share of equal tokens, and both errors; and the first
    generation, token by token.
    """
    errors = np.concatenate([x["curves"] for x in results.values()], 1)
    one_pass = np.concatenate([x["one pass"] for x in results.values()])
    first = next(iter(results.values()))
    return {
        "tokens": errors.shape[1],
        "generations": len(results),
        "curves": [
            dict(zip(("update", "held", "kept"), curve, strict=True)) | _errors(found)
            for curve, found in zip(CURVES, errors, strict=True)
        ],
        "one_pass": _errors(one_pass),
        "first": {"tokens": first["tokens"].tolist(), "errors": first["curves"].tolist()},
    }


def _errors(found: np.ndarray) -> dict[str, Any]:
    match, linf, tvd = found.T
    return {"match": float(match.mean()), "linf": quantiles(linf), "tvd": quantiles(tvd)}
