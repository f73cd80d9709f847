"""``make lint`` fails on an import that runs upwards or hides in a function."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("icl_patch", "triton_kernels", "bench"):
        ignored = shutil.ignore_patterns("*.so", "*.safetensors", "results", "__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def lint_imports(checkout: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-P",
        str(REPOSITORY / "tools" / "lint.py"),
        "imports",
        str(checkout),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_contracts_are_kept(checkout: Path) -> None:
    done = lint_imports(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


UPWARD = {
    "icl_patch/ops/native.py": ("import icl_patch.patcher", "icl_patch.patcher"),
    "triton_kernels/runtime/config.py": (
        "from icl_patch.models import block_detection",
        "icl_patch.models.block_detection",
    ),
    "icl_patch/cli/common.py": ("import icl_patch.bench", "icl_patch.bench"),
}


def test_upward_imports_are_found(checkout: Path) -> None:
    before = {file: (checkout / file).read_text(encoding="utf-8") for file in UPWARD}
    for file, (line, _) in UPWARD.items():
        (checkout / file).write_text(f"{before[file]}\n{line}\n", encoding="utf-8")
    done = lint_imports(checkout)
    for file, text in before.items():
        (checkout / file).write_text(text, encoding="utf-8")
    assert done.returncode == 1
    for file, (_, imported) in UPWARD.items():
        module = file.removesuffix(".py").replace("triton_kernels", "icl_patch/kernels")
        assert f"{module.replace('/', '.')} -> {imported}" in done.stdout


def test_an_import_in_a_function_is_found(checkout: Path) -> None:
    pytest.importorskip("ruff")
    hidden = checkout / "icl_patch" / "ops" / "hidden.py"
    hidden.write_text("def imports() -> None:\n    import math\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", checkout],
        capture_output=True,
        text=True,
        check=False,
    )
    hidden.unlink()
    assert done.returncode == 1
    assert "hidden.py:2:5: PLC0415" in done.stdout
