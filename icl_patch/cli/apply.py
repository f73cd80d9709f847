"""``icl-patch apply``: a model with a static patch in its weights, as a folder."""

import argparse
from pathlib import Path

from icl_patch.cli import common

HELP = "write the model with a static patch in its weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE")
    common.add_model(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the model; it is made"
    )


def run(options: argparse.Namespace) -> int:
    """Merge the patch and save the model with its tokenizer."""
    from icl_patch.static import StaticPatch

    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"expected a folder to write the model to, got the file {options.out}")
    model, tokenizer = common.load(options)
    patch = StaticPatch.load(options.file, model, tokenizer)
    patch.merge(model).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    result = {"folder": str(options.out), "matrices": len(patch.changes), "rank": patch.rank}
    common.print_result(options, result, f"{options.out}: the model with {patch!r}")
    return 0
