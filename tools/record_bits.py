"""Record the bits of all results of the package as hashes.

    build/python tools/record_bits.py build/bits.json           # minutes on one core
    build/python tools/record_bits.py build/bits.json --quick   # one small model of each writer

A refactoring must not change a number: ``diff`` finds the records before and after it equal. Record
both on one machine with one version of torch, because the processor's instructions decide how a
product rounds.

A record has one entry for each tensor and each field of JSON. The name of an entry says where it
comes from, as ``gemma3/bfloat16/exact/prefix/factors/layers.0.mlp.gate_proj.u``. There are:

- each small random model, in fp32 and bf16, with the three updates: the factors, report and logits
  of patches with and without a prefix (and with an image where the model takes one), the logits of
  their replays, and the tokens, logits and last patch of generation in each mode;
- two of these models with a compiled decode step;
- the embedded model: the same, its patch files (each tensor and each header field by itself), and
  the JSON that the command line prints.

A refusal is a result too: its entry is the type of the error.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

# Adapter: all that this tool takes from the package. A renaming edits these lines and no others.
from icl_patch import ContextPatch, ContextPatcher, embedded
from icl_patch.cli.main import main as run_command
from icl_patch.evaluation.tiny_models import IMAGE_TOKEN, REFUSED, SUPPORTED
from icl_patch.evaluation.tiny_models import build as build_model
from icl_patch.ops.native import describe as describe_native

UPDATES = ("direct", "stable", "exact")
COMPILED = {
    f"{mode}, compiled": {"mode": mode, "compile": True} for mode in ("two_stream", "shared_cache")
}
SHARED_CACHE_FLAGS = ("--mode", "shared_cache")


def generation_modes(patcher: ContextPatcher) -> dict[str, dict[str, Any]]:
    """The arguments of ``ContextPatcher.generate`` by the mode's name in a record."""
    two_passes = patcher.update == "exact" or patcher.attached_model.steps_take_two_passes
    default = "two_pass" if two_passes else "two_stream"
    return {mode: {"mode": mode} for mode in (default, "shared_cache", "auto")}


# End of the adapter.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILED_MODELS = ("gemma3", "llama")
NEW_TOKENS = 4
Arguments = dict[str, Any]
Cases = dict[str, Arguments]  # of a call, by the case's name in a record


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bits: -0 differs from 0, and one NaN from another."""
    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + bits)


def sha256(content: bytes) -> str:
    """The hash, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


class Record:
    """Hashes by name."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add(self, name: str, value: Any) -> None:
        """A tensor, or a value of JSON: an object field by field, a list of objects element by
        element.
        """
        if isinstance(value, list) and any(isinstance(element, dict) for element in value):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, field in value.items():
                self.add(f"{name}/{key}", field)
            return
        assert name not in self.entries, name
        is_tensor = isinstance(value, Tensor)
        self.entries[name] = digest(value) if is_tensor else sha256(json.dumps(value).encode())

    def patch(self, name: str, patch: ContextPatch) -> None:
        """The factors of a patch, its report, and its other tensors: tokens, positions, logits."""
        for index, layer in zip(patch.layer_indices, patch.layers, strict=True):
            for factor, tensor in layer.items():
                self.add(f"{name}/factors/layers.{index}.{factor}", tensor)
        self.add(f"{name}/passes", patch.passes)
        self.add(name, {field: x for field, x in vars(patch).items() if isinstance(x, Tensor)})
        self.add(f"{name}/report", {} if patch.report is None else vars(patch.report))

    @contextmanager
    def refusals(self, name: str) -> Iterator[None]:
        """Within this context a refusal is recorded, and the rest of the block is left out."""
        try:
            yield
        except (ValueError, TypeError) as error:
            self.entries[f"{name}/refused"] = type(error).__name__


def tokens(seed: int, rows: int, columns: int) -> Tensor:
    """Random ids (rows, columns): neither padding nor image tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, IMAGE_TOKEN - 2, (rows, columns), generator=generator)


def ragged(rows: int, columns: int, *, side: str) -> Tensor:
    """A bool mask (rows, columns) in which each row has two tokens fewer than the one before."""
    lengths = torch.tensor([columns - 2 * row for row in range(rows)]).unsqueeze(1)
    places = torch.arange(columns)
    return (places.flip(0) if side == "left" else places) < lengths


