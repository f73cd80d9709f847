"""What a reader of a patch file can do with no more than its documented format: change a stock model's weights, run one bare token.

    python materialise.py FOLDER ...

Every FOLDER holds ``model/`` (from ``save_pretrained``) and ``patch.safetensors`` (one row, one kept token, no prefix). It gets a
``logits.safetensors`` with that token's logits under the changed weights (``patched``) and under the model's own (``bare``).
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def read_patch(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["icl_patch"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def materialise(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """``W + u vᵀ`` for every ``….u``, ``w + (m' - m)`` for every ``….new_scale``: a weight stored as ``w = m - 1`` moves by the same Δm."""
    for name, tensor in tensors.items():
        path, kind = name.rsplit(".", 1)
        weight = f"model.{path}.weight"
        if kind == "u":
            block = ".".join(path.split(".")[:2])
            v = tensors.get(f"{path}.v", tensors[f"{block}.readers.v"])
            model.get_parameter(weight).data += torch.outer(tensor[0, 0], v[0, 0])
        elif kind == "new_scale":
            model.get_parameter(weight).data += tensor[0, 0] - tensors[f"{path}.scale"]


@torch.no_grad()
def run(folder: Path) -> None:
    header, tensors = read_patch(folder / "patch.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    token = {"input_ids": torch.tensor(header["kept_ids"]), "position_ids": torch.tensor(header["position_ids"])}
    bare = model(**token).logits
    materialise(model, tensors)
    save_file({"bare": bare, "patched": model(**token).logits}, folder / "logits.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder in sys.argv[1:]:
        run(Path(folder))
    assert "icl_patch" not in sys.modules
    print(json.dumps(sorted(sys.modules)))
