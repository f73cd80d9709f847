"""``icl-patch extract``: the patch of a context as a file."""

import argparse
from typing import Any

from icl_patch.cli import common

HELP = "write the patch of a context to a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    common.add_context(parser, "required", required=True)
    common.add_update(parser)
    parser.add_argument(
        "--kept",
        required=True,
        metavar="TEXT",
        help="the tokens that are to run without the context",
    )
    parser.add_argument("--prefix", metavar="TEXT", help="tokens before the context that stay")
    common.add_out(parser)


def run(options: argparse.Namespace) -> int:
    """Compute the patch and save it."""
    model, tokenizer = common.load(options)
    import torch

    from icl_patch.evaluation.loading import encode_contexts

    context = common.context_text(options)
    assert context is not None
    prefix: dict[str, Any] = {}
    if options.prefix is not None:
        prefix["prefix_ids"] = encode_contexts(tokenizer, [options.prefix])[0].to(model.device)
    ids, _ = encode_contexts(tokenizer, [context], chat=options.chat)
    if prefix and tokenizer.bos_token_id is not None and ids[0, 0] == tokenizer.bos_token_id:
        ids = ids[:, 1:]  # one sequence has one beginning, and it is in the prefix
    kept = torch.tensor(
        [tokenizer(options.kept, add_special_tokens=False)["input_ids"]],
        device=model.device,
        dtype=torch.int64,
    )
    with common.attach(options, model, tokenizer) as patcher, common.stage("computing the patch"):
        patch = patcher.compute(ids.to(model.device), kept, **prefix)
        patch.save(options.out)
    result = {
        "file": str(options.out),
        **vars(patch.info),
        "context_tokens": ids.shape[1],
        "kept_tokens": kept.shape[1],
        "bytes": patch.nbytes,
        "layers": len(patch.layers),
    }
    common.print_result(options, result, f"{options.out}: {patch!r}")
    return 0
