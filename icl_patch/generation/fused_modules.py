"""Run the norms and gated MLPs of a decode step through our ops, which take fewer launches.

A module is tried on random rows: if one of our ops gives the same output, it takes the module's
place. No table lists classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch import ops
from icl_patch.activations import ACTIVATIONS
from icl_patch.layers.linear import LINEAR, PatchedLinear
from icl_patch.layers.patched_module import PatchedModule, like_rows_of, rows_of, untouched
from icl_patch.layers.rms_norm import PatchedRMSNorm, rms_norm_form
from icl_patch.models.forward_override import Forward
from icl_patch.recording.attached_block import AttachedBlock

_ROUNDINGS = 16  # the allowed difference between two orders of the same arithmetic
# Scales of the rows that a module is tried on; the large ones show whether it clamps.
_SCALES = (1.0, 30.0, 1000.0)


@dataclass(frozen=True)
class _Fused(ABC):
    """A module's forward in fewer launches for a call with one input; other calls run the module's
    own forward.
    """

    module: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return self.run(args[0])
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The module's output."""


@dataclass(frozen=True)
class _Norm(_Fused):
    """An RMSNorm in one launch."""

    patched: PatchedRMSNorm  # the same norm, which knows how it applies its scale

    def run(self, x: Tensor) -> Tensor:
        return self.patched.in_one_launch(x)


@dataclass(frozen=True)
class _NormBefore(_Norm):
    """The norm before a block's MLP, which also gives the block's recorder its delta and its
    readers' direction.
    """

    block: AttachedBlock

    def run(self, x: Tensor) -> Tensor:
        on_norm_pair = self.block.on_norm_pair
        if on_norm_pair is None:
            return super().run(x)
        pair = ops.norm_pair(
            x.reshape(-1, x.shape[-1]),
            self.module.weight,
            self.patched.eps,
            scale_offset=self.patched.scale_offset,
            cast_first=self.patched.cast_first,
        )
        on_norm_pair(pair)
        return pair.z_pair.reshape(x.shape)


@dataclass(frozen=True)
class _Gated(_Fused):
    """An MLP ``down(act(gate(x)) ⊙ up(x))``; gate and up may be the halves of one matrix.

    swapped: whether the gate is the second reader or half.
    """

    readers: tuple[nn.Module, ...]
    down: nn.Module
    activation: str
    swapped: bool

    def run(self, x: Tensor) -> Tensor:
        # Both streams (2, B, 1, d) of a shared cache go through the MLP as rows.
        z = rows_of(x) if x.dim() > 3 else x
        halves = (
            [reader(z) for reader in self.readers]
            if len(self.readers) == 2
            else self.readers[0](z).chunk(2, -1)
        )
        gate, up = halves[::-1] if self.swapped else halves
        h = ops.gated_product(rows_of(gate), rows_of(up), self.activation)
        out: Tensor = self.down(like_rows_of(gate, h))
        return out if z is x else like_rows_of(x, out)


class FusedModules:
    """The modules of a model that our ops can run.

    Args:
        model: the attached model. blocks: its blocks, with their patched modules off.
    """

    def __init__(self, model: PreTrainedModel, blocks: Sequence[AttachedBlock]) -> None:
        with torch.no_grad():
            self._found: list[_Fused] = [*_norms_before(blocks), *_gated(blocks)]
            seen = {id(found.module) for found in self._found}
            self._found += [
                norm
                for norm in map(_norm, model.modules())
                if norm is not None and id(norm.module) not in seen
            ]

    def forwards(self) -> list[tuple[nn.Module, Forward]]:
        """The modules, each with the function that runs in place of its forward."""
        return [(found.module, found) for found in self._found]

    def blocks_with_norm_input(self) -> set[AttachedBlock]:
        """Blocks whose recorder gets its input from the fused pre-MLP norm."""
        return {found.block for found in self._found if isinstance(found, _NormBefore)}


