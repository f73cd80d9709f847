"""Assembling a patch: the factors of all blocks, the report on them, the digest of its replay."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from icl_patch.errors import ControllabilityError
from icl_patch.invariance.arithmetic import rounding_dtype
from icl_patch.models.pipeline import stage_of
from icl_patch.patch.context_patch import ContextPatch, PatchReport
from icl_patch.patch.logit_digest import LogitDigest
from icl_patch.recording.attached_block import AttachedBlock, Factors, HasBlocks, joined
from icl_patch.recording.block_math import read_direction
from icl_patch.recording.diagnostics import BlockDiagnostics, ControllabilityViolation

Violations = tuple[tuple[ControllabilityViolation, ...], ...]  # by block


def filled(
    attached: HasBlocks,
    patch: ContextPatch,
    layers: tuple[Factors, ...],
    calls: list[list[BlockDiagnostics]],
    logits: Tensor | None,
    valid: Tensor,
    *,
    identical: bool,
) -> tuple[ContextPatch, Violations]:
    """A patch with its factors, its report and the digest of its replay; and every condition that
    was looked at.

    Args:
        patch: without these.
        layers: the factors of the blocks on this rank, of all tokens.
        calls: the blocks' diagnostics in every call of the model.
        logits: those of the replay, (B, T, V); None for no digest.
        valid: (B, T) bool, the tokens that have a patch.
        identical: whether the replay is to have all bits of the run with the context.

    Raises:
        ControllabilityError: no change of the weights can have the effect; all ranks raise it.
    """
    device = patch.kept_ids.device
    report, violations = report_of_all(attached, calls, device)
    patch = replace(patch, layers=layers_of_all(attached, layers, device), report=report)
    if logits is None:
        return patch, violations
    dtype = rounding_dtype(patch.info.arithmetic, attached.model)
    digest = LogitDigest.of(logits, valid, dtype, identical=identical)
    return patch.with_digest(digest), violations


def scales_of(block: AttachedBlock, layer: Factors) -> Factors:
    """The scales m of the norms that have a new scale among the factors."""
    norms = block.norms.items()
    return {f"{name}.scale": norm.scale for name, norm in norms if f"{name}.new_scale" in layer}


def report_of_all(
    attached: HasBlocks, calls: list[list[BlockDiagnostics]], device: torch.device
) -> tuple[PatchReport, Violations]:
    """The report on the blocks of all ranks in every call, and every condition that was looked at,
    on ``device``.

    Raises:
        ControllabilityError: no change of the weights can have the effect; all ranks raise it.
    """
    blocks = tree_map_only(Tensor, lambda x: x.to(device), joined(calls))
    agree_on_violations(attached, blocks)
    violations = tuple(tuple(block.violations.values()) for block in blocks)

    def report() -> dict[str, Tensor]:
        try:
            for block in blocks:
                block.check()
        except ControllabilityError as error:
            raise ControllabilityError(str(error), violations) from None
        stacked = tree_map(lambda *x: torch.stack(x), *[block.report for block in blocks])
        return dict(vars(stacked))

    ranks = attached.ranks
    parts = ranks.joined([ranks.shared(report)], device)
    shared = ranks.size > 1 and stage_of(attached.model) is None  # each has a part of each matrix
    join = (lambda x: torch.stack(x).amax(0)) if shared else torch.cat
    report_of = {name: join([part[name] for part in parts]) for name in parts[0]}
    return PatchReport(**report_of), violations


def agree_on_violations(attached: HasBlocks, blocks: list[BlockDiagnostics]) -> None:
    """Let ranks that share matrices refuse the same tokens: an input h is 0 if its parts on all
    ranks are, and a reader has to change if its part on some rank has.
    """
    if attached.ranks.size == 1 or stage_of(attached.model) is not None:
        return
    found = [x for block in blocks for x in block.violations.values()]
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
    of_ranks = [joined[block::count] for block in range(count)]

    def whole(name: str, parts: list[Tensor]) -> Tensor:
        x = torch.cat(parts, -1)
        return read_direction(x, x.dtype).v if name.endswith(".v") else x  # v was h so far

    return tuple(
        layer | {name: whole(name, [part[name] for part in parts]) for name in parts[0]}
        for layer, parts in zip(layers, of_ranks, strict=True)
    )
