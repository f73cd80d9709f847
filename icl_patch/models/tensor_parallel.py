"""transformers' tensor parallelism: matrices that are shared by several ranks.

A *colwise* matrix gives each rank a part of its outputs; the matrices that read the residual stream
are. A *rowwise* one takes a part of the inputs on each rank, and the ranks' outputs are summed; the
matrix that writes to the residual stream is. So a reader's u and the writer's v have a part on each
rank, and everything else is the same on all.
"""

import re

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.block_spec import Block
from icl_patch.models.ranks import mesh_of


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The process group of the ranks that share matrices; None if none are shared."""
    mesh = mesh_of(model)
    names = () if mesh is None else mesh.mesh_dim_names or ("tp",)  # 5.17 names no lone dimension
    if "tp" not in names or mesh.size(names.index("tp")) == 1:
        return None
    return mesh.get_group(names.index("tp"))


def style_of(model: PreTrainedModel, path: str) -> str | None:
    """How transformers' plan shares the module at a path; None for a module that all ranks have."""
    name = re.sub(r"\.\d+(?=\.|$)", ".*", path)  # the plan's names have * for a number
    return (model.tp_plan or {}).get(name)


def check_styles(model: PreTrainedModel, block: Block) -> None:
    """Raises UnsupportedModelError if ranks share a module of the block in an unknown way."""
    spec = block.spec
    known: dict[str | None, str] = {spec.down: "rowwise"}
    known |= dict.fromkeys(spec.readers, "colwise")
    if spec.experts is not None:
        raise UnsupportedModelError(
            f"expected no experts with tp_size, {block.path} has some: transformers shares each"
            " expert's matrices among the ranks. Split the model with pp_size"
        )
    for name in filter(None, (*known, spec.post_norm, spec.inner_norm)):
        style = style_of(model, block.path_of(name))
        if style not in (None, known.get(name)):
            raise UnsupportedModelError(
                f"expected readers that are shared colwise, a writer that is shared rowwise and"
                f" norms on all ranks, got {block.path_of(name)} {style}: split the model with"
                " pp_size"
            )


def part_of(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a factor (..., n), as matrices are cut: the last parts may be shorter."""
    width, rank = -(-x.shape[-1] // group.size()), group.rank()
    return x[..., rank * width : (rank + 1) * width].contiguous()
