"""One of the ranks of a model that is split over processes; run as a program by :func:`launch`."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
import torch.distributed as dist
from support.offload import results
from support.random_models import tokens
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.pipeline_parallel import PipelineStage
from transformers.utils import logging

from icl_patch import ContextPatch, ContextPatcher

CONTEXT, KEPT, KEEP_FIRST = tokens(1, 2, 9), tokens(2, 2, 3), 2
TIMEOUT = 3.0  # seconds that a rank waits for another
COUNT, RANK = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "RANK"))


def launch(count: int, scenario: str, *arguments: str) -> list[list[Any]]:
    """What each of ``count`` ranks says in a scenario, a list of JSON values each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tests = Path(__file__).parents[1]
    places = [str(tests), str(tests.parent / "build" / "peft"), os.environ.get("PYTHONPATH", "")]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "PYTHONPATH": os.pathsep.join(places),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-P", "-m", "support.ranks", scenario, *arguments]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    ranks = [subprocess.Popen(command, env=os.environ | shared | rank, **piped) for rank in own]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    said = [[json.loads(x) for x in out.splitlines() if x[:1] in '["{'] for out, _ in outputs]
    assert all(said), "\n".join(errors for _, errors in outputs)
    return said


# each update and each writer once; in other families all together
_UPDATES = {"gemma3": ("direct", "exact"), "llama": ("stable",)}


def updates_of(folder: str) -> tuple[str, ...]:
    """Of the model in a folder with its family's name."""
    return _UPDATES.get(Path(folder).name, ("direct", "stable", "exact"))


def say(word: Any) -> None:
    print(json.dumps(word), flush=True)


def digest_of(tensors: list[Tensor]) -> str:
    named = {str(number): x.detach().clone() for number, x in enumerate(tensors)}
    return hashlib.sha256(safetensors.torch.save(named)).hexdigest()


def bits_of(model: Any, update: str, file: Path) -> list[str]:
    """Hashes of all that a patcher computes, and of its steps: equal in every process
    and without processes.
    """
    tensors, written = results(model, update, (CONTEXT, KEPT), file, rank_timeout=60)
    found = [digest_of(tensors), hashlib.sha256(written).hexdigest()]
    with ContextPatcher(model, update, rank_timeout=60) as patcher:
        two = update == "exact" or patcher.attached_model.steps_take_two_passes
        modes = ["two_pass" if two else "two_stream"]
        modes += ["shared_cache"] * (update == "exact" or not two)
        for mode in modes:
            steps = list(patcher.generate(CONTEXT, max_new_tokens=2, mode=mode))
            made = [x for step in steps for x in step.patch.layers[-1].values()]
            found.append(digest_of([*(step.logits for step in steps), *made]))
    return found


def load(folder: str, **split: int) -> Any:
    config = DistributedConfig(**split)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    return model.eval()


def tensor_parallel(*folders: str) -> None:
    """Every update of every model in the folders, its matrices shared by the ranks; each folder has
    a file of one process for each update.
    """
    for folder in folders:
        for update in updates_of(folder):
            say(shared_matrices(folder, update))


def shared_matrices(folder: str, update: str) -> Any:
    model, said = load(folder, tp_size=COUNT), dict[str, Any]()
    refusal = error_of(lambda: ContextPatcher(model, update, rank_timeout=60).detach())
    if refusal[0] != "nothing":
        return refusal
    with ContextPatcher(model, update, rank_timeout=60) as patcher:
        patch = patcher.compute(CONTEXT, KEPT, keep_first=KEEP_FIRST)
        said["replay"] = largest_difference(patcher.forward(KEPT, patch), patch.logits)
        of_one = ContextPatch.load(f"{folder}/{update}.safetensors", model)
        try:
            said["of_one"] = largest_difference(patcher.forward(KEPT, of_one), patch.logits)
        except ValueError as error:
            said["of_one"] = str(error)
        if RANK == 0:
            patch.save(f"{folder}/{update}-{COUNT}.safetensors")
        steps = list(patcher.generate(CONTEXT, max_new_tokens=3))
        said["tokens"] = [step.token_ids.tolist() for step in steps]
        alone = patcher.compute(CONTEXT, KEPT)
        said["reduced"] = [
            reductions(lambda: plain(model)),
            reductions(lambda: patcher.forward(KEPT, alone)),
        ]
        said["factors"] = digest_of([x for layer in patch.layers for x in layer.values()])
        with patcher.applied(patch):
            with_gradients = model(KEPT).logits
            said["applied"] = largest_difference(with_gradients, plain(model))
        said["dead"] = []
        up = model.model.layers[0].mlp.up_proj.weight
        for rank in range(COUNT):  # until the input of the writer is 0 on all ranks
            if rank == RANK:
                up.data.to_local().zero_()
            for work in (
                lambda: patcher.compute(CONTEXT, KEPT),
                lambda: next(patcher.generate(CONTEXT, max_new_tokens=1)),
            ):
                said["dead"].append(error_of(work))
    return said


def plain(model: Any) -> Tensor:
    with torch.no_grad():
        return model(KEPT).logits


def reductions(work: Callable[[], Any]) -> list[int]:
    """How many sums over ranks ``work`` takes in the blocks, and of how many bytes."""
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        work()
    summed = [call.args[0] for call in counted.call_args_list]
    sizes = [x.nbytes for x in summed if x.is_floating_point()]  # the ranks agree in integers
    return [len(sizes), sum(sizes)]


def largest_difference(x: Tensor, y: Any) -> float:
    return float((x - y).abs().max() / y.abs().max())


def error_of(work: Callable[[], Any]) -> list[str]:
    """The kind of the error and its text."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def everything(*folders: str) -> None:
    """:func:`bits` of one half of the folders, :func:`tensor_parallel` of the other,
    :func:`refusals` and :func:`death`.
    """
    half = len(folders) // 2
    bits(*folders[:half])
    tensor_parallel(*folders[half:])
    refusals(folders[0])
    death(folders[0])


def bits(*folders: str) -> None:
    """Every update of every model in the folders, split by pipeline."""
    for folder in folders:
        for update in updates_of(folder):
            model = load(folder, pp_size=COUNT)
            say(bits_of(model, update, Path(f"{folder}/{RANK}.safetensors")))


def refusals(folder: str) -> None:
    """What one rank refuses, all ranks refuse; and they go on afterwards."""
    say(error_of(lambda: load_and_attach(folder, "stable" if RANK else "exact")))
    say(error_of(lambda: load_and_attach(folder, "stable" if RANK else "other")))
    say(error_of(lambda: load_and_attach(folder, "stable", changed=bool(RANK))))
    model = load(folder, pp_size=COUNT)
    with ContextPatcher(model, "stable", rank_timeout=60) as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
        say(error_of(lambda: patcher.compute(CONTEXT + RANK, KEPT)))
        say(error_of(lambda: patcher.compute(CONTEXT, KEPT[:, :0] if RANK else KEPT)))
        other = KEPT if RANK else KEPT + 1
        say(error_of(lambda: patcher.forward(other, patch)))
        calls = (lambda: patcher.compute(CONTEXT, KEPT), lambda: patcher.forward(KEPT, patch))
        say(error_of(calls[0] if RANK else calls[1]))
        if RANK:
            model.model.layers[-1].mlp.up_proj.weight.data.zero_()
            patcher.check_weights()
        say(error_of(lambda: patcher.compute(CONTEXT, KEPT)))
        say(error_of(lambda: list(patcher.generate(CONTEXT, max_new_tokens=2))))
        say(error_of(lambda: next(patcher.generate(CONTEXT, max_new_tokens=2, compile=True))))
    say(error_of(lambda: patcher.generate(CONTEXT, max_new_tokens=2)))


def load_and_attach(folder: str, update: str, *, changed: bool = False) -> None:
    model = load(folder, pp_size=COUNT)
    if changed:
        model.lm_head.weight.data[0] += 1  # which is that of the embeddings, on the first rank
    ContextPatcher(model, update, rank_timeout=60).detach()


def death(folder: str) -> None:
    """The last rank ends within a pass: the others say so, and how long they took."""
    model = load(folder, pp_size=COUNT)
    patcher = ContextPatcher(model, "stable", rank_timeout=TIMEOUT)
    if RANK == COUNT - 1:
        say("ends")
        PipelineStage.broadcast_from_last = lambda *_, **__: os._exit(1)
    before = time.monotonic()
    error = error_of(lambda: patcher.compute(CONTEXT, KEPT))
    say([*error, time.monotonic() - before])
    say(error_of(lambda: patcher.compute(CONTEXT, KEPT)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # the other ranks may have ended before
