"""A ridge fit whose rows are shared by two processes, beside the fit of all rows in one."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.models import build, tokens
from support.static import random_example

from icl_patch import static

FORK = multiprocessing.get_context("fork")
TEXTS = tokens(7, 4, 6).tolist()
OPTIONS: Any = {"method": "ridge", "rank": 3, "folds": 2}
# fp32 passes over other batches, block after block (2e-7 was measured); half of the rows make
# another patch altogether
TOLERANCE = 1e-4
ALONE = ("few questions", "progress", "end")  # faults that only their process sees
Changes = dict[str, np.ndarray]
Result = tuple[Changes, dict[str, Any]]


# The questions of each process: each of them in the fold that it has among all; and with two that
# both have, at other places.
EACH_ONCE = ((0, 1, 4, 5), (2, 3, 6, 7))
TWO_IN_BOTH = ((0, 1, 2, 3, 4), (3, 5, 6, 7, 0))
ONE_FOLD_IN_ONE = ((0, 1, 2, 3, 4), (2, 4))


def part_of(rank: int, parts: tuple[tuple[int, ...], ...] = EACH_ONCE) -> static.Example:
    example, kept = random_example(), parts[rank]
    assert example.answers is not None
    questions, answers = (tuple(x[i] for i in kept) for x in (example.questions, example.answers))
    return static.Example(example.context, questions, answers, example.prefix)


def result(patch: static.StaticPatch) -> Result:
    assert patch.report is not None
    changes = {path: change.dense().numpy() for path, change in patch.changes.items()}
    return changes, patch.report.to_json()


def join_group(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def share(rank: int, connection: Any, folder: Path, resumed: bool = False) -> None:
    join_group(rank, folder / f"store{resumed}")
    state = folder / f"state{rank}"
    if resumed and rank == 0:
        (state / "block-0001.safetensors").unlink()
        (state / "block-0002.safetensors").unlink()
    texts = TEXTS[2 * rank : 2 * rank + 2]
    options = {**OPTIONS, "preserve": texts, "group": dist.group.WORLD, "state": state}
    connection.send(result(static.fit(build("llama"), [part_of(rank)], **options)))
    dist.destroy_process_group()


def share_questions(
    rank: int, connection: Any, folder: Path, parts: tuple[tuple[int, ...], ...]
) -> None:
    join_group(rank, folder / "store")
    options = {**OPTIONS, "preserve": TEXTS[:3] if rank == 0 else (), "group": dist.group.WORLD}
    connection.send(result(static.fit(build("llama"), [part_of(rank, parts)], **options)))
    dist.destroy_process_group()


def change_questions(rank: int, connection: Any, folder: Path) -> None:
    """A fit with a state, and another one that gives the second process a question less."""
    join_group(rank, folder / "store")
    said = "nothing"
    for name, parts in (("first", EACH_ONCE), ("second", (EACH_ONCE[0], EACH_ONCE[1][:3]))):
        state = folder / ("both" if rank == 0 else name)
        options = {**OPTIONS, "group": dist.group.WORLD, "state": state}
        try:
            static.fit(build("llama"), [part_of(rank, parts)], **options)
        except (ValueError, RuntimeError) as error:
            said = f"{name} {type(error).__name__} {error}"
    connection.send(said)
    dist.destroy_process_group()


def results_of(target: Callable[..., None], *given: Any) -> list[Any]:
    pipes = [FORK.Pipe() for _ in range(2)]
    processes = [
        FORK.Process(target=target, args=(rank, pipes[rank][1], *given)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    assert all(receiver.poll(60) for receiver, _ in pipes)
    results = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return results


def difference(some: Changes, others: Changes) -> float:
    return max(
        float(np.linalg.norm(some[path] - other) / np.linalg.norm(other))
        for path, other in others.items()
    )


def test_two_processes_give_the_fit_of_all_rows(tmp_path: Path) -> None:
    model = build("llama")
    expected, report = result(static.fit(model, [random_example()], preserve=TEXTS, **OPTIONS))
    half, _ = result(static.fit(model, [part_of(0)], preserve=TEXTS[:2], **OPTIONS))
    results = results_of(share, tmp_path)
    for changes, own in results:
        assert difference(changes, expected) < TOLERANCE
        assert own["residual"] == pytest.approx(report["residual"], rel=TOLERANCE)
        assert own["held_out"] == pytest.approx(report["held_out"], rel=TOLERANCE)
        assert own["held_out"]["questions"] == 8
        assert own["preserve_kl"] == pytest.approx(report["preserve_kl"], rel=TOLERANCE)
        assert own["ridges"] == report["ridges"]
    assert difference(half, expected) > 0.1
    # a block that is missing in one process is fitted again by both
    for changes, _ in results_of(share, tmp_path, True):
        assert difference(changes, results[0][0]) < TOLERANCE


@pytest.mark.parametrize("parts", [TWO_IN_BOTH, ONE_FOLD_IN_ONE])
def test_questions_that_both_processes_have_are_in_one_fold(
    parts: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """As in one process, although each has them at another place, or one has those of one fold
    alone; and although the preserved texts of the first come before the questions of the second.
    """
    examples = [part_of(rank, parts) for rank in (0, 1)]
    expected, report = result(static.fit(build("llama"), examples, preserve=TEXTS[:3], **OPTIONS))
    for changes, own in results_of(share_questions, tmp_path, parts):
        assert difference(changes, expected) < TOLERANCE
        assert own["held_out"] == pytest.approx(report["held_out"], rel=TOLERANCE)
        assert own["ridges"] == report["ridges"]


def test_a_state_is_of_the_questions_of_all_processes(tmp_path: Path) -> None:
    own, other = results_of(change_questions, tmp_path)
    assert own.startswith("second ValueError expected blocks of these examples and options")
    assert other.startswith("second ProcessError") and "an error in process 0" in other


def failing(rank: int, folder: Path, fault: str, connection: Any) -> None:
    """A fit of two processes, the second of which fails."""
    join_group(rank, folder / "store")
    example, options = part_of(rank), {**OPTIONS, "group": dist.group.WORLD}

    def stop(done: int, _total: int) -> None:
        if done == 2:
            raise KeyError("a bar that fails")

    def end(done: int, _total: int) -> None:
        if done == 2:
            os._exit(9)

    if rank == 1:
        options |= {
            "few questions": {"folds": 5},
            "progress": {"progress": stop},
            "end": {"progress": end},
            "rank": {"rank": 4},
            "held out": {"held_out": [random_example(2)]},
        }[fault]
    try:
        static.fit(build("llama"), [example], **options)
        connection.send("no error")
    except (ValueError, KeyError, RuntimeError) as error:
        connection.send((type(error).__name__, str(error)))
    time.sleep(60)  # a process that ended would be noticed by the others


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        (
            "few questions",
            ("ValueError", "at least 5 different questions"),
            "an error in process 1",
        ),
        ("progress", ("KeyError", "a bar that fails"), "an error in process 1"),
        ("end", None, "one that has ended"),
        ("rank", ("ValueError", "the same model and options"), "the same model and options"),
        ("held out", ("ValueError", "the same model and options"), "the same model and options"),
    ],
)
def test_an_error_in_one_process_ends_the_others(
    fault: str, own: tuple[str, str] | None, others: str, tmp_path: Path
) -> None:
    pipes = [FORK.Pipe(duplex=False) for _ in range(2)]
    processes = [
        FORK.Process(target=failing, args=(rank, tmp_path, fault, pipes[rank][1]))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    try:
        for (receiver, _), expected in zip(pipes, ((None, others), own), strict=True):
            if expected is None:
                continue
            assert receiver.poll(30), "this process waits for ever"
            kind, message = receiver.recv()
            assert kind == (expected[0] or ("ProcessError" if fault in ALONE else "ValueError"))
            assert expected[1] in message
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_distillation_over_processes_is_refused(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with pytest.raises(ValueError, match='expected method="ridge" with several processes'):
            static.fit(build("llama"), [random_example()], group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
