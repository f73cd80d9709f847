"""Assembling a patch: tokens and positions, factors of several calls, diagnostics."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.errors import ControllabilityError
from icl_patch.models.pipeline import stage_of
from icl_patch.patch.context_patch import PatchReport
from icl_patch.recording.attached_block import AttachedBlock, Factors, HasBlocks
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics, ControllabilityViolation

Violations = tuple[tuple[ControllabilityViolation, ...], ...]  # by block


def factors_of(recorders: Sequence[BlockRecorder]) -> tuple[Factors, ...]:
    """The factors that the recorders kept, with the norms' own scales."""
    layers = [(recorder.block, recorder.factors) for recorder in recorders]
    return tuple(layer | scales_of(block, layer) for block, layer in layers)


def scales_of(block: AttachedBlock, layer: Factors) -> Factors:
    """The scales m of the norms that have a new scale among the factors."""
    norms = block.norms.items()
    return {f"{name}.scale": norm.scale for name, norm in norms if f"{name}.new_scale" in layer}


def joined_layers(calls: list[tuple[Factors, ...]]) -> tuple[Factors, ...]:
    """The factors of several calls, token after token."""
    if len(calls) == 1:
        return calls[0]
    return tuple(
        {
            name: x if x.dim() == 1 else torch.cat([call[index][name] for call in calls], 1)
            for name, x in layer.items()
        }
        for index, layer in enumerate(calls[0])
    )


def report_of_all(
    attached: HasBlocks, calls: list[list[BlockDiagnostics]], device: torch.device
) -> PatchReport:
    """The report on the blocks of all ranks in every call, on ``device``.

    Raises:
        ControllabilityError: no change of the weights can have the effect; all ranks raise it.
    """
    names = [entry.name for entry in fields(PatchReport)]

    def report() -> dict[str, Tensor]:
        try:
            for token, call in enumerate(calls):
                for block in call:
                    block.check(token)
        except ControllabilityError as error:
            raise ControllabilityError(str(error), violations_of(calls, device)) from None
        return {
            name: torch.cat(
                [torch.stack([getattr(x.report, name).to(device) for x in call]) for call in calls],
                2,
            )
            for name in names
        }

    agree_on_violations(attached, calls)
    ranks, own = attached.ranks, attached.ranks.shared(report)
    if ranks.size == 1:
        return PatchReport(**own)
    parts = ranks.joined([own], device)
    if stage_of(attached.model) is None:  # of a part of each matrix
        return PatchReport(
            **{name: torch.stack([part[name] for part in parts]).amax(0) for name in names}
        )
    return PatchReport(**{name: torch.cat([part[name] for part in parts]) for name in names})


def agree_on_violations(attached: HasBlocks, calls: list[list[BlockDiagnostics]]) -> None:
    """Let ranks that share matrices refuse the same tokens: an input h is 0 if its parts on all
    ranks are, and a reader has to change if its part on some rank has.
    """
    if attached.ranks.size == 1 or stage_of(attached.model) is not None:
        return
    found = [x for call in calls for block in call for x in block.violations.values()]
    said = attached.ranks.exchange([(x.rows.cpu(), x.always.cpu()) for x in found])
    for violation, *parts in zip(found, *said, strict=True):
        combine = torch.any if violation.side == "input" else torch.all
        for own, ranks in zip(
            (violation.rows, violation.always), zip(*parts, strict=True), strict=True
        ):
            own.copy_(combine(torch.stack(ranks), 0))


def layers_of_all(
    attached: HasBlocks, layers: tuple[Factors, ...], device: torch.device
) -> tuple[Factors, ...]:
    """The whole factors of the blocks of all ranks, those of other ranks on ``device``."""
    ranks = attached.ranks
    if ranks.size == 1 or stage_of(attached.model) is not None:
        return tuple(ranks.joined(list(layers), device))
    parts = [
        {name: x for name, x in layer.items() if name in block.parted}
        for layer, block in zip(layers, attached.blocks, strict=True)
    ]
    joined, count = ranks.joined(parts, device), len(layers)

    def whole(name: str, parts: list[Tensor]) -> Tensor:
        x = torch.cat(parts, -1)
        return ops.read_direction(x, x.dtype).v if name.endswith(".v") else x  # v was h so far

    return tuple(
        {
            name: whole(name, [joined[k][name] for k in range(i, len(joined), count)])
            if name in parts[i]
            else x
            for name, x in layer.items()
        }
        for i, layer in enumerate(layers)
    )


def violations_of(calls: list[list[BlockDiagnostics]], device: torch.device) -> Violations:
    """Every condition that was looked at, by block, token after token, on ``device``."""

    def joined(parts: tuple[ControllabilityViolation, ...]) -> ControllabilityViolation:
        rows, always = (
            torch.cat([getattr(part, name).to(device) for part in parts], 1)
            for name in ("rows", "always")
        )
        return replace(parts[0], rows=rows, always=always)

    return tuple(
        tuple(
            joined(parts)
            for parts in zip(*(call.violations.values() for call in block), strict=True)
        )
        for block in zip(*calls, strict=True)
    )
