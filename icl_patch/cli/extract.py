"""``icl-patch extract``: the patch of a context as a file."""

import argparse
from typing import Any

from icl_patch.cli import common

HELP = "write the patch of a context to a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    common.add_prompt(parser)
    common.add_update(parser)
    parser.add_argument("--prefix", metavar="TEXT", help="tokens before the context that stay")
    common.add_out(parser)


def run(options: argparse.Namespace) -> int:
    """Compute the patch and save it."""
    common.check_out(options)
    model, tokenizer = common.load(options)
    from icl_patch.evaluation.loading import encode_contexts
    from icl_patch.models.prompts import make_prompt, own_front, split_ids

    prompt = make_prompt(
        tokenizer,
        options.question,
        context=common.context_text(options),
        system=options.system,
        chat=options.chat,
    )
    ids, kept = (x.to(model.device) for x in split_ids(tokenizer, prompt))
    prefix: dict[str, Any] = {}
    if options.prefix is not None:
        if prompt.chat:
            raise ValueError("expected no --prefix of a chat, which its template begins")
        prefix["prefix_ids"] = encode_contexts(tokenizer, [options.prefix])[0].to(model.device)
        if own_front(tokenizer):
            ids = ids[:, 1:]  # one sequence has one beginning, and it is in the prefix
    with common.attach(options, model, tokenizer) as patcher, common.stage("computing the patch"):
        patch = patcher.compute(ids, kept, **prefix)
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
