"""The numbers of the page on a pretrained model, from the results of all prompts: shares with
intervals, quantiles, and what they depend on; then the changes themselves and the paper's protocol.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from real_fidelity import NOISE, REPLAYS, RUNS, Arrays
from real_protocol import CURVES

QUANTILES = (0.5, 0.9, 0.99, 1.0)
PLACES = (0, 1, 4, 8, 16, 24, 32, 48)
"""Where bins of kept tokens begin, counted from the first."""
_RESAMPLED = 2000

Named = Mapping[str, Arrays]
"""Results by the name of their prompt."""


def interval(prompts: Sequence[np.ndarray], statistic: Callable[[np.ndarray], Any]) -> list[float]:
    """The 95 % interval of a statistic of all tokens, by resampling the prompts, whose tokens are
    alike.
    """
    rng = np.random.default_rng(0)
    values = [
        statistic(
            np.concatenate([prompts[i] for i in rng.integers(len(prompts), size=len(prompts))])
        )
        for _ in range(_RESAMPLED)
    ]
    return np.quantile(values, [0.025, 0.975]).tolist()


def share(prompts: Sequence[np.ndarray]) -> dict[str, Any]:
    """The share of tokens for which something holds, with its interval."""
    share = float(np.concatenate(prompts).mean())
    return {"share": share, "interval": interval(prompts, np.mean)}


def quantiles(values: np.ndarray) -> list[float]:
    """:data:`QUANTILES` of the values."""
    return np.quantile(values, QUANTILES).tolist()


def of_key(results: Named, key: str) -> list[np.ndarray]:
    """One array of every prompt that has it."""
    return [arrays[key] for arrays in results.values() if key in arrays]


def joined(results: Named, key: str) -> np.ndarray:
    """One array of all prompts, token after token."""
    return np.concatenate(of_key(results, key), -1)


def agreement(results: Named) -> dict[str, Any]:
    """Every run: tokens, prompts, the shares of equal tokens and equal bits, and both errors."""
    found = {}
    for run in RUNS:
        linf = of_key(results, f"{run}/linf")
        found[run] = {
            "prompts": len(linf),
            "tokens": sum(map(len, linf)),
            "match": share(of_key(results, f"{run}/match")),
            "identical": share(of_key(results, f"{run}/identical")),
            "linf": quantiles(np.concatenate(linf)),
            "tvd": quantiles(joined(results, f"{run}/tvd")),
        }
    return found


def by_place(results: Named) -> dict[str, Any]:
    """Median and 90 % quantile of L∞ by place among the kept tokens, and how many there are."""
    found: dict[str, Any] = {"from": [], "tokens": [], **{run: [] for run in RUNS}}
    for start, stop in zip(PLACES, (*PLACES[1:], None), strict=True):
        parts = {run: _places(results, run, start, stop) for run in RUNS}
        if not len(parts["exact"]):
            break
        found["from"].append(start)
        found["tokens"].append(len(parts["exact"]))
        for run, part in parts.items():
            found[run].append(np.quantile(part, [0.5, 0.9]).tolist() if len(part) else None)
    return found


def _places(results: Named, run: str, start: int, stop: int | None) -> np.ndarray:
    return np.concatenate([x[start:stop] for x in of_key(results, f"{run}/linf")])


def by_block(results: Named) -> dict[str, Any]:
    """Median and 90 % quantile of each block's relative error over all tokens."""
    return {
        run: np.quantile(joined(results, f"{run}/blocks"), [0.5, 0.9], axis=1).T.tolist()
        for run in RUNS
    }


def by_length(results: Mapping[int, Named]) -> dict[str, Any]:
    """Agreement and L∞ by the context's length."""
    return {
        run: [
            {
                "length": length,
                "tokens": len(linf := joined(named, f"{run}/linf")),
                "match": float(joined(named, f"{run}/match").mean()),
                "linf": np.quantile(linf, [0.5, 0.9, 1]).tolist(),
            }
            for length, named in results.items()
        ]
        for run in (*REPLAYS, *NOISE[:2])
    }


def lost(results: Named, run: str) -> dict[str, Any]:
    """The tokens that a run loses: how close the two most likely ones are there, and how many of
    them the model itself loses in other calls.
    """
    match, margin, linf = (
        joined(results, key) for key in (f"{run}/match", "margin", f"{run}/linf")
    )
    itself = np.concatenate(
        [~np.logical_and.reduce([x[f"{n}/match"] for n in NOISE[:2]]) for x in results.values()]
    )
    gone = ~match
    return {
        "tokens": int(gone.sum()),
        "margin": float(np.median(margin[gone])) if gone.any() else None,
        "margin_of_all": float(np.median(margin)),
        "linf": float(np.median(linf[gone])) if gone.any() else None,
        "lost_by_the_model_too": int((gone & itself).sum()),
        "lost_by_the_model": int(itself.sum()),
    }


def rounded_alike(results: Named, run: str, epsilon: float) -> dict[str, Any]:
    """The tokens with no block's relative error above one unit of rounding, which have met no other
    rounding than their recording: their share, and how many of them and of the others are the same.
    """
    alike = np.concatenate([x[f"{run}/blocks"].max(0) <= epsilon for x in results.values()])
    match = joined(results, f"{run}/match")
    return {
        "share": float(alike.mean()),
        "match": float(match[alike].mean()) if alike.any() else None,
        "others_match": float(match[~alike].mean()) if not alike.all() else None,
    }


def same_updates(results: Named) -> bool:
    """Whether stable and direct have the same errors at every token."""
    keys = ("match", "linf", "tvd", "blocks")
    return all(
        np.array_equal(x[f"stable/{key}"], x[f"direct/{key}"])
        for x in results.values()
        for key in keys
    )


def control(results: Named) -> dict[str, Any]:
    """Pairs of a block and a token, and how many are not controllable, or missed by exact."""
    keys = ("not input-controllable", "not output-controllable", "not taken up", "misses")
    return {
        run: {
            "pairs": sum(x[f"{run}/{keys[0]}"].size for x in results.values()),
            **{key: int(sum(x[f"{run}/{key}"].sum() for x in results.values())) for key in keys},
        }
        for run in REPLAYS
    }


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
            dict(zip(("update", "held", "kept"), curve, strict=True)) | _errors_of(found)
            for curve, found in zip(CURVES, errors, strict=True)
        ],
        "one_pass": _errors_of(one_pass),
        "first": {"tokens": first["tokens"].tolist(), "errors": first["curves"].tolist()},
    }


def _errors_of(found: np.ndarray) -> dict[str, Any]:
    match, linf, tvd = found.T
    return {"match": float(match.mean()), "linf": quantiles(linf), "tvd": quantiles(tvd)}
