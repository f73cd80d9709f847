"""``icl-patch apply``: a model with a static patch in its weights, as a folder."""

import argparse
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from icl_patch.cli import arguments, inputs, output

HELP = "write the model with a static patch in its weights"
# the files of an earlier model that would be loaded with the new one's
_STALE = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"),
    *("chat_template.*", "additional_chat_templates"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_model(parser)
    arguments.add_patch(parser, meaning="a static patch, as icl-patch fit writes it")
    arguments.add_out(parser, "folder of the model; it is made")


def run(options: argparse.Namespace) -> int:
    """Merge the patch and save the model with its tokenizer."""
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(
            f"expected a folder as --out, for a whole model, got the file {options.out}"
        )
    arguments.check_out(options)
    arguments.check_apart(options, "adapter_config.json", "a LoRA")
    model, tokenizer, patch = inputs.load_static(options)
    _save(options.out, patch.merge(model), tokenizer)
    result = {"folder": str(options.out), "matrices": len(patch.changes), "rank": patch.rank}
    said = inputs.front_of(patch, tokenizer)
    output.print_result(options, result, f"{options.out}: the model with {patch!r}", *said)
    return 0


def _save(folder: Path, *parts: Any) -> None:
    """Write model and tokenizer to a folder. It gets its files when all of them are written; those
    of an earlier model go.

    Raises:
        OSError: there is no room, or the folder cannot be written.
    """
    from safetensors import SafetensorError

    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".icl-patch-") as place:
        written = Path(place) / "model"
        try:
            for part in parts:
                part.save_pretrained(written)
        except SafetensorError as error:
            raise OSError(f"the model cannot be written to {folder}: {error}") from error
        names = {path.name for path in written.iterdir()}
        shutil.copytree(written, folder, copy_function=os.replace, dirs_exist_ok=True)
    for path in {path for pattern in _STALE for path in folder.glob(pattern)}:
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
