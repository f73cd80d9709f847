"""``icl-patch extract``: the patch of a context as a file, or of every row of a data set."""

import argparse
import os
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from icl_patch.cli import arguments, inputs, output, progress

if TYPE_CHECKING:
    from torch import Tensor

    from icl_patch.patcher import ContextPatcher
    from icl_patch.scale import Plan, Share

HELP = "write the patch of a context to a file, or the patches of a data set to a folder"
_OF_ONE = ("question", "max_new_tokens", "force")
_OF_MANY = (
    "context_column",
    "system_column",
    "kept_column",
    "layers",
    "factors_dtype",
    "statistics",
    "batch_size",
    "batch_tokens",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_model(parser)
    source = arguments.add_prompt(parser)
    arguments.add_update(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=arguments.positive,
        metavar="N",
        help="let the model answer with at most N tokens, and patch the answer's tokens too, as"
        " ContextPatcher.ask does (default: the patch is of the question's tokens alone)",
    )
    meaning = "file to write (.safetensors); with --dataset the folder"
    arguments.add_out(parser, meaning, metavar="FILE|FOLDER")
    many = parser.add_argument_group(
        "data sets", "a patch for every row; the same command goes on with a stopped run"
    )
    arguments.add_dataset(many, source)
    many.add_argument(
        "--layers", type=_layers, metavar="START:STOP", help="keep these blocks only, from 0"
    )
    many.add_argument(
        "--factors-dtype",
        choices=["bf16"],
        help="round the factors; the index has the error of each replay (default: as computed)",
    )
    many.add_argument(
        "--statistics",
        action="store_true",
        default=None,
        help="write norms, ranks and sums of the changes into the index, and no factors",
    )
    many.add_argument(
        "--batch-size", type=arguments.positive, metavar="N", help="rows at once (default 16)"
    )
    many.add_argument(
        "--batch-tokens", type=arguments.positive, metavar="N", help="tokens at once (default 8192)"
    )


def run(options: argparse.Namespace) -> int:
    """Compute one patch or many, and save them."""
    if options.dataset is not None:
        arguments.refuse(options, _OF_ONE, "with --dataset")
        return _extract_many(options)
    arguments.refuse(options, _OF_MANY, "without --dataset")
    arguments.writable(".safetensors")(str(options.out))
    return _extract_one(options)


def _extract_one(options: argparse.Namespace) -> int:
    inputs.check_question(options)
    arguments.check_out(options)
    tokenizer = inputs.load_tokenizer(options)
    import torch

    from icl_patch.models.prompts import split_ids

    prompt = inputs.read_prompt(options, tokenizer)
    parts = split_ids(tokenizer, prompt)
    model, _ = inputs.load(options, tokenizer)
    ids, kept = (part.to(model.device) for part in parts)
    with inputs.attach(options, model, tokenizer) as patcher:
        answer = _answer(options, patcher, torch.cat([ids, kept], 1), prompt.chat)
        kept = torch.cat([kept, answer[:, :-1]], 1)  # the last token has no next one
        with progress.stage("computing the patch", options):
            patch = patcher.compute(ids, kept, keep_first=options.keep_first)
            patch.save(options.out)
    text = tokenizer.decode(answer[0], skip_special_tokens=True)
    result = {
        "file": str(options.out),
        **vars(patch.info),
        "context_tokens": ids.shape[1],
        "kept_tokens": kept.shape[1],
        "bytes": patch.nbytes,
        "layers": len(patch.layers),
        "answer": text if answer.numel() else None,
    }
    said = f"answer (its tokens are patched too): {text!r}"
    if not answer.numel():
        said = "of the question alone: --max-new-tokens patches the model's answer too"
    output.print_result(options, result, f"{options.out}: {patch!r}", said)
    return 0


def _answer(
    options: argparse.Namespace, patcher: "ContextPatcher", ids: "Tensor", chat: bool
) -> "Tensor":
    """The tokens (1, N) of the answer to a prompt (1, T), chosen as ``ask`` does; without
    ``--max-new-tokens`` none.
    """
    import torch

    from icl_patch.generation.settings import switched_off
    from icl_patch.models.ends import chat_ends

    if options.max_new_tokens is None:
        return ids[:, :0]
    assert patcher.tokenizer is not None
    choices = chat_ends(patcher.model, patcher.tokenizer, chat) | switched_off(patcher.model)
    choices |= {"context_mask": torch.ones_like(ids), "max_new_tokens": options.max_new_tokens}
    with progress.progress_bar("answering", options) as update:
        found = []
        for step in patcher.generate(ids, mode="two_pass", **choices):
            found.append(step.token_ids)
            update(len(found), options.max_new_tokens)
    return torch.stack(found, 1)


def _extract_many(options: argparse.Namespace) -> int:
    """The patches of a data set; 1 if some rows have none."""
    torch = progress.import_torch()
    columns = inputs.dataset_columns(options)
    from icl_patch import scale

    contents = scale.Contents(
        layers=options.layers or slice(None),
        factors_dtype=torch.bfloat16 if options.factors_dtype else None,
        statistics=bool(options.statistics),
        keep_first=options.keep_first,
    )
    sizes = {"rows": options.batch_size, "tokens": options.batch_tokens}
    batching = scale.Batching(**{name: size for name, size in sizes.items() if size is not None})
    share = scale.Share.from_environment()
    options.device = _own_device(options.device)

    def say(plan: "Plan") -> None:
        if share.rank == 0:
            print(plan, file=sys.stderr)

    tokenizer = inputs.load_tokenizer(options)
    inputs.check_prompts(tokenizer, columns)
    model, _ = inputs.load(options, tokenizer)
    quiet = nullcontext(lambda done, total: None)
    bar = progress.progress_bar("extracting", options) if share.rank == 0 else quiet
    with inputs.attach(options, model, tokenizer) as patcher, bar as update:
        summary = scale.extract_dataset(
            patcher,
            options.dataset,
            options.out,
            columns,
            contents=contents,
            batching=batching,
            share=share,
            on_plan=say,
            progress=update,
        )
    plan = vars(summary.plan) | {"folder": str(options.out), "bytes": summary.plan.nbytes}
    rejects = None if summary.rejects is None else str(summary.rejects)
    result = {**vars(summary), "plan": plan, "share": vars(share), "rejects": rejects}
    text = f"{options.out}: {summary.patches} patches written"
    if share.world_size > 1:
        text += f" by process {share.rank} of {share.world_size}"
    if summary.largest_replay_error is not None:
        text += f", largest error of a replay {summary.largest_replay_error:.2g} of its logits"
    if summary.rejected:
        text += f"; rows without a patch: {summary.rejected}, for the reasons in {rejects}"
    output.print_result(options, result, text)
    _await_others(share)
    return 1 if summary.rejected else 0


def _await_others(share: "Share") -> None:
    """Wait for the other processes of torchrun, which ends them all when one has a status that is
    not 0: the one of a process with rejected rows.
    """
    if share.world_size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://"))
    store.add("extracted", 1)
    while store.add("extracted", 0) < share.world_size:
        time.sleep(1)


def _layers(text: str) -> slice:
    """``4``, ``4:8``, ``:8`` or ``::2`` as a slice."""
    try:
        parts = [int(part) if part else None for part in text.split(":")]
        one = len(parts) == 1
        return slice(int(text), int(text) + 1 or None) if one else slice(*parts)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected blocks as START:STOP, such as 4:8, or one number, got {text!r}"
        ) from error


def _own_device(device: Any) -> Any:
    """The GPU of this process, if several on a machine are told to use CUDA."""
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    torch = progress.import_torch()
    if device is None or device.type != "cuda" or device.index is not None or not local.isdecimal():
        return device
    return torch.device("cuda", int(local) % torch.cuda.device_count())
