"""The matrices of a block that a static patch may change, and the values that are read from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.models.block_detection import blocks_of, is_matrix
from icl_patch.models.block_spec import BlockSpec, Writer
from icl_patch.models.language_model import layers_of, random_tokens
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.models.trace import BlockTrace, Call, inside, trace

PARTS = ("readers", "writer", "o_proj", "qk")


@dataclass(frozen=True)
class OutputMatrix:
    """A matrix that writes into the residual stream: ``stream + multiplier · Norm(W a)``.

    Attributes:
        path: of the matrix, in its block.
        norm: the RMSNorm behind it, None if it writes directly.
        scale_offset: the norm's scale is this plus its weight.
        multiplier: by which the block multiplies the branch.
    """

    path: str
    norm: str | None = None
    scale_offset: float = 0.0
    multiplier: float = 1.0


@dataclass(frozen=True)
class BlockParts:
    """One block: paths of its modules, relative to ``path``.

    Attributes:
        path: of the block in the model.
        hidden: the module that reads the residual stream between attention and MLP.
        readers: the matrices that read the MLP's input.
        writer: the MLP's output matrix.
        attention_output: attention's output matrix, None if the block has another form.
        qk: the matrices of queries and keys, if they are modules of their own.
        final_norm: the last norm of a post-LN block; its input is the block's sum.
        returns_tuple: whether the block returns a tuple.
    """

    path: str
    hidden: str
    readers: tuple[str, ...]
    writer: OutputMatrix
    attention_output: OutputMatrix | None
    qk: tuple[str, ...]
    final_norm: str | None
    returns_tuple: bool

    def matrices(self, part: str) -> tuple[str, ...]:
        """The paths of one of :data:`PARTS`, relative to the block.

        Raises:
            UnsupportedModelError: the block does not have it.
        """
        output = self.attention_output
        found = {
            "readers": self.readers,
            "writer": (self.writer.path,),
            "o_proj": () if output is None else (output.path,),
            "qk": self.qk,
        }[part]
        if not found:
            raise UnsupportedModelError(
                f"expected a block with {part} as modules of their own, got {self.path}: leave"
                f" {part!r} out of parts"
            )
        return found


def check_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts in the order in which a block computes them.

    Raises:
        ValueError: none, or one that is not in :data:`PARTS`.
    """
    wanted = set(parts)
    if not wanted or wanted - set(PARTS):
        raise ValueError(f"expected parts among {', '.join(PARTS)}, got {sorted(wanted)}")
    return tuple(part for part in ("qk", "o_proj", "readers", "writer") if part in wanted)


def read_blocks(model: PreTrainedModel) -> list[BlockParts]:
    """The parts of every block of a model.

    Raises:
        TypeError: a module of the model is patched.
        UnsupportedModelError: a block has a form that cannot hold a static patch: experts, an MLP
            beside the attention, no MLP, or a recurrent layer.
    """
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
    for block in blocks:
        _check_form(block.path, block.spec)
    traces = trace(model, layers_of(model), random_tokens(model, 3, seed=1))
    return [_read(traces[block.path], block.spec) for block in blocks]


def _check_form(path: str, spec: BlockSpec) -> None:
    reasons = {
        "experts: which of them a token uses changes with the patch": spec.experts is not None
        or spec.writer is Writer.EXPERTS,
        "an MLP beside its attention, which does not read what the context changes": spec.parallel,
        "no MLP": spec.mixer,
        "a sum that it goes on from": spec.continues_after_sum,
        "no readers": not spec.readers,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(
                f"expected blocks that can hold a static patch, got {path} with {reason}"
            )


def _read(traced: BlockTrace, spec: BlockSpec) -> BlockParts:
    assert spec.down is not None
    side, _, hidden = spec.residual[0].partition(" of ")
    if side != "input" or not hidden:
        raise UnsupportedModelError(
            f"expected a residual stream that a module of {traced.path} reads"
        )
    return BlockParts(
        path=traced.path,
        hidden=hidden,
        readers=spec.readers,
        writer=OutputMatrix(
            spec.down,
            spec.post_norm if spec.writer is Writer.SCALE else None,
            spec.scale_offset,
            spec.residual_multiplier,
        ),
        attention_output=_attention_output(traced, spec, hidden),
        qk=_queries_and_keys(traced),
        final_norm=spec.final_norm,
        returns_tuple=traced.block.several,
    )


def _attention_output(traced: BlockTrace, spec: BlockSpec, hidden: str) -> OutputMatrix | None:
    """Attention's output matrix, if the block adds its output, or an RMSNorm of this, to its
    input.
    """
    if len(traced.mixers) != 1:
        return None
    mixer = traced.mixers[0]
    down = next((c for c in _matrices(traced, mixer)[::-1] if c.made.same_as(mixer.made)), None)
    stream = next(call for call in traced.calls if call.path == hidden).given.now.double()
    if down is None:
        return None
    added = stream.flatten() - traced.block.given.now.double().flatten()
    norms = [call for call in traced.calls if call.given.same_as(mixer.made)]
    for norm in (None, *norms):
        written = (mixer if norm is None else norm).made.now.double().flatten()
        for multiplier in {1.0, spec.residual_multiplier}:
            if (
                written.shape == added.shape
                and (added - multiplier * written).norm() <= 1e-2 * added.norm()
            ):
                path = None if norm is None else norm.path
                return OutputMatrix(down.path, path, spec.scale_offset, multiplier)
    return None


def _queries_and_keys(traced: BlockTrace) -> tuple[str, ...]:
    if len(traced.mixers) != 1:
        return ()
    names = [call.path for call in _matrices(traced, traced.mixers[0])]
    found = tuple(name for name in names if name.endswith((".q_proj", ".k_proj")))
    return found if len(found) == 2 else ()


def _matrices(traced: BlockTrace, mixer: Call) -> list[Call]:
    return [c for c in traced.calls if inside(c.path, mixer.path) and is_matrix(c.module)]


def norm_scale(block: nn.Module, output: OutputMatrix) -> tuple[Tensor, float]:
    """The scale (n,) fp32 and the eps of the norm behind an output matrix."""
    norm: Any = block.get_submodule(str(output.norm))
    eps = getattr(norm, "eps", None)
    scale = output.scale_offset + norm.weight.detach().float()
    return scale, float(norm.variance_epsilon if eps is None else eps)


def weight_of(module: nn.Module) -> Tensor:
    """The matrix W (N, K) of a linear map in fp64.

    Raises:
        UnsupportedModelError: the module is not an ``nn.Linear`` or a Conv1D with a plain weight.
    """
    weight = getattr(module, "weight", None)
    if type(module) not in (nn.Linear, Conv1D) or type(weight) is not nn.Parameter:
        raise UnsupportedModelError(
            f"expected nn.Linear or Conv1D with a plain weight, got {type(module).__name__}"
        )
    matrix = weight.detach().double()
    return matrix.T if type(module) is Conv1D else matrix


def matrix_shapes(
    model: PreTrainedModel, blocks: Iterable[BlockParts], parts: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """(N, K) of every matrix of the parts, by its path in the model."""
    shapes = {}
    for block in blocks:
        for path in [path for part in parts for path in block.matrices(part)]:
            n, k = weight_of(model.get_submodule(f"{block.path}.{path}")).shape
            shapes[f"{block.path}.{path}"] = (n, k)
    return shapes
