"""The matrices that a static patch may change."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.linear import matrix_of
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.models.block_detection import blocks_of, is_matrix
from icl_patch.models.language_model import layers_of
from icl_patch.models.module_search import inside
from icl_patch.models.ranks import check_one_process
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.models.trace import BlockTrace, trace
from icl_patch.models.trial_tokens import trial_tokens

PARTS = ("mlp", "attention")


def find_matrices(
    model: PreTrainedModel, parts: Iterable[str], first_block: int = 0
) -> dict[str, tuple[int, int]]:
    """The matrices of some :data:`PARTS`, from one block on: the paths of their modules, with
    (N, K).

    Raises:
        ValueError: a part is not in :data:`PARTS`, there is none, or the model lacks the block.
        TypeError: a module of the model is patched.
        UnsupportedModelError: a block has experts or a recurrent layer, or none of the matrices.
    """
    wanted = set(parts)
    if not wanted or wanted - set(PARTS):
        raise ValueError(f"expected parts among {', '.join(PARTS)}, got {sorted(wanted)}")
    check_one_process(model)
    if is_recurrent(model):
        raise UnsupportedModelError(
            f"expected a model without recurrent layers for a static patch, got"
            f" {type(model).__name__}"
        )
    patched = [path for path, part in model.named_modules() if isinstance(part, PatchedModule)]
    if patched:
        raise TypeError(
            f"expected a model without patched modules, got {patched[0]} patched: detach the"
            " patcher, or leave the patch's context, first"
        )
    blocks = blocks_of(model)
    if not 0 <= first_block < len(blocks):
        raise ValueError(f"expected a first block from 0 to {len(blocks) - 1}, got {first_block}")
    with_experts = [block.path for block in blocks if block.spec.experts is not None]
    if with_experts:
        raise UnsupportedModelError(
            f"expected blocks that can hold a static patch, got {with_experts[0]} with experts:"
            " which of them a token uses changes with the patch"
        )
    traces = trace(model, layers_of(model), trial_tokens(model, 3, seed=1))
    found = {
        path: matrix_shape(model.get_submodule(path))
        for block in blocks[first_block:]
        for part in PARTS
        if part in wanted
        for path in _paths(traces[block.path], part)
    }
    if not found:
        raise UnsupportedModelError(
            f"expected blocks with matrices of {', '.join(sorted(wanted))}, got"
            f" {type(model).__name__}: its blocks have no such matrix as a module"
        )
    return found


def _paths(traced: BlockTrace, part: str) -> list[str]:
    """The matrices inside attention, or all others of a block, in the order of their calls."""
    attention = [call.path for call in traced.mixers]
    return list(
        dict.fromkeys(
            f"{traced.path}.{call.path}"
            for call in traced.calls
            if is_matrix(call.module)
            and any(inside(call.path, path) for path in attention) is (part == "attention")
        )
    )


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """(N, K) of a linear map.

    Raises:
        UnsupportedModelError: the module is not a matrix that a patch can be merged into.
    """
    try:
        rows, columns = matrix_of(module).shape
    except TypeError as error:
        raise UnsupportedModelError(str(error)) from error
    return rows, columns
