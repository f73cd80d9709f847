"""``icl-patch export``: a patch file as a LoRA folder for PEFT and vLLM."""

import argparse

from icl_patch.cli import common

HELP = "write a patch as a LoRA for PEFT and vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    common.add_patch(parser, meaning="as icl-patch extract or fit writes it")
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
    common.add_out(parser, "folder of the LoRA; it is made")


def run(options: argparse.Namespace) -> int:
    """Check the patch against the model and write the folder."""
    common.check_out(options)
    header = common.read_header(options)
    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.static import StaticPatch

    kind = header.get("kind")
    of_token = (options.row, options.token, options.scales)
    if kind == "static" and of_token != (None, None, False):
        raise ValueError(
            "expected no --row, --token or --scales of a static patch, which changes matrices for"
            " all tokens"
        )
    model, tokenizer = common.load_for_patch(options, header)
    said: list[str] = []
    if kind == "static":
        static = StaticPatch.load(options.patch, model, tokenizer)
        rank, said = static.to_peft(options.out, model), common.front_of(static, tokenizer)
    else:
        patch = ContextPatch.load(options.patch, model, tokenizer)
        row, token = options.row or 0, -1 if options.token is None else options.token
        rank = patch.to_peft(options.out, model, row=row, token=token, scales=options.scales)
    result = {"folder": str(options.out), "kind": kind, "rank": rank}
    common.print_result(options, result, f"{options.out}: a LoRA of rank {rank}", *said)
    return 0
