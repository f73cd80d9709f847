"""``make lint`` fails on an import that runs upwards."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")
REPOSITORY = Path(__file__).parents[2]


UPWARD = {
    "icl_patch/ops/native.py": ("import icl_patch.patcher", "icl_patch.patcher"),
    "triton_kernels/runtime/config.py": (
        "from icl_patch.models import block_detection",
        "icl_patch.models.block_detection",
    ),
    "icl_patch/cli/common.py": ("import icl_patch.bench", "icl_patch.bench"),
    "icl_patch/static/fit.py": ("from tools import measure", "tools.measure"),
}


def test_upward_imports_are_found(tmp_path: Path) -> None:
    for name in ("icl_patch", "triton_kernels", "bench", "tools"):
        ignored = shutil.ignore_patterns("*.so", "*.safetensors", "results", "__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for file, (line, _) in UPWARD.items():
        with (tmp_path / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{line}\n")
    command = [sys.executable, REPOSITORY / "tools" / "lint.py", "imports", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for file, (_, imported) in UPWARD.items():
        module = file.removesuffix(".py").replace("triton_kernels", "icl_patch/kernels")
        assert f"{module.replace('/', '.')} -> {imported}" in done.stdout
