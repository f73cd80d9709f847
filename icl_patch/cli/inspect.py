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
    if options.model is None and (options.revision, options.device) != (None, None):
        raise ValueError("expected --model with --revision or --device")
    _check_file(options.file)
    common.import_torch()
    with common.stage("importing transformers"):
        from icl_patch.evaluation.report import table
        from icl_patch.patch.context_patch import ContextPatch
        from icl_patch.patch.serialization import read_file

    if read_file(options.file)[0].get("kind") == "static":
        return _static(options)
    patch = ContextPatch.load(options.file)
    model, tokenizer = _load(options, patch)
    entries: dict[str, Any] = {
        "file": str(options.file),
        **vars(patch.info),
        "layers": len(patch.layers),
        "bytes": patch.nbytes,
        **_texts(patch, tokenizer),
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
    ids = {name: getattr(patch, name).tolist() for name in ("kept_ids", "prefix_ids")}
    result = {**entries, **ids, "norms": norms}
    if model is not None:
        result["next_tokens"] = _replay(options, model, tokenizer)
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


def _check_file(path: Path) -> None:
    if path.is_dir():
        held = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))[:3]) or "none"
        raise ValueError(f"expected a patch file, got the folder {path}; files there: {held}")
    if not path.exists():
        raise ValueError(f"expected a patch file, there is no {path}: icl-patch extract writes one")


def _load(options: argparse.Namespace, patch: "ContextPatch") -> tuple[Any, Any]:
    """The model of ``--model`` or None, and a tokenizer or None: the model's, else the one that the
    patch was computed with if it is on this machine.
    """
    import torch
    from transformers import AutoTokenizer

    from icl_patch.evaluation import embedded
    from icl_patch.patch.fingerprints import tokenizer_fingerprint

    if options.model is not None:
        options.dtype = getattr(torch, patch.info.dtype.removeprefix("torch."))
        return common.load(options)
    where = embedded.MODEL_DIR if patch.info.model == "embedded" else patch.info.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, local_files_only=True, trust_remote_code=False
        )
        patch.check_tokenizer(tokenizer_fingerprint(tokenizer))
    except (OSError, ValueError):
        return None, None
    return None, tokenizer


def _texts(patch: "ContextPatch", tokenizer: Any) -> dict[str, Any]:
    """The prefix and the kept tokens of each row as text, as far as there is a tokenizer."""
    found: dict[str, Any] = {}
    for name in ("prefix", "kept"):
        ids, mask = getattr(patch, f"{name}_ids"), getattr(patch, f"{name}_mask")
        if not ids.numel():
            continue
        rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        found[f"{name}_text"] = (
            f"{int(mask.sum())} tokens; --model MODEL shows them as text"
            if tokenizer is None
            else [str(tokenizer.decode(row)) for row in rows]
        )
    return found


def _replay(options: argparse.Namespace, model: Any, tokenizer: Any) -> list[str]:
    """The token that each row's replay chooses after its last kept token."""
    import torch

    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.patcher import ContextPatcher

    patch = ContextPatch.load(options.file, model, tokenizer)
    with (
        common.stage("attaching and replaying"),
        ContextPatcher(model, patch.info.update, tokenizer=tokenizer) as patcher,
    ):
        logits = patcher.forward(patch.kept_ids, patch)
    last = patch.kept_mask.sum(1) - 1
    chosen = logits[torch.arange(len(last)), last].argmax(-1)
    return [str(tokenizer.decode([token_id])) for token_id in chosen.tolist()]
