"""Threads that use one attached model at the same time, each result compared with what one thread
alone gets.
"""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.random_models import tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics

Job = Callable[[], Tensor]
CONTEXT, KEPT = tokens(0, 2, 6), tokens(1, 2, 3)
_NEAR = 1e-5  # rounding; what two threads mix up is off by tenths


def jobs_of(patcher: ContextPatcher) -> dict[str, Job]:
    """What a thread may do with a patcher and its model, by name; each gives logits."""
    model: Any = patcher.model
    patches = {seed: patcher.compute(tokens(seed, 2, 6), tokens(seed + 1, 2, 3)) for seed in (0, 2)}

    def computed(seed: int) -> Tensor:
        patch = patcher.compute(tokens(seed, 2, 6), tokens(seed + 1, 2, 3))
        for mine, theirs in zip(patch.layers, patches[seed].layers, strict=True):
            assert all(near(factor, theirs[name]) for name, factor in mine.items())
        return patch.logits

    def called(part: nn.Module) -> Tensor:
        with torch.no_grad():
            out = part(tokens(4, 3, 7))
        return out.logits if part is model else out.last_hidden_state

    def generated(**arguments: Any) -> Tensor:
        steps = patcher.generate(CONTEXT, max_new_tokens=2, eos_token_id=None, **arguments)
        return torch.cat([step.logits for step in steps])

    jobs: dict[str, Job] = {f"compute {seed}": lambda seed=seed: computed(seed) for seed in patches}
    jobs |= {
        f"forward {seed}": lambda patch=patch: patcher.forward(patch.kept_ids, patch)
        for seed, patch in patches.items()
    }
    jobs |= {
        "model": lambda: called(model),
        "base model": lambda: called(model.base_model),
        "generate": generated,
    }
    jobs["an MLP"] = lambda: mlp_of(model)(torch.ones(2, 3, model.config.hidden_size) / 7)
    if patcher.update == "stable":
        jobs["generate, fast"] = lambda: generated(mode="shared_cache")
    return jobs


def mlp_of(model: Any) -> Callable[[Tensor], Tensor]:
    """An MLP of the model without gradients: beneath the model, where no call waits for a pass."""
    return torch.no_grad()(model.model.layers[1].mlp)


def near(found: Tensor, expected: Tensor) -> bool:
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return found.shape == expected.shape and bool(
        metrics.linf(found.double(), expected.double()).max() <= _NEAR
    )


@contextmanager
def often_switching() -> Iterator[None]:
    """Within this context Python goes from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def hammer(patcher: ContextPatcher, calls: int, threads: int = 2) -> Counter[str]:
    """How often each job was wrong in ``calls`` of each thread, chosen at random; an exception
    counts by its type and text.
    """
    jobs = jobs_of(patcher)
    expected = {name: job() for name, job in jobs.items()}
    wrong: Counter[str] = Counter()

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(calls):
            name = choose.choice(list(jobs))
            try:
                if not near(jobs[name](), expected[name]):
                    wrong[name] += 1
            except Exception as error:
                wrong[f"{name}: {type(error).__name__}: {error}"[:200]] += 1

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    with often_switching():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return wrong
