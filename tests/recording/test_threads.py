"""Threads and tasks that share an attached model: they take turns, and a thread that ends in any
way leaves the others free.
"""

import gc
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.patchers import Snapshot, works
from support.random_models import build, shallow, tokens, two_layers
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics

Job = Callable[[], Tensor]
CONTEXT, KEPT = tokens(0, 2, 6), tokens(1, 2, 3)
# as many as there are kept tokens: no shape tells a replay from a call of the model
IDS = tokens(5, 2, 3)


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
    # an MLP without gradients: beneath the model, where no call waits for a pass
    mlp = torch.no_grad()(model.model.layers[1].mlp)
    jobs["an MLP"] = lambda: mlp(torch.ones(2, 3, model.config.hidden_size) / 7)
    if patcher.update == "stable":
        jobs["generate, fast"] = lambda: generated(mode="shared_cache")
    return jobs


def near(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding; what two threads mix up is off by tenths."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    error = metrics.linf(found.double(), expected.double())
    return found.shape == expected.shape and bool(error.max() <= 1e-5)


class Stopping(nn.Module):
    """SiLU, at which one thread can be made to stop: it says so, and goes on after a while or when
    it is told to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread: int | None = None
        self.stopped, self.go = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() == self.thread:
            self.thread = None
            self.stopped.set()
            self.go.wait(0.05)
            if self.error is not None:
                raise self.error
        return F.silu(x)

    def run(self, call: Callable[[], Any], error: BaseException | None = None) -> Any:
        """The call, which stops here the first time that it comes by, and goes on with an error."""
        self.thread, self.error = threading.get_ident(), error
        try:
            return call()
        finally:
            self.thread, self.error = None, None
            self.stopped.set()


def stopping_model() -> tuple[Any, Stopping]:
    model: Any = two_layers("llama")
    stop = Stopping()
    model.model.layers[1].mlp.act_fn = stop
    return model, stop


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def in_the_middle(
    pool: ThreadPoolExecutor, stop: Stopping, first: Callable[[], Any], second: Callable[[], Any]
) -> tuple[Any, Any]:
    """What two calls return, of which the second is made by another thread while the first is in
    the middle of the model.
    """
    stop.stopped.clear()
    stop.go.clear()
    one = pool.submit(stop.run, first)
    assert stop.stopped.wait(60)
    two = pool.submit(second)
    two.add_done_callback(lambda _: stop.go.set())
    return one.result(60), two.result(60)


# -- two at a time


@pytest.mark.parametrize("update", ["exact", "stable"])
def test_what_another_thread_does_in_the_middle_of_a_pass(
    update: str, pool: ThreadPoolExecutor
) -> None:
    """Each job while each other one is inside the model: the numbers are those of one thread
    alone.
    """
    model, stop = stopping_model()
    with ContextPatcher(model, update) as patcher, torch.no_grad():
        jobs = jobs_of(patcher)
        jobs["model"] = lambda: model(IDS).logits
        greedy = {"max_new_tokens": 2, "do_sample": False}
        jobs["generate of the model"] = lambda: model.generate(IDS, **greedy)
        expected = {name: job() for name, job in jobs.items()}
        names = ("compute 0", "forward 0", "generate", "model")
        for name in names if update == "exact" else names[::3]:
            for other, job in jobs.items():
                one, two = in_the_middle(pool, stop, jobs[name], job)
                assert near(one, expected[name]), (name, other)
                assert near(two, expected[other]), (name, other)


OF_THREADS = [("llama", "exact", 12), ("gemma3", "stable", 12)]
OF_THREADS += [
    pytest.param(family, update, 1000, marks=pytest.mark.stress)
    for family in ("llama", "gemma3")
    for update in ("exact", "stable")
]


@pytest.mark.parametrize(("family", "update", "calls"), OF_THREADS)
def test_two_threads_that_do_everything(
    family: str, update: str, calls: int, pool: ThreadPoolExecutor
) -> None:
    """In random order; Python goes from thread to thread as often as it can."""

    def wrong(seed: int) -> list[str]:
        choose, names = random.Random(seed), list(jobs)
        chosen = (choose.choice(names) for _ in range(calls))
        return [name for name in chosen if not near(jobs[name](), expected[name])]

    before = sys.getswitchinterval()
    with ContextPatcher(two_layers(family), update) as patcher:
        jobs = jobs_of(patcher)
        expected = {name: job() for name, job in jobs.items()}
        sys.setswitchinterval(1e-6)
        try:
            assert list(pool.map(wrong, range(2))) == [[], []]
        finally:
            sys.setswitchinterval(before)


@pytest.mark.parametrize("name", ["recurrent_gemma", "llama with dynamic RoPE"])
def test_a_model_that_keeps_a_state_in_its_modules(name: str, pool: ThreadPoolExecutor) -> None:
    """Recurrent states, and frequencies that depend on the longest sequence so far: neither is for
    two passes at a time.
    """
    if name == "recurrent_gemma":
        model: Any = shallow(name)
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model = two_layers("llama", max_position_embeddings=12, rope_parameters=rope)
    ids = tokens(3, 2, 30) % 32
    stop = Stopping()
    last = model.model.layers[-1]
    (last.mlp if hasattr(last, "mlp") else last.mlp_block).act_fn = stop
    with ContextPatcher(model, "exact") as patcher, torch.no_grad():
        patch = patcher.compute(CONTEXT % 32, KEPT % 32)
        jobs = [
            lambda: model(ids, use_cache=False).logits,
            lambda: patcher.forward(patch.kept_ids, patch),
        ]
        expected = [job() for job in jobs]
        for first, second in ((0, 1), (1, 0)):
            found = in_the_middle(pool, stop, jobs[first], jobs[second])
            assert near(found[0], expected[first])
            assert near(found[1], expected[second])


def test_detaching_waits_for_a_pass(pool: ThreadPoolExecutor) -> None:
    model, stop = stopping_model()
    with Snapshot(model):
        patcher = ContextPatcher(model)
        patch = patcher.compute(CONTEXT, KEPT)
        logits, _ = in_the_middle(pool, stop, lambda: patcher.forward(KEPT, patch), patcher.detach)
    assert torch.equal(logits, patch.logits)
    with pytest.raises(ValueError, match="detached"):
        patcher.forward(KEPT, patch)


# -- a thread that ends


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_thread_that_dies_in_the_middle_blocks_nobody(
    error: type[BaseException], pool: ThreadPoolExecutor
) -> None:
    model, stop = stopping_model()
    with ContextPatcher(model) as patcher, torch.no_grad():
        jobs = jobs_of(patcher)
        expected = {name: job() for name, job in jobs.items()}

        def dying(job: Callable[[], Any]) -> None:
            with pytest.raises(error):
                stop.run(job, error())

        for name in ("compute 0", "forward 0", "generate", "model"):
            dead = threading.Thread(target=dying, args=(jobs[name],))
            dead.start()
            dead.join(60)
            assert not dead.is_alive()
            for other, job in jobs.items():
                assert near(pool.submit(job).result(60), expected[other])


@pytest.mark.parametrize("way", [{}, {"mode": "shared_cache"}])
def test_a_generation_between_two_steps_holds_nothing(way: dict, pool: ThreadPoolExecutor) -> None:
    """Begun by a thread that is gone, never finished, gone on with by another one, or left to the
    collector.
    """
    model, _ = stopping_model()
    with ContextPatcher(model, "stable") as patcher:
        arguments: dict = {"max_new_tokens": 4, "eos_token_id": None, **way}
        expected = [step.logits for step in patcher.generate(CONTEXT, **arguments)]
        begun: list[Any] = []

        def begin() -> None:
            begun.append(patcher.generate(CONTEXT, **arguments))
            begun.append(next(begun[0]).logits)

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        pool.submit(works, patcher).result(60)
        steps, *found = begun
        found += pool.submit(lambda: [next(steps).logits, next(steps).logits]).result(60)
        found.append(next(steps).logits)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        begun.clear()
        begin()
        begun.clear()
        gc.collect()
        pool.submit(works, patcher).result(60)


# -- what is not a pass


@torch.no_grad()
def test_an_applied_patch_is_applied_for_all_threads(pool: ThreadPoolExecutor) -> None:
    """As when the weights are changed: the thread that generates for a streamer is not the one that
    applies the patch.
    """
    model, _ = stopping_model()
    with ContextPatcher(model) as patcher:
        patch, plain = patcher.compute(CONTEXT, KEPT), model(IDS).logits
        with patcher.applied(patch):
            expected = model(IDS).logits
            assert not near(expected, plain)
            assert near(pool.submit(lambda: model(IDS).logits.detach()).result(60), expected)
            with pytest.raises(ValueError, match=r"leave the `with patcher\.applied"):
                pool.submit(patcher.forward, KEPT, patch).result(60)
        assert near(pool.submit(lambda: model(IDS).logits.detach()).result(60), plain)


def test_gradients_through_an_attached_model(pool: ThreadPoolExecutor) -> None:
    """Forwards and backwards in several threads beside passes, recomputed activations too: the
    gradients of the model alone.
    """
    model, _ = stopping_model()

    def gradient() -> Tensor:
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        (found,) = torch.autograd.grad(model(inputs_embeds=x).logits.square().sum(), x)
        return found

    expected = gradient()
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
        found = [pool.submit(gradient) for _ in range(5)]
        replayed = [patcher.forward(KEPT, patch) for _ in range(5)]
        assert all(near(other.result(60), expected) for other in found)
        assert all(torch.equal(logits, patch.logits) for logits in replayed)


@torch.no_grad()
def test_the_models_forward_looks_as_it_did() -> None:
    """Of the model and of the one within it: the signature, and what someone else has put there
    before or after.
    """
    model, _ = stopping_model()
    ids, signature = tokens(0, 2, 5), inspect.signature(model.forward)
    inner = model.model
    own = inner.forward = lambda *args, **kwargs: type(inner).forward(inner, *args, **kwargs)
    expected = model(ids).logits
    with Snapshot(model), ContextPatcher(model) as patcher:
        assert inspect.signature(model.forward) == signature
        works(patcher)
        assert torch.equal(model(ids).logits, expected)
    assert vars(model.model)["forward"] is own
    with ContextPatcher(model) as patcher:
        later = model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
        works(patcher)
    assert vars(model)["forward"] is later
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_an_attached_model_can_be_compiled() -> None:
    """As one graph: what makes calls wait is not in it."""
    model, ids = build("llama", num_hidden_layers=1), tokens(0, 2, 5)
    expected = model(ids).logits
    with ContextPatcher(model) as patcher:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert near(compiled(ids).logits, expected)
        works(patcher)
        assert near(compiled(ids).logits, expected)


def test_copies_for_several_devices_are_refused() -> None:
    model, _ = stopping_model()
    message = r"DataParallel cannot copy patched modules: call icl_patch\.detach"
    with ContextPatcher(model), pytest.raises(RuntimeError, match=message):
        for module in model.modules():
            module._replicate_for_data_parallel()  # as torch.nn.parallel.replicate does
