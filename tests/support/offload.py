"""Models that accelerate offloads or spreads over devices; and, run as a program, a model larger
than the memory that the process may take.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from support.optional import imported
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.layers.device_hooks import offloaded

WAYS = ("cpu", "disk", "device_map")
MIB = 2**20
ROOM = 54 * MIB  # of the program, beyond what it has when the model is loaded


def offload(model: PreTrainedModel, way: str, folder: Path) -> PreTrainedModel:
    """The model with its weights on the CPU or on disk between two forwards; by ``device_map``
    those of every second block.
    """
    accelerate = imported("accelerate")
    if way == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if way == "disk":
        return accelerate.disk_offload(model, str(folder / "weights"), execution_device="cpu")
    base = model.base_model_prefix
    inner = dict(getattr(model, base).named_children())
    stack = next(name for name, child in inner.items() if isinstance(child, torch.nn.ModuleList))
    device_map = {f"{base}.{name}": "cpu" for name in inner if name != stack} | {"lm_head": "cpu"}
    for number in range(len(inner[stack])):
        device_map[f"{base}.{stack}.{number}"] = "disk" if number % 2 else "cpu"
    return accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=str(folder / "weights")
    )


def results(
    model: PreTrainedModel, update: str, ids: tuple[Tensor, Tensor], file: Path, **options: Any
) -> tuple[list[Tensor], bytes]:
    """What a patcher makes of a context and kept tokens: all tensors, and the bytes of a file."""
    with ContextPatcher(model, update, **options) as patcher:
        patch = patcher.compute(*ids)
        assert patch.report is not None and patch.logits is not None
        found = [layer[name] for layer in patch.layers for name in sorted(layer)]
        found += [patch.logits, patcher.forward(ids[1], patch), *patch.norms().values()]
        found += [patch.report.misses, patch.report.correction]
        patch.save(file)
        found.append(patcher.forward(ids[1], ContextPatch.load(file, model)))
        grown = patcher.dynamics(ids[0][:, :2], ids[1]).patches[-1]
        found += grown.norms().values()
        two = patcher.update == "exact" or patcher.attached_model.steps_take_two_passes
        mode = "two_pass" if two else "two_stream"
        found += [x.token_ids for x in patcher.generate(ids[0], max_new_tokens=2, mode=mode)]
    return found, file.read_bytes()


def main(folder: str) -> None:
    """Compute and replay a patch of the model in a folder, its weights on disk, within a limit."""
    imported("accelerate")
    torch.set_num_threads(1)
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
    device_map |= {"model.rotary_emb": "cpu", "model.layers": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=f"{folder}/offloaded"
    )
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    limit = used * 1024 + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    context = torch.arange(3, 20)[None]
    for update in ("stable", "exact"):
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(context, context[:, :3])
            print(update, patcher.forward(context[:, :3], patch).double().sum().item())
    held = []
    try:
        for name, _ in model.named_parameters():
            read = offloaded(model, name)
            held.append(None if read is None else read())
    except (MemoryError, RuntimeError):
        print("out of memory with all weights")


if __name__ == "__main__":
    main(sys.argv[1])
