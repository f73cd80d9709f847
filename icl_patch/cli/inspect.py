"""``icl-patch inspect``: the contents of a patch file."""

import argparse
from collections import defaultdict
from statistics import mean
from typing import TYPE_CHECKING, Any

from icl_patch.cli import arguments, inputs, output, progress

if TYPE_CHECKING:
    from icl_patch.patch.context_patch import ContextPatch

HELP = "read a patch file; with MODEL, check that it fits"
# how the patch was computed, for replays: only --json has them
_INTERNAL = ("passes", "longest", "divisible")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    meaning = (
        "local folder, hub id, or 'embedded': check that the patch fits it, and show it as text"
        " (default: no check)"
    )
    arguments.add_model(parser, meaning, of_patch=True)
    arguments.add_patch(parser, meaning="as icl-patch extract or fit writes it")


def run(options: argparse.Namespace) -> int:
    """Print the file's entries and the size of its changes, and check them against MODEL."""
    if options.model is None and (options.revision, options.device) != (None, None):
        raise ValueError("expected MODEL with --revision or --device, got none")
    with progress.stage("importing torch and transformers", options):
        from icl_patch.evaluation.report import table
        from icl_patch.patch.context_patch import ContextPatch
        from icl_patch.patch.serialization import read_file

    if read_file(options.patch)[0].get("kind") == "static":
        return _static(options)
    patch = ContextPatch.load(options.patch)
    tokenizer = _tokenizer(options, patch)
    entries: dict[str, Any] = {
        "file": str(options.patch),
        **vars(patch.info),
        "layers": len(patch.layers),
        "bytes": patch.nbytes,
        **_texts(patch, tokenizer),
    }
    norms = {
        name: size.double()[:, patch.kept_mask].mean(1).tolist()
        for name, size in patch.norms().items()
    }
    title = "Size of the change, mean over tokens: ‖ΔW‖, ‖Δm‖"
    rows = [[*row] for row in zip(patch.layer_indices, *norms.values(), strict=True)]
    ids = {name: getattr(patch, name).tolist() for name in ("kept_ids", "prefix_ids")}
    output.print_result(
        options,
        {**entries, **ids, "layer_indices": list(patch.layer_indices), "norms": norms},
        table(
            str(options.patch),
            ["entry", "value"],
            [entry for entry in entries.items() if entry[0] not in _INTERNAL],
        ),
        table(title, ["layer", *norms], rows),
    )
    return 0


def _static(options: argparse.Namespace) -> int:
    """Print a static patch's entries, its report and a summary of the sizes of its changes."""
    from icl_patch.evaluation.report import table
    from icl_patch.static import StaticPatch

    patch = StaticPatch.load(options.patch)
    if options.model is not None:
        inputs.use_patch(options, patch.info)
        patch.check_model(inputs.load(options)[0])
    norms = {path: float(change.norm()) for path, change in patch.changes.items()}
    entries: dict[str, Any] = {"file": str(options.patch), "kind": "static", **vars(patch.info)}
    entries |= {"rank": patch.rank, "bytes": patch.nbytes}
    report = patch.report
    output.print_result(
        options,
        {**entries, "norms": norms, "report": None if report is None else report.to_json()},
        table(str(options.patch), ["entry", "value"], list(entries.items())),
        table(
            "Size of the change, ‖ΔW‖, by kind of matrix; --json has each",
            ["matrix", "changed", "smallest", "mean", "largest", "of"],
            _summary(norms),
        ),
        *([] if report is None else [str(report)]),
    )
    return 0


def _summary(norms: dict[str, float]) -> list[list[Any]]:
    """A row for each kind of matrix: its last names, how many there are, and their sizes."""
    kinds = defaultdict[str, list[str]](list)
    for path in norms:
        kinds[".".join(path.rsplit(".", 2)[1:])].append(path)
    rows = []
    for kind, paths in kinds.items():
        sizes = [norms[path] for path in paths]
        largest = max(paths, key=lambda path: norms[path])
        rows.append([kind, len(paths), min(sizes), mean(sizes), norms[largest], largest])
    return rows


def _tokenizer(options: argparse.Namespace, patch: "ContextPatch") -> Any:
    """A tokenizer or None: that of MODEL, which the patch must fit, else the one that the
    patch was computed with if it is on this machine.
    """
    from transformers import AutoTokenizer

    from icl_patch.evaluation import embedded
    from icl_patch.patch.fingerprints import tokenizer_fingerprint

    if options.model is not None:
        inputs.use_patch(options, patch.info)
        model, tokenizer = inputs.load(options)
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
            f"{int(mask.sum())} tokens; with MODEL they are shown as text"
            if tokenizer is None
            else [str(tokenizer.decode(row)) for row in rows]
        )
    return found
