"""``icl-patch replay``: a patch file's kept tokens without their context, each with its own changed
weights.
"""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from icl_patch.cli import arguments, inputs, output, progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from icl_patch.patch.context_patch import ContextPatch

HELP = "run the kept tokens of a patch file with their changed weights, without the context"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_model(parser, of_patch=True)
    arguments.add_patch(parser, meaning="as icl-patch extract writes it")


def run(options: argparse.Namespace) -> int:
    """Print which token follows each kept token: without its context, and with its patch too."""
    with progress.stage("importing torch and transformers", options):
        from icl_patch.evaluation.report import table, without_context
        from icl_patch.patch.context_patch import ContextPatch
        from icl_patch.patcher import ContextPatcher

    patch = ContextPatch.load(options.patch)
    inputs.use_patch(options, patch.info)
    model, tokenizer = inputs.load(options)
    patch = patch.fitted_to(model, tokenizer)
    without = _next_without_context(model, patch)
    with (
        progress.stage("attaching and replaying", options),
        ContextPatcher(model, patch.info.update, tokenizer=tokenizer) as patcher,
    ):
        following = patcher.forward(patch.kept_ids, patch).argmax(-1)

    def texts(ids: Any) -> list[str]:
        return [str(tokenizer.decode([token])) for token in ids.tolist()]

    rows: list[dict[str, Any]] = [
        {
            "front": str(tokenizer.decode(patch.prefix_ids[row][patch.prefix_mask[row]])),
            "kept": texts(patch.kept_ids[row][kept]),
            "without": texts(without[row]),
            "replayed": texts(following[row][kept]),
        }
        for row, kept in enumerate(patch.kept_mask)
    ]
    shown = [
        table(
            f"{options.patch}, row {number}",
            ["kept token", f"next {without_context(front)}", "next with its change of weights"],
            [list(map(repr, tokens)) for tokens in zip(*columns, strict=True)],
        )
        for number, (front, *columns) in enumerate(row.values() for row in rows)
    ]
    output.print_result(options, {"patch": str(options.patch), "rows": rows}, *shown)
    return 0


def _next_without_context(model: "PreTrainedModel", patch: "ContextPatch") -> list[Any]:
    """The likeliest next token (T,) int64 after each kept token of each row, by the unpatched model
    without the context, on the tokens that a replay has: those that stay in front, and the kept.
    """
    import torch

    from icl_patch.models.model_checks import require_finite

    found = []
    for row, kept in enumerate(patch.kept_mask):
        prefix = patch.prefix_ids[row][patch.prefix_mask[row]]
        ids = torch.cat([prefix, patch.kept_ids[row][kept]])[None].to(model.device)
        with torch.no_grad():
            logits = model(ids).logits
            require_finite(model, logits, partial(model, ids))
        found.append(logits[0, len(prefix) :].argmax(-1))
    return found
