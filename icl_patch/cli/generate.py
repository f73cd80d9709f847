"""``icl-patch generate``: text from freshly patched weights at every token."""

import argparse
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from icl_patch.cli import arguments, inputs, output, progress
from icl_patch.generation.decode_mode import MODES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELP = "generate with freshly patched weights at every token"
# Options of patched steps, which a static patch has none of, and their defaults.
_OF_STEPS: dict[str, Any] = {"update": "exact", "keep_first": 0, "mode": "auto", "compile": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_model(parser)
    arguments.add_prompt(parser, "as for verify")
    arguments.add_update(parser)
    arguments.add_patch(
        parser,
        required=False,
        meaning="generate after the prompt with this static patch instead, as icl-patch fit writes"
        " it",
    )
    arguments.add_max_new_tokens(parser, 50, "at most N tokens")
    parser.add_argument(
        "--mode",
        choices=MODES,
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
    parser.set_defaults(**dict.fromkeys(_OF_STEPS))


def run(options: argparse.Namespace) -> int:
    """Generate; the text is printed as it comes, or with ``--json`` there is a bar."""
    if options.temperature is not None and not options.sample:
        raise ValueError("expected --sample with --temperature: without it, decoding is greedy")
    if options.patch is not None:
        arguments.refuse(options, tuple(_OF_STEPS), "with --patch")
        return _with_patch(options)
    for name, default in _OF_STEPS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    prompt = inputs.prompt_text(options)
    tokenizer = inputs.load_tokenizer(options)
    inputs.check_chat(options, tokenizer)
    model, _ = inputs.load(options, tokenizer)
    from icl_patch.cli.stream import PrintedText
    from icl_patch.evaluation.loading import default_context, encode_inputs

    prompt = default_context(model) if prompt is None else prompt
    ids, mask, _ = encode_inputs(model, tokenizer, prompt, options.chat, options.system)
    mode, token_ids = "", []
    streamer: Any = PrintedText(tokenizer, skip_prompt=True, skip_special_tokens=True)
    bar: Any = progress.progress_bar("generating", options) if options.json else nullcontext()
    with inputs.attach(options, model, tokenizer) as patcher:
        with progress.stage("reading the context", options):
            coming = patcher.generate(
                ids,
                context_mask=mask,
                max_new_tokens=options.max_new_tokens,
                streamer=None if options.json else streamer,
                keep_first=options.keep_first,
                mode=options.mode,
                compile=options.compile or "auto",
                **_choices(options, model, tokenizer),
            )
        with bar as update:
            for step in coming:
                mode = step.mode
                token_ids.append(int(step.token_ids[0]))
                if update is not None:
                    update(len(token_ids), options.max_new_tokens)
    result: dict[str, Any] = {
        "model": str(model.config.name_or_path),
        "update": options.update,
        "mode": mode,
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
    }
    output.print_result(options, result)
    return 0


def _choices(
    options: argparse.Namespace, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Any]:
    """The arguments of ``generate``: how tokens are chosen, and where a chat's answer ends."""
    from icl_patch.generation.settings import switched_off
    from icl_patch.models.ends import chat_ends

    ends = chat_ends(model, tokenizer, options.chat or options.system is not None)
    given = {} if options.temperature is None else {"temperature": options.temperature}
    return {"do_sample": options.sample, **given, **ends, **switched_off(model)}


def _with_patch(options: argparse.Namespace) -> int:
    """Generate with a static patch."""
    prompt = inputs.prompt_text(options)
    if prompt is None:
        raise ValueError("expected --context or --question with --patch")
    tokenizer = inputs.load_tokenizer(options)
    import torch

    from icl_patch.evaluation.loading import encode_contexts
    from icl_patch.models.language_model import check_length
    from icl_patch.models.model_checks import require_finite

    ids, _ = encode_contexts(tokenizer, [prompt], chat=options.chat, system=options.system)
    model, _, patch = inputs.load_static(options, tokenizer)
    front, in_chat = patch.info.front, options.chat or options.system is not None
    if front and not in_chat and int(ids[0, 0]) != front[0]:
        ids = torch.cat([torch.tensor([front], dtype=ids.dtype), ids], 1)
    check_length(model, ids.shape[1], options.max_new_tokens - 1)  # the last token is not run
    generate: Any = model.generate
    with patch.applied(model):
        out = generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids, device=model.device),
            max_new_tokens=options.max_new_tokens,
            tokenizer=tokenizer,  # for stop strings of the generation configuration
            output_logits=True,
            return_dict_in_generate=True,
            **_choices(options, model, tokenizer),
        )
        again = torch.no_grad()(partial(model, out.sequences[:, :-1]))
        require_finite(model, torch.stack(out.logits, 1), again)
    token_ids = out.sequences[0, ids.shape[1] :].tolist()
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True))
    result = {"patch": str(options.patch), "token_ids": token_ids, "text": text}
    output.print_result(options, result, text)
    return 0
