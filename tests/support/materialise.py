"""What a reader of a patch file can do with no more than its documented format: change a stock
model's weights.
"""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open


def read_patch(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["icl_patch"]), tensors


def materialise(model: torch.nn.Module, header: dict, tensors: dict[str, torch.Tensor]) -> None:
    """``W + u vᵀ`` for every ``….u``, ``b + Δb`` for every ``….bias_change``, ``w + (m' - m)`` for
    every ``….new_scale``.

    A weight stored as ``w = m - 1`` moves by the same Δm; one stored as (in, out) by the transpose;
    of experts those that are active.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        layers, index, path, kind = re.fullmatch(r"(layers\.(\d+))\.(.*)\.(\w+)", name).groups()
        block, x = header["blocks"][int(index)], tensor[0, 0] if tensor.dim() > 1 else tensor
        transposed = block["form"]["transposed"]
        experts = block["form"]["experts"]
        if kind == "new_scale":
            parameters[f"{block['path']}.{path}.weight"].data += (
                x - tensors[f"{layers}.{path}.scale"]
            )
        elif experts is not None and path.startswith(f"{experts}."):
            if kind in ("u", "bias_change"):
                change_experts(parameters, block, tensors, layers, path, kind)
        elif kind == "bias_change":
            parameters[f"{block['path']}.{path}.bias"].data += x
        elif kind == "u":
            v = tensors.get(f"{layers}.{path}.v", tensors.get(f"{layers}.readers.v"))[0, 0]
            change = torch.outer(v, x) if path in transposed else torch.outer(x, v)
            parameters[f"{block['path']}.{path}.weight"].data += change


def change_experts(
    parameters: dict[str, torch.Tensor],
    block: dict,
    tensors: dict[str, torch.Tensor],
    layers: str,
    path: str,
    kind: str,
) -> None:
    """One parameter of the experts: the matrices (or biases) of the active ones."""
    experts = block["form"]["experts"]
    u = tensors[f"{layers}.{path}.{kind}"][0, 0]
    v = next(
        (
            tensors[f"{layers}.{part}.v"]
            for part in (path, experts, "readers")
            if f"{layers}.{part}.v" in tensors
        ),
        None,
    )
    for slot, expert in enumerate(tensors[f"{layers}.{experts}.index"][0, 0].tolist()):
        own = u if u.dim() == 1 else u[slot]
        if kind == "bias_change":
            parameters[f"{block['path']}.{path}_bias"].data[expert] += own
            continue
        read = v[0, 0] if v.dim() == 3 else v[0, 0, slot]
        change = (
            torch.outer(read, own)
            if experts in block["form"]["transposed"]
            else torch.outer(own, read)
        )
        parameters[f"{block['path']}.{path}"].data[expert] += change
