"""``icl-patch generate``: text from freshly patched weights at every token."""

import argparse
from contextlib import ExitStack, nullcontext
from typing import Any

from icl_patch.cli import common

HELP = "generate with freshly patched weights at every token"
# As in generation.loop, which imports torch.
MODES = ("auto", "two_pass", "two_stream", "shared_cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_model(parser)
    common.add_prompt(parser, "as for verify")
    common.add_update(parser)
    common.add_patch(
        parser,
        required=False,
        meaning="generate after the prompt with the changed weights of this file instead, the same"
        " at every token",
    )
    common.add_max_new_tokens(parser, 50, "at most N tokens")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="auto",
        help="how a step runs the tokens with and without the context (default: auto, the fastest)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step, in seconds to minutes",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="sample, as the model's generation configuration says (default: greedy)",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="with --sample: of the softmax"
    )


def run(options: argparse.Namespace) -> int:
    """Generate; the text is printed as it comes, or with ``--json`` there is a bar."""
    if options.temperature is not None and not options.sample:
        raise ValueError("expected --sample with --temperature")
    if options.patch is not None:
        return _with_patch(options)
    model, tokenizer = common.load(options)
    from transformers import TextStreamer

    from icl_patch.evaluation.loading import default_context, encode_inputs

    prompt = common.prompt_text(options)
    prompt = default_context(model) if prompt is None else prompt
    ids, mask, _ = encode_inputs(model, tokenizer, prompt, options.chat, options.system)
    mode, token_ids = "", []
    streamer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    bar: Any = common.progress_bar("generating") if options.json else nullcontext()
    with common.attach(options, model, tokenizer) as patcher:
        with common.stage("reading the context"):
            coming = patcher.generate(
                ids,
                context_mask=mask,
                max_new_tokens=options.max_new_tokens,
                streamer=None if options.json else streamer,
                mode=options.mode,
                compile=options.compile,
                **_sampling(options),
            )
        with bar as progress:
            for step in coming:
                mode = step.mode
                token_ids.append(int(step.token_ids[0]))
                if progress is not None:
                    progress(len(token_ids), options.max_new_tokens)
    result: dict[str, Any] = {
        "model": str(model.config.name_or_path),
        "update": options.update,
        "mode": mode,
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
    }
    common.print_result(options, result)
    return 0


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``generate`` that ``--sample`` and ``--temperature`` give."""
    given = {} if options.temperature is None else {"temperature": options.temperature}
    return {"do_sample": options.sample, **given}


def _with_patch(options: argparse.Namespace) -> int:
    """Generate with a patch file: a static patch, or the last token's of one for each token."""
    prompt = common.prompt_text(options)
    if prompt is None or options.compile:
        raise ValueError("expected --context or --question, and no --compile, with --patch")
    header = common.read_header(options)
    import torch

    from icl_patch.evaluation.loading import encode_contexts
    from icl_patch.patch.context_patch import ContextPatch
    from icl_patch.patcher import ContextPatcher
    from icl_patch.static import StaticPatch

    model, tokenizer = common.load_for_patch(options, header)
    ids, _ = encode_contexts(tokenizer, [prompt], chat=options.chat, system=options.system)
    with ExitStack() as stack:
        if header.get("kind") == "static":
            static = StaticPatch.load(options.patch, model, tokenizer)
            stack.enter_context(static.applied(model))
            front = static.info.front
            in_chat = options.chat or options.system is not None
            if front and not in_chat and int(ids[0, 0]) != front[0]:
                ids = torch.cat([torch.tensor([front], dtype=ids.dtype), ids], 1)
        else:
            patch = ContextPatch.load(options.patch, model, tokenizer)
            kept = patch.kept_ids[0][patch.kept_mask[0]].tolist()
            if ids[0, -len(kept) :].tolist() != kept:
                raise ValueError(
                    "expected a prompt that ends with the tokens of the patch, each of which has"
                    f" changes of its own, {tokenizer.decode(kept)!r}, got"
                    f" {tokenizer.decode(ids[0])!r}: icl-patch replay runs these tokens,"
                    " icl-patch fit makes a patch for other prompts"
                )
            patcher = stack.enter_context(ContextPatcher(model, patch.info.update))
            stack.enter_context(patcher.applied(patch))
        generate: Any = model.generate
        out = generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids, device=model.device),
            max_new_tokens=options.max_new_tokens,
            **_sampling(options),
        )
    token_ids = out[0, ids.shape[1] :].tolist()
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True))
    result = {"patch": str(options.patch), "token_ids": token_ids, "text": text}
    common.print_result(options, result, text)
    return 0