def cases_of(name: str, dtype: torch.dtype) -> Cases:
    """The arguments of ``ContextPatcher.compute``, for a family of tiny models."""
    text: Arguments = {"context_ids": tokens(0, 3, 11), "kept_ids": tokens(1, 3, 7)}
    text["kept_mask"] = ragged(3, 7, side="right")
    prefix = {"context_ids": torch.cat([tokens(2, 3, 5), text["context_ids"]], 1)}
    prefix["context_mask"] = F.pad(ragged(3, 5, side="left"), (0, 11), value=True)
    found = {
        "context": text | {"context_mask": ragged(3, 11, side="left")},
        "prefix": text | prefix | {"absorbed": [(5, 10), (13, 15)]},
    }
    if name in SUPPORTED and SUPPORTED[name].images:
        found["image"] = image_case(SUPPORTED[name].settings, dtype)
    return found


def image_case(settings: Arguments, dtype: torch.dtype) -> Arguments:
    """An image in the context of each of two rows."""
    length = settings.get("mm_tokens_per_image") or settings["image_seq_length"]
    context = tokens(0, 2, length + 6)
    context[:, 2 : 2 + length] = IMAGE_TOKEN
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {"context_ids": context, "kept_ids": tokens(1, 2, 4), "pixel_values": pixels}
    if "boi_token_index" in settings:  # Gemma 3 marks the tokens that attend both ways
        found["token_type_ids"] = (context == IMAGE_TOKEN).long()
    return found


def record_generation(
    record: Record, name: str, patcher: ContextPatcher, context: Arguments, modes: Cases
) -> None:
    """The tokens and logits of each step, and the last step's patch, in each mode."""
    for mode, arguments in modes.items():
        with record.refusals(f"{name}/{mode}"):
            steps = list(patcher.generate(**context, max_new_tokens=NEW_TOKENS, **arguments))
            for number, step in enumerate(steps):
                found = {"tokens": step.token_ids, "logits": step.logits}
                record.add(f"{name}/{mode}/{number}", found)
            record.patch(f"{name}/{mode}/patch", steps[-1].patch)


def record_model(record: Record, name: str, model: PreTrainedModel, cases: Cases) -> None:
    """Each case's patch, the logits of its replay, and generation, with the three updates."""
    first = next(iter(cases.values()))
    context = {key: first[key] for key in ("context_ids", "context_mask")}
    for update in UPDATES:
        with record.refusals(f"{name}/{update}"), ContextPatcher(model, update) as patcher:
            for case, arguments in cases.items():
                with record.refusals(f"{name}/{update}/{case}"):
                    patch = patcher.compute(**arguments)
                    record.patch(f"{name}/{update}/{case}", patch)
                    replay = patcher.forward(patch.kept_ids, patch)
                    record.add(f"{name}/{update}/{case}/replay", replay)
            modes = generation_modes(patcher)
            record_generation(record, f"{name}/{update}/generate", patcher, context, modes)


def record_embedded(record: Record) -> None:
    """The embedded model on a held-out prompt of each kind, patch files, and the command line."""
    prompts = [embedded.held_out_prompts(kind, 1)[0] for kind in embedded.KINDS]
    for short, dtype in DTYPES.items():
        name = f"embedded/{short}"
        model, tokenizer = embedded.load(dtype)
        padded = {"padding": True, "return_tensors": "pt"}
        contexts = tokenizer([x.context for x in prompts], padding_side="left", **padded)
        questions = [x.question * 2 for x in prompts]  # more tokens than the GEMV kernels take
        kept = tokenizer(questions, padding_side="right", add_special_tokens=False, **padded)
        case = {"context_ids": contexts.input_ids, "context_mask": contexts.attention_mask.bool()}
        case |= {"kept_ids": kept.input_ids, "kept_mask": kept.attention_mask.bool()}
        record_model(record, name, model, {"context": case})
        for update in UPDATES:
            with ContextPatcher(model, update, tokenizer=tokenizer) as patcher:
                record_file(record, f"{name}/{update}/file", patcher, patcher.compute(**case))
    record_command_line(record)


