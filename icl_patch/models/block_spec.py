"""The structure of one block, as data."""

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Writer(Enum):
    """The last step of a block's MLP; its parameters change so that it adds ``delta``."""

    SCALE = "scale"  # m ⊙ Norm(W_down h): the norm's scale, and W_down for the stable form
    WEIGHT = "weight"  # W_down h
    BIAS = "bias"  # W_down h + b
    EXPERTS = "experts"  # Σ s_j W_j h_j: the output matrix, or the bias, of every active expert


@dataclass(frozen=True)
class BlockSpec:
    """The form of a block; paths are relative to it.

    The block's output is ``residual_factor · hidden + residual_multiplier · MLP``. ``hidden`` is
    the sum of ``residual``. ``MLP`` is the writer's output plus all other terms that the MLP adds.

    Attributes:
        writer: the kind of parameters that take up ``delta``.
        residual: the tensors that make up the residual stream before the MLP: ``"input of PATH"``
            or ``"output of PATH"``, ``""`` being the block. One for a sequential block; the block's
            input and its attention's output for a parallel one.
        readers: the linear maps of the MLP's input, routers included. None in a parallel block: the
            context does not change its MLP's input.
        routers: the readers that also choose experts.
        down: the output matrix of a scale, weight or bias writer.
        post_norm: the norm between ``down`` and the residual addition, for a scale writer.
        scale_offset, cast_first: how that norm applies its weight, see
            :class:`icl_patch.layers.rms_norm.PatchedRMSNorm`.
        separately_normed: the readers and experts that read the residual stream through a norm of
            their own, and so have a ``v`` of their own.
        inner_norm: the norm of the experts' output, if ``post_norm`` reads a sum of two norms'
            outputs. It takes part in the stable update.
        addend: the module whose output is added to that of ``down``, the experts or ``inner_norm``
            before ``post_norm`` reads the sum.
        experts: the module that holds all experts' matrices, if there is one.
        experts_scale_input: whether the experts' weights multiply their input instead of their
            output, see :class:`icl_patch.layers.experts.PatchedScaledExperts`.
        expert_bias: whether the experts' output has a bias; the update then changes this bias.
        transposed: the modules that store their weights as (in, out).
        residual_multiplier: the number by which the block multiplies its MLP's output.
        residual_factor: the number by which it multiplies the residual stream.
        residual_weight: the block's own parameter (d,) by which it multiplies the residual stream,
            element by element.
        final_norm: the last norm of a post-LN block, None in other blocks. Its input is the sum,
            which is rounded there.
        continues_after_sum: whether the block computes further with its sum instead of ending with
            it. The rest of the block reads only the sum and the block's input, so equal sums give
            equal outputs.
        dtype: of the sum.
        mixer: whether the block has no MLP, and ``down`` is the output matrix of its context layer.
    """

    writer: Writer
    residual: tuple[str, ...]
    readers: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    down: str | None = None
    post_norm: str | None = None
    scale_offset: float = 0.0
    cast_first: bool = True
    separately_normed: tuple[str, ...] = ()
    inner_norm: str | None = None
    addend: str | None = None
    experts: str | None = None
    experts_scale_input: bool = False
    expert_bias: bool = False
    transposed: tuple[str, ...] = ()
    residual_multiplier: float = 1.0
    residual_factor: float = 1.0
    residual_weight: str | None = None
    final_norm: str | None = None
    continues_after_sum: bool = False
    dtype: str = "float32"
    mixer: bool = False

    @property
    def patched(self) -> tuple[str, ...]:
        """The modules of the block that a patch changes."""
        others = (self.experts, self.down, self.inner_norm, self.post_norm)
        return (*self.readers, *filter(None, others))

    @property
    def reads(self) -> bool:
        """Whether the MLP's input changes with the context, so that its readers are patched."""
        return not self.parallel and (bool(self.readers) or self.experts is not None)

    @property
    def parallel(self) -> bool:
        """Whether the MLP is parallel to the attention and does not read its output."""
        return len(self.residual) > 1

    @property
    def ends_in_its_sum(self) -> bool:
        """Whether the block's output is its sum."""
        return self.final_norm is None and not self.continues_after_sum

    def experts_write(self, update: str) -> bool:
        """Whether the output matrices or biases of the active experts change."""
        inside = self.writer is Writer.SCALE and self.down is None and update != "direct"
        return inside or self.writer is Writer.EXPERTS

    def factor_names(self, update: str) -> list[str]:
        """The names of the block's factors, see :mod:`icl_patch.patch.context_patch`."""
        names = [f"{reader}.u" for reader in self.readers]
        if self.reads:
            names.append("readers.v")
        names += [f"{part}.v" for part in self.separately_normed]
        if self.experts is not None:
            names.append(f"{self.experts}.index")
            names += [f"{self.experts}.gate_up_proj.u"] if self.reads else []
        if self.experts_write(update):
            part = f"{self.experts}.down_proj"
            names += [f"{part}.bias_change"] if self.expert_bias else [f"{part}.u", f"{part}.v"]
        if self.inner_norm is not None and update != "direct":
            names += [f"{self.inner_norm}.new_scale", f"{self.inner_norm}.scale"]
        if self.writer is Writer.BIAS:
            return [*names, f"{self.down}.bias_change"]
        if self.down is not None and (self.writer is Writer.WEIGHT or update != "direct"):
            names += [f"{self.down}.u", f"{self.down}.v"]
        if self.writer is Writer.SCALE:
            names += [f"{self.post_norm}.new_scale", f"{self.post_norm}.scale"]
        return names

    def to_json(self) -> dict[str, Any]:
        """The form as plain JSON types."""
        return asdict(self) | {"writer": self.writer.value}

    @classmethod
    def from_json(cls, value: Any) -> "BlockSpec":
        """The form that :meth:`to_json` wrote."""
        lists = {name: tuple(entry) for name, entry in value.items() if isinstance(entry, list)}
        return cls(**{**value, **lists, "writer": Writer(value["writer"])})


@dataclass(frozen=True)
class Block:
    """One block of a model: its path and its form."""

    path: str
    spec: BlockSpec

    def path_of(self, part: str) -> str:
        """The path in the model of a part of the block."""
        return f"{self.path}.{part}" if part else self.path
