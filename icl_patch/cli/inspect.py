"""``icl-patch inspect``: the contents of a patch file; with ``--model``, its replay."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icl_patch.cli import common

if TYPE_CHECKING:
    from icl_patch.patch.context_patch import ContextPatch

HELP = "read a patch file; with --model, check it and replay it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, hub id, or 'embedded': check that the patch fits it, and replay it",
    )
    common.add_revision_and_device(parser)
    parser.set_defaults(seed=0)


def run(options: argparse.Namespace) -> int:
    """Print the file's entries and the size of its changes, and replay it on ``--model``."""
    from icl_patch.evaluation.report import table
    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.patch.serialization import read_file

    if options.model is None and (options.revision, options.device) != (None, None):
        raise ValueError("expected --model with --revision or --device")
    if read_file(options.file)[0].get("kind") == "static":
        return _static(options)
    patch = ContextPatch.load(options.file)
    entries: dict[str, Any] = {
        "file": str(options.file),
        **vars(patch.info),
        "layers": len(patch.layers),
        "bytes": patch.nbytes,
        "kept_ids": patch.kept_ids.tolist(),
        "prefix_ids": patch.prefix_ids.tolist(),
    }
    norms = {
        name: size.double().flatten(1).mean(1).tolist() for name, size in patch.norms().items()
    }
    title = "Size of the change, mean over tokens: ‖ΔW‖, ‖Δm‖"
    rows = [[layer, *sizes] for layer, sizes in enumerate(zip(*norms.values(), strict=True))]
    shown: list[Any] = [
        table(str(options.file), ["entry", "value"], list(entries.items())),
        table(title, ["layer", *norms], rows),
    ]
    result = {**entries, "norms": norms}
    if options.model is not None:
        result["next_tokens"] = _replay(options, patch)
        shown.append(f"replayed, next token of each row: {result['next_tokens']}")
    common.print_result(options, result, *shown)
    return 0


def _static(options: argparse.Namespace) -> int:
    """Print a static patch's entries, its report and the size of its changes."""
    from icl_patch.evaluation.report import table
    from icl_patch.static import StaticPatch

    patch = StaticPatch.load(options.file)
    if options.model is not None:
        options.dtype = None
        patch.check_model(common.load(options)[0])
    norms = {path: float(change.dense().norm()) for path, change in patch.changes.items()}
    entries: dict[str, Any] = {"file": str(options.file), "kind": "static", **vars(patch.info)}
    entries |= {"rank": patch.rank, "bytes": patch.nbytes}
    report = None if patch.report is None else patch.report.to_json()
    shown: list[Any] = [
        table(str(options.file), ["entry", "value"], list(entries.items())),
        table("Size of the change", ["matrix", "‖ΔW‖"], list(norms.items())),
    ]
    result = {**entries, "norms": norms, "report": report}
    shown += [] if patch.report is None else [str(patch.report)]
    common.print_result(options, result, *shown)
    return 0


def _replay(options: argparse.Namespace, patch: "ContextPatch") -> list[str]:
    """The token that each row's replay chooses after its last kept token."""
    import torch

    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.patcher import ContextPatcher

    options.dtype = getattr(torch, patch.info.dtype.removeprefix("torch."))
    model, tokenizer = common.load(options)
    patch = ContextPatch.load(options.file, model, tokenizer)
    with ContextPatcher(model, patch.info.update, tokenizer=tokenizer) as patcher:
        logits = patcher.forward(patch.kept_ids, patch)
    last = patch.kept_mask.sum(1) - 1
    chosen = logits[torch.arange(len(last)), last].argmax(-1)
    return [str(tokenizer.decode([token_id])) for token_id in chosen.tolist()]