def record_file(record: Record, name: str, patcher: ContextPatcher, patch: ContextPatch) -> None:
    """Each tensor and each field of the header of a saved patch, and the logits of its replay after
    it is read again.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patch.safetensors"
        patch.save(path)
        record.add(f"{name}/tensors", load_file(path))
        with safe_open(path, "pt") as file:
            header = {key: json.loads(text) for key, text in file.metadata().items()}
        record.add(f"{name}/header", header)
        loaded = ContextPatch.load(path, patcher.model, patcher.tokenizer)
    record.add(f"{name}/replay", patcher.forward(loaded.kept_ids, loaded))


def command_lines() -> dict[str, list[str]]:
    """The recorded commands by name, in their order: ``inspect`` and ``replay`` read the file of
    ``extract``.
    """
    upper, file = ["--context", "mode upper\n"], "patch.safetensors"
    extract = ["extract", *upper, "--kept", "fmrp>", "--out", file, "--force"]
    generate = ["generate", "--context", "mode upper\nfmrp>", "--max-new-tokens", "4"]
    verify = ["verify", "--max-new-tokens", "4"]
    found = {}
    for update in UPDATES:
        found[f"extract {update}"] = [*extract, "--update", update]
        found[f"inspect {update}"] = ["inspect", "embedded", "--patch", file]
        found[f"replay {update}"] = ["replay", "--patch", file]
        found[f"generate {update}"] = [*generate, "--update", update]
        for dtype in ("fp32", "bf16"):
            found[f"verify {update} {dtype}"] = [*verify, "--update", update, "--dtype", dtype]
    stable = [*generate, "--update", "stable"]
    return found | {
        "extract prefix": [*extract, "--keep-first", "1"],
        "inspect prefix": ["inspect", "--patch", file],
        "verify keep-last": [*verify, "--keep-last", "2"],
        "generate shared_cache": [*stable, *SHARED_CACHE_FLAGS],
        "generate sample": [*stable, "--sample", "--temperature", "2", "--seed", "1"],
    }


def record_command_line(record: Record) -> None:
    """The exit status and the JSON of each command.

    They run in a folder of their own and name files relative to it: no path depends on the machine.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, arguments in command_lines().items():
            printed = io.StringIO()
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                status = run_command([*arguments, "--json"])
            record.add(f"command/{name}/exit status", status)
            record.add(f"command/{name}", json.loads(printed.getvalue() or "{}"))


def record_all(quick: bool) -> Record:
    """The record of the whole package, or of one model of each writer."""
    torch.set_num_threads(1)  # the number of threads decides in which order a product adds up
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    record = Record()
    by_writer = {entry.writer: family for family, entry in reversed(SUPPORTED.items())}
    families = list(by_writer.values()) if quick else [*SUPPORTED, *REFUSED]
    parts = [*families, *(f"{x}, compiled" for x in COMPILED_MODELS if not quick), "embedded"]
    for part in track(parts, "recording", console=Console(stderr=True), transient=True):
        torch.manual_seed(0)
        if part == "embedded":
            record_embedded(record)
        elif part in families:
            for name, dtype in DTYPES.items():
                model = build_model(part, 0, dtype)
                record_model(record, f"{part}/{name}", model, cases_of(part, dtype))
        else:
            family = part.removesuffix(", compiled")
            context = {"context_ids": tokens(0, 2, 11), "context_mask": ragged(2, 11, side="left")}
            with ContextPatcher(build_model(family), "stable") as patcher:
                name = f"{family}/float32/stable/generate"
                record_generation(record, name, patcher, context, COMPILED)
    return record


def main(arguments: list[str] | None = None) -> int:
    """Write a record; returns the exit status."""
    parser = argparse.ArgumentParser(description="Record the bits of all results of the package.")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the file to write")
    parser.add_argument("--quick", action="store_true", help="one small model of each writer only")
    options = parser.parse_args(arguments)
    record = record_all(options.quick)
    environment = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "instructions of torch": torch.backends.cpu.get_cpu_capability(),
        "library": describe_native(),
        "ICL_PATCH_OPS": os.environ.get("ICL_PATCH_OPS", ""),
    }
    content = {"quick": options.quick, "environment": environment, "entries": record.entries}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(record.entries)} entries written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