def _norm(module: nn.Module) -> _Norm | None:
    """A module as an RMSNorm with a scale of ``w`` or ``1 + w``, if it is one."""
    weight = getattr(module, "weight", None)
    if (
        isinstance(module, PatchedModule)
        or not isinstance(weight, nn.Parameter)
        or weight.dim() != 1
        or not untouched(module)
    ):
        return None
    if not hasattr(module, "eps") and not hasattr(module, "variance_epsilon"):
        return None
    # the classes of transformers compute in fp32 even so, our op does not
    if weight.dtype == torch.float64:
        return None
    x = _trial(len(weight), weight, 1e-3)  # where eps shows
    try:
        form = rms_norm_form(module, x, module(x))
    except Exception:  # the module's own code takes other inputs: no RMSNorm
        return None
    if form is None:
        return None
    return _Norm(module, PatchedRMSNorm(module, scale_offset=form[0], cast_first=form[1]))


def _norms_before(blocks: Sequence[AttachedBlock]) -> Iterator[_NormBefore]:
    for block in blocks:
        side, _, path = block.spec.residual[0].partition(" of ")
        norm = (
            _norm(block.module.get_submodule(path))
            if side == "input" and path and len(block.spec.residual) == 1
            else None
        )
        if norm is not None:
            yield _NormBefore(norm.module, norm.patched, block)


def _gated(blocks: Sequence[AttachedBlock]) -> Iterator[_Gated]:
    for block in blocks:
        parent = str(block.spec.down).rpartition(".")[0]
        if block.down is None or block.experts is not None or not parent:
            continue
        module = block.module.get_submodule(parent)
        children = [child for child in module.children() if child is not block.down]
        readers = tuple(child for child in children if isinstance(child, (PatchedLinear, *LINEAR)))
        others = [child for child in children if child not in readers]
        activation = (
            _activation(others[0])
            if len(others) == 1 and len(readers) in (1, 2) and untouched(module)
            else None
        )
        if activation is None:
            continue
        x = _trial(_width(readers[0]), next(module.parameters()))
        found = (
            _Gated(module, readers, block.down, activation, swapped) for swapped in (False, True)
        )
        yield from (gated for gated in found if _same(gated, module, x))


def _width(reader: Any) -> int:
    """K, the number of input features of a linear module."""
    width: int = reader.in_features if hasattr(reader, "in_features") else reader.weight.shape[0]
    return width


def _activation(module: nn.Module) -> str | None:
    if any(True for _ in (*module.parameters(), *module.buffers())) or not untouched(module):
        return None
    x = torch.linspace(-8, 8, 161)
    limit = _ROUNDINGS * torch.finfo(x.dtype).eps * x.abs()  # of x: in GELU the result may cancel
    try:
        output = module(x)
    except Exception:  # the module's own code takes other inputs: not a known activation
        return None
    return next(
        (
            name
            for name, function in ACTIVATIONS.items()
            if bool(((output - function(x)).abs() <= limit).all())
        ),
        None,
    )


def _trial(width: int, like: Tensor, *scales: float) -> Tensor:
    """Three random rows for each of ``_SCALES`` and ``scales``, (M, width)."""
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    return torch.cat([scale * rows for scale in (*_SCALES, *scales)]).to(like.device, like.dtype)


def _same(fused: Forward, module: nn.Module, x: Tensor) -> bool:
    """Whether both give the same output up to rounding; rows that overflow are left out."""
    try:
        output, expected = fused(x), module(x)
    except Exception:  # the module's own code takes other inputs
        return False
    if (
        not isinstance(expected, Tensor)
        or output.shape != expected.shape
        or output.dtype != expected.dtype
    ):
        return False
    finite = expected.isfinite().all(-1)
    output, expected = output[finite].double(), expected[finite].double()
    near = (output - expected).abs().amax(-1) <= _ROUNDINGS * torch.finfo(
        x.dtype
    ).eps * expected.abs().amax(-1)
    return bool(near.all()) and len(near) >= len(x) // len(_SCALES)
