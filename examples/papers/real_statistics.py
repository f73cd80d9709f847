"""The numbers of the page on a pretrained model, from the results of all prompts: shares with
intervals, quantiles, and what they depend on; then the changes themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from real_fidelity import REPLAYS, RUNS, Arrays

QUARTILES = (0.25, 0.5, 0.75)
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


def measured(results: Named) -> list[str]:
    """The runs of at least one prompt."""
    return [run for run in RUNS if any(f"{run}/linf" in arrays for arrays in results.values())]


def share(results: Named, key: str) -> dict[str, Any]:
    """The share of tokens for which something holds, with its interval."""
    prompts = [arrays[key] for arrays in results.values() if key in arrays]
    return {
        "share": float(np.concatenate(prompts).mean()),
        "interval": interval(prompts, np.mean),
    }


def quantiles(values: np.ndarray) -> list[float]:
    """The median, 90 % and 99 % of the values, and the largest."""
    return np.quantile(values, (0.5, 0.9, 0.99, 1.0)).tolist()


def joined(results: Named, key: str) -> np.ndarray:
    """One array of all prompts that have it, token after token."""
    return np.concatenate([arrays[key] for arrays in results.values() if key in arrays], -1)


def by_row(values: np.ndarray, of: Sequence[float] = QUARTILES) -> list[list[float]]:
    """Quantiles of each row."""
    return np.quantile(values, of, axis=1).T.tolist()


def agreement(results: Named) -> dict[str, Any]:
    """Every run: prompts, tokens, the shares of equal tokens and equal bits, and the errors."""
    return {
        run: {
            "prompts": sum(f"{run}/linf" in arrays for arrays in results.values()),
            "tokens": len(linf := joined(results, f"{run}/linf")),
            "match": share(results, f"{run}/match"),
            "identical": share(results, f"{run}/identical"),
            "linf": quantiles(linf),
            "tvd": quantiles(joined(results, f"{run}/tvd")),
        }
        for run in measured(results)
    }


def by_block(results: Named) -> dict[str, Any]:
    """Median and 90 % quantile of each block's relative error over all tokens."""
    return {run: by_row(joined(results, f"{run}/blocks"), (0.5, 0.9)) for run in measured(results)}


def scales(results: Named) -> dict[str, Any]:
    """By run and block, over all tokens: the median and 90 % quantile of ``max_k |m'_k| / RMS(m)``;
    the channel k that is it most often, with its share of the tokens; and the median number of
    channels that hold 90 % of ``‖m' - m‖²``. Empty if no block ends in a scale.
    """
    found = {}
    for run in REPLAYS:
        if not any(f"{run}/scale/largest" in arrays for arrays in results.values()):
            continue
        largest, channel, channels = (
            joined(results, f"{run}/scale/{key}") for key in ("largest", "channel", "channels")
        )
        counts = [np.bincount(row.astype(int)) for row in channel]
        found[run] = {
            "largest": by_row(largest, (0.5, 0.9)),
            "channel": [int(x.argmax()) for x in counts],
            "share": [float(x.max() / x.sum()) for x in counts],
            "channels": [float(x) for x in np.median(channels, 1)],
        }
    return found


def by_length(results: Mapping[int, Named]) -> dict[str, Any]:
    """Agreement and L∞ by the context's length."""
    return {
        run: [
            {
                "length": length,
                "tokens": len(joined(named, f"{run}/match")),
                "match": float(joined(named, f"{run}/match").mean()),
                "identical": float(joined(named, f"{run}/identical").mean()),
                "linf": np.quantile(joined(named, f"{run}/linf"), [0.5, 0.9, 1]).tolist(),
            }
            for length, named in results.items()
            if run in measured(named)
        ]
        for run in RUNS
    }


def lost(results: Named, run: str) -> dict[str, Any]:
    """The tokens that a run loses, and how close the two most likely ones are there."""
    match, margin, linf = (
        joined(results, key) for key in (f"{run}/match", "margin", f"{run}/linf")
    )
    gone = ~match
    return {
        "tokens": int(gone.sum()),
        "margin": float(np.median(margin[gone])) if gone.any() else None,
        "margin_of_all": float(np.median(margin)),
        "linf": float(np.median(linf[gone])) if gone.any() else None,
    }


def same_updates(results: Named) -> bool:
    """Whether stable and direct have the same errors at every token."""
    keys = ("match", "linf", "blocks")
    return all(
        np.array_equal(x[f"stable/{key}"], x[f"direct/{key}"])
        for x in results.values()
        for key in keys
    )


def control(results: Named) -> dict[str, Any]:
    """Pairs of a block and a token, and how many are not controllable, or missed by exact."""
    keys = ("not input-controllable", "not output-controllable", "misses")
    return {
        run: {
            "pairs": joined(results, f"{run}/{keys[0]}").size,
            **{key: int(joined(results, f"{run}/{key}").sum()) for key in keys},
        }
        for run in REPLAYS
        if run in measured(results)
    }


def sizes(results: Named, weights: Mapping[str, float], run: str) -> dict[str, Any]:
    """``‖ΔW‖_F / ‖W‖_F`` by module and block: the quantiles 5, 50 and 95 % over all tokens."""
    found = {}
    for key in next(iter(results.values())):
        if not key.startswith(f"{run}/norm/"):
            continue
        module = key.removeprefix(f"{run}/norm/")
        own = np.array([x for name, x in weights.items() if name.endswith(f"{module}.weight")])
        every = joined(results, key) / own[:, None]
        found[module] = {
            "quantiles": by_row(every, (0.05, 0.5, 0.95)),
            "all": np.quantile(every, (0.05, 0.5, 0.95)).tolist(),
        }
    return found


def spanned(results: Named) -> dict[str, Any]:
    """Over the groups: tokens, and by module and block the medians of :func:`real_changes.spans`'
    numbers; ranks and directions as shares of the tokens.
    """
    tokens = np.array([x["tokens"] for x in results.values()])
    found: dict[str, Any] = {"groups": len(tokens), "tokens": quantiles(tokens)}
    for key in list(next(iter(results.values())))[1:]:
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
    return {
        "tasks": len(relative),
        "series": steps.shape[1],
        "steps": by_row(steps),
        "smaller": float((steps[2:] < steps[1:-1]).mean()),
        "right": right.mean(1).tolist(),
    }


def disturbed(results: Named) -> dict[str, Any]:
    """The growth of a disturbance by block: quartiles over all tokens."""
    return {name: by_row(joined(results, name)) for name in next(iter(results.values()))}
