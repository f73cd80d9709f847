"""``icl-patch export``: a static patch as a LoRA folder for PEFT and vLLM."""

import argparse

from icl_patch.cli import arguments, inputs, output

HELP = "write a static patch as a LoRA for PEFT and vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_model(parser)
    arguments.add_patch(parser, meaning="a static patch, as icl-patch fit writes it")
    arguments.add_out(parser, "folder of the LoRA; it is made")


def run(options: argparse.Namespace) -> int:
    """Check the patch against the model and write the folder."""
    arguments.check_out(options)
    arguments.check_apart(options, "config.json", "a model")
    model, tokenizer, patch = inputs.load_static(options)
    rank = patch.to_peft(options.out, model)
    result = {"folder": str(options.out), "kind": "static", "rank": rank}
    said = inputs.front_of(patch, tokenizer)
    output.print_result(options, result, f"{options.out}: a LoRA of rank {rank}", *said)
    return 0
