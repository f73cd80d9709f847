"""The changes of parameters that a block's factors describe: their sizes and their matrices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from icl_patch.models.block_spec import BlockSpec
from icl_patch.patch.low_rank import LowRank


@dataclass(frozen=True, eq=False)
class ParameterChange:
    """The change of one module's parameters, for B x T tokens.

    Attributes:
        name: the module's path in its block; for experts it includes the parameter's name.
        parameter: the changed parameter's name in the module, "" for experts.
        u, v: the factors of ``W + u vᵀ``; v is None if ``u`` itself is the change of a bias or a
            scale.
        index: (B, T, k), the experts with changed matrices; u and v then have a slot for each
            expert, or one that all share.
        transposed: whether the matrix is stored as (in, out).
    """

    name: str
    parameter: str
    u: Tensor
    v: Tensor | None = None
    index: Tensor | None = None
    transposed: bool = False

    def size(self) -> Tensor:
        """``‖u‖ ‖v‖``, ``‖Δb‖`` or ``‖Δm‖``: (B, T)."""
        u, v = self.in_slots()
        size = u.norm(dim=-1) if v is None else u.norm(dim=-1) * v.norm(dim=-1)
        return size if self.index is None else size.norm(dim=-1)

    def low_rank(self) -> LowRank:
        """``u vᵀ`` of B x T tokens, with a slot for each expert; a vector has ``v = 1``."""
        u, v = self.in_slots()
        v = torch.ones_like(u[..., :1]) if v is None else v
        if self.index is None:
            u, v = u.unsqueeze(-2), v.unsqueeze(-2)
        return LowRank(u, v, self.index)

    def in_slots(self) -> tuple[Tensor, Tensor | None]:
        """``u`` and ``v``; for experts with a slot for each: (B, T, k, ·)."""
        u = self._slots(self.u)
        assert u is not None
        return u, self._slots(self.v)

    def _slots(self, x: Tensor | None) -> Tensor | None:
        """A factor that all slots share, once a slot."""
        if x is None or self.index is None or x.dim() == 4:
            return x
        return x.unsqueeze(2).expand(-1, -1, self.index.shape[2], -1)

    def materialised(self, row: int, token: int) -> Iterator[tuple[str, Tensor]]:
        """The changed parameters of one token by name, and their changes. ``name[e]`` is the e-th
        matrix of an experts' parameter.
        """
        if self.index is None:
            v = None if self.v is None else self.v[row, token]
            yield f"{self.name}.{self.parameter}", self._product(self.u[row, token], v)
            return
        u, v = self.in_slots()
        for slot, expert in enumerate(self.index[row, token].tolist()):
            read = None if v is None else v[row, token, slot]
            yield f"{self.name}[{expert}]", self._product(u[row, token, slot], read)

    def _product(self, u: Tensor, v: Tensor | None) -> Tensor:
        if v is None:
            return u
        return torch.outer(v.to(u.dtype), u) if self.transposed else torch.outer(u, v.to(u.dtype))


def parameter_changes(spec: BlockSpec, layer: Mapping[str, Tensor]) -> Iterator[ParameterChange]:
    """The changes that a block's factors describe, in the order of its modules."""

    def read_by(part: str) -> Tensor:
        return layer[f"{part}.v" if part in spec.separately_normed else "readers.v"]

    for reader in spec.readers:
        u, transposed = layer[f"{reader}.u"], reader in spec.transposed
        yield ParameterChange(reader, "weight", u, read_by(reader), transposed=transposed)
    if spec.experts is not None:
        path, index = spec.experts, layer[f"{spec.experts}.index"]
        transposed = path in spec.transposed
        read, written = f"{path}.gate_up_proj", f"{path}.down_proj"
        if spec.reads:
            u = layer[f"{read}.u"]
            yield ParameterChange(read, "", u, read_by(path), index, transposed)
        if f"{written}.bias_change" in layer:
            bias = layer[f"{written}.bias_change"]
            yield ParameterChange(f"{written}_bias", "", bias, None, index)
        if f"{written}.u" in layer:
            u, v = layer[f"{written}.u"], layer[f"{written}.v"]
            yield ParameterChange(written, "", u, v, index, transposed)
    down = str(spec.down)
    if f"{down}.bias_change" in layer:
        yield ParameterChange(down, "bias", layer[f"{down}.bias_change"])
    if f"{down}.u" in layer:
        u, v, transposed = layer[f"{down}.u"], layer[f"{down}.v"], down in spec.transposed
        yield ParameterChange(down, "weight", u, v, transposed=transposed)
    for norm in (spec.inner_norm, spec.post_norm):
        if f"{norm}.new_scale" in layer:
            change = layer[f"{norm}.new_scale"] - layer[f"{norm}.scale"]
            yield ParameterChange(str(norm), "weight", change)
