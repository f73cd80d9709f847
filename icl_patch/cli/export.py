"""``icl-patch export``: a static patch as a LoRA folder for PEFT and vLLM."""

import argparse

from icl_patch.cli import common

HELP = "write a static patch as a LoRA for PEFT and vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    common.add_patch(parser, meaning="a static patch, as icl-patch fit writes it")
    common.add_out(parser, "folder of the LoRA; it is made")


def run(options: argparse.Namespace) -> int:
    """Check the patch against the model and write the folder."""
    common.check_out(options)
    model, tokenizer, patch = common.load_static(options)
    rank = patch.to_peft(options.out, model)
    result = {"folder": str(options.out), "kind": "static", "rank": rank}
    said = common.front_of(patch, tokenizer)
    common.print_result(options, result, f"{options.out}: a LoRA of rank {rank}", *said)
    return 0
