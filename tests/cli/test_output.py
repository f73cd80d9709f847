"""A stdout that is full or closed, and a reader that leaves early."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import Run

from icl_patch import ContextPatcher, embedded

MODEL_FILE = embedded.MODEL_DIR / "model.safetensors"
FULL = "[Errno 28] cannot write to stdout: No space left on device"


@pytest.fixture(scope="module")
def patch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, tokenizer = embedded.load()
    file = tmp_path_factory.mktemp("patch") / "p.safetensors"
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        patcher.compute(torch.tensor([[1, 5]]), torch.tensor([[7]])).save(file)
    return file


@pytest.mark.parametrize("unbuffered", [True, False], ids=["unbuffered", "buffered"])
@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("inspect --patch FILE", 2, f"icl-patch inspect: {FULL}\n"),
        ("inspect --patch FILE --json", 2, f"icl-patch inspect: {FULL}\n"),
        ("generate --max-new-tokens 2", 2, f"icl-patch generate: {FULL}\n"),
        ("inspect --patch /nowhere --json", 2, "got '/nowhere', which does not exist\n"),
        ("inspect --patch MODEL --json", 1, "icl-patch inspect: "),
        ("dance --json", 2, "invalid choice: 'dance'"),
        ("--version", 2, f"icl-patch: {FULL}\n"),
        ("fit --help", 2, f"icl-patch: {FULL}\n"),
    ],
)
def test_a_full_device(
    command: str,
    status: int,
    message: str,
    unbuffered: bool,
    patch_file: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error is a line on stderr; an error of the command takes the place of JSON there."""
    arguments = command.replace("FILE", str(patch_file)).replace("MODEL", str(MODEL_FILE)).split()
    with Path("/dev/full").open("wb", buffering=0) as full:
        device = io.TextIOWrapper(full if unbuffered else io.BufferedWriter(full))
        device.reconfigure(write_through=unbuffered)
        monkeypatch.setattr(sys, "stdout", device)
        got, _, err = run(*arguments)
        device.flush()  # as Python does at the end: nothing is left
    assert got == status and message in err and "Traceback" not in err
    assert len(err.splitlines()) == 1 or "expected a patch file" in err or "dance" in command


def test_a_reader_that_has_gone_changes_no_status(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, status in ((["verify", "--max-new-tokens", "2"], 1), (["--version"], 0)):
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
        monkeypatch.setattr("icl_patch.evaluation.verify.VerifyReport.passed", False)
        got, _, err = run(*command)
        assert (got, err) == (status, "")
        sys.stdout.close()  # writes what is left


def test_streams_of_the_process() -> None:
    """Closed, full, or with a reader that has gone; Python itself writes at the end."""
    for arguments, status, message in (
        ("--version >&-", 2, "icl-patch: expected an open stdout, got a closed one: redirect it"),
        ("--version >/dev/null", 0, ""),  # the cure
        ("--version >/dev/full", 2, f"icl-patch: {FULL}"),
        ("--help | true", 0, ""),
        ("dance 2>&-", 2, ""),
        ("dance 2>/dev/full", 2, ""),
    ):
        script = f"set -o pipefail; '{sys.executable}' -P -m icl_patch {arguments}"
        environment = os.environ | {"PYTHONUNBUFFERED": ""}
        command = ["bash", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == status, arguments
        assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == bool(message)
