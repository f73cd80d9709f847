"""``icl-patch inspect``: the contents of a patch file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icl_patch.cli import common

if TYPE_CHECKING:
    from icl_patch.patch.context_patch import ContextPatch

HELP = "read a patch file; with --model, check that it fits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, hub id, or 'embedded': check that the patch fits it, and show it as text",
    )
    common.add_revision_and_device(parser)
    parser.set_defaults(seed=0)


def run(options: argparse.Namespace) -> int:
    """Print the file's entries and the size of its changes, and check them against ``--model``."""
    if options.model is None and (options.revision, options.device) != (None, None):
        raise ValueError("expected --model with --revision or --device")
    common.check_patch_file(options.file)
    common.import_torch()
    with common.stage("importing transformers"):
        from icl_patch.evaluation.report import table
        from icl_patch.patch.context_patch import ContextPatch
        from icl_patch.patch.serialization import read_file

    if read_file(options.file)[0].get("kind") == "static":
        return _static(options)
    patch = ContextPatch.load(options.file)
    tokenizer = _tokenizer(options, patch)
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


def _tokenizer(options: argparse.Namespace, patch: "ContextPatch") -> Any:
    """A tokenizer or None: that of ``--model``, which the patch must fit, else the one that the
    patch was computed with if it is on this machine.
    """
    from transformers import AutoTokenizer

    from icl_patch.evaluation import embedded
    from icl_patch.patch.fingerprints import tokenizer_fingerprint
    from icl_patch.patch.serialization import DTYPES

    if options.model is not None:
        options.dtype = DTYPES[patch.info.dtype]
        model, tokenizer = common.load(options)
        patch.fitted_to(model, tokenizer)
        return tokenizer
    where = embedded.MODEL_DIR if patch.info.model == "embedded" else patch.info.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, local_files_only=True, trust_remote_code=False
        )
        patch.check_tokenizer(tokenizer_fingerprint(tokenizer))
    except (OSError, ValueError):
        return None
    return tokenizer


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
