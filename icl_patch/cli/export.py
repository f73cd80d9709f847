"""``icl-patch export``: a patch file as a LoRA folder for PEFT and vLLM."""

import argparse
from pathlib import Path

from icl_patch.cli import common

HELP = "write a patch as a LoRA for PEFT and vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE")
    common.add_model(parser)
    parser.add_argument(
        "--row", type=int, metavar="R", help="row of a patch for each token (default 0)"
    )
    parser.add_argument(
        "--token", type=int, metavar="T", help="of a patch for each token: which (default -1)"
    )
    parser.add_argument(
        "--scales",
        action="store_true",
        help="of a patch for each token: write scales of norms as modules_to_save, for PEFT alone",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the LoRA; it is made"
    )


def run(options: argparse.Namespace) -> int:
    """Check the patch against the model and write the folder."""
    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.patch.serialization import read_file
    from icl_patch.static import StaticPatch

    kind = read_file(options.file)[0].get("kind")
    of_token = (options.row, options.token, options.scales)
    if kind == "static" and of_token != (None, None, False):
        raise ValueError(
            "expected no --row, --token or --scales of a static patch, which changes matrices for"
            " all tokens"
        )
    model, tokenizer = common.load(options)
    said: list[str] = []
    if kind == "static":
        static = StaticPatch.load(options.file, model, tokenizer)
        rank, said = static.to_peft(options.out, model), common.front_of(static, tokenizer)
    else:
        patch = ContextPatch.load(options.file, model, tokenizer)
        row, token = options.row or 0, -1 if options.token is None else options.token
        rank = patch.to_peft(options.out, model, row=row, token=token, scales=options.scales)
    result = {"folder": str(options.out), "kind": kind, "rank": rank}
    common.print_result(options, result, f"{options.out}: a LoRA of rank {rank}", *said)
    return 0
