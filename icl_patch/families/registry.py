"""The family table and its look-up on a model."""

from dataclasses import dataclass
from enum import Enum

from torch import nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError


class Writer(Enum):
    """What a block ends in, and so which parameters take up ``delta``."""

    SCALE = "scale"  # m ⊙ Norm(W_down h): the norm's scale, and W_down for the stable form
    WEIGHT = "weight"  # W_down h


@dataclass(frozen=True)
class Family:
    """Where things are in a block of ``model_types``; paths are relative to the block.

    Attributes:
        layers: path of the list of blocks in the model.
        pre_mlp: module whose input is the residual stream before the MLP.
        readers: the linear maps of the MLP's input.
        down: the MLP's output matrix.
        post_norm: the norm between ``down`` and the residual addition, for a scale writer.
        scale_offset, cast_first: how that norm applies its weight, see :class:`icl_patch.modules.PatchedRMSNorm`.
    """

    name: str
    model_types: tuple[str, ...]
    writer: Writer
    layers: str
    pre_mlp: str
    readers: tuple[str, ...]
    down: str
    post_norm: str | None = None
    scale_offset: float = 0.0
    cast_first: bool = True

    @property
    def patched(self) -> tuple[str, ...]:
        """The modules of a block whose parameters a patch changes."""
        return (*self.readers, self.down) + (() if self.post_norm is None else (self.post_norm,))


@dataclass(frozen=True)
class Block:
    """One block of a model: its path, its module and its family."""

    path: str
    module: nn.Module
    family: Family

    def path_of(self, part: str) -> str:
        """The path in the model of a part of the block."""
        return f"{self.path}.{part}"


FAMILIES = (
    Family(
        name="gemma3",
        model_types=("gemma3_text",),
        writer=Writer.SCALE,
        layers="model.layers",
        pre_mlp="pre_feedforward_layernorm",
        readers=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        post_norm="post_feedforward_layernorm",
        scale_offset=1.0,
        cast_first=False,
    ),
    Family(
        name="llama",
        model_types=("llama",),
        writer=Writer.WEIGHT,
        layers="model.layers",
        pre_mlp="post_attention_layernorm",
        readers=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
    ),
)


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model.

    Raises:
        UnsupportedModelError: no entry covers the model's type.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for family in FAMILIES:
        if model_type in family.model_types and _has_head(model):
            return family
    covered = ", ".join(model_type for family in FAMILIES for model_type in family.model_types)
    raise UnsupportedModelError(f"expected a causal language model of type {covered}; got {type(model).__name__} of type {model_type!r}")


def _has_head(model: PreTrainedModel) -> bool:
    """Whether the model ends in logits over its vocabulary."""
    head = model.get_output_embeddings()
    return head is not None and getattr(head, "out_features", None) == model.config.vocab_size


def blocks_of(model: PreTrainedModel) -> list[Block]:
    """The blocks of a model in order, each checked to have the parts that its family names.

    Raises:
        UnsupportedModelError: the family is unknown, or a part is missing.
    """
    family = family_of(model)
    try:
        layers = list(model.get_submodule(family.layers).children())
        blocks = [Block(f"{family.layers}.{index}", module, family) for index, module in enumerate(layers)]
        seen: dict[int, str] = {}
        for block in blocks:
            for part in (family.pre_mlp, *family.patched):
                path = block.path_of(part)
                other = seen.setdefault(id(block.module.get_submodule(part)), path)
                if other != path:
                    raise UnsupportedModelError(f"{path} is the same module as {other}: a patch of one would change the other")
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(model).__name__} has no module as family {family.name!r} expects: {error}") from error
    if not blocks:
        raise UnsupportedModelError(f"{type(model).__name__} has no blocks under {family.layers!r}")
    return blocks
