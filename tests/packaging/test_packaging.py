"""What is installed is what runs: the wheel holds everything, under the right names."""

import ast
import contextlib
import importlib.metadata
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import icl_patch
from icl_patch.ops import native

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # from a copy: building writes into the source folder
    names = [
        "icl_patch",
        "triton_kernels",
        "csrc",
        "bench",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
    ]
    source.mkdir()
    subprocess.run(
        ["cp", "-r", *(str(REPOSITORY / name) for name in names), str(source)], check=True
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
        str(source),
    ]
    for built in source.rglob("*.so"):
        built.unlink()
    environment = os.environ | {"ICL_PATCH_NATIVE": "cpu"}
    if compiler := shutil.which(os.environ.get("CXX", "c++")):
        # The library of the wheel is loaded here, not measured: it need not be optimised.
        quick = folder / "c++"
        quick.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -O0\n')
        quick.chmod(0o755)
        environment["CXX"] = str(quick)
    subprocess.run(command, check=True, env=environment)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_what_is_needed_at_run_time(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        "icl_patch/py.typed",
        "icl_patch/cli/main.py",
        "icl_patch/models/detect.py",
        "icl_patch/kernels/__init__.py",
    }
    needed |= {
        "icl_patch/bench/cases/inversion.py",
        "icl_patch/bench/commands/tune.py",
        *(["icl_patch/ops/_native.so"] if native.cpu_instructions else []),
    }
    needed |= {
        f"icl_patch/evaluation/embedded/model/{name}"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert needed <= names
    assert not [name for name in names if name.startswith(("triton_kernels", "tests", "build"))]
    assert any(name.endswith("LICENSE") for name in names)


def test_the_installed_package_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "linear-cpu.json").write_text(
        '{"benchmark": "linear", "environment": {"device": "cpu", "threads": 1}, "rows": []}'
    )
    script = (
        "import icl_patch, icl_patch.kernels, runpy, sys; from icl_patch import embedded;"
        " from icl_patch.ops import native; print(icl_patch.__file__); embedded.load();"
        " print(native.describe());"
        f" sys.argv[1:] = ['bench', '--plots', '--out', {str(tmp_path)!r}];"
        " runpy.run_module('icl_patch', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    package, description, written = done.stdout.splitlines()
    assert package.startswith(str(site))
    assert description.startswith("native library") or not native.cpu_instructions
    assert written == str(tmp_path / "linear-cpu.md")


def test_kernels_are_not_importable_under_the_name_of_another_package() -> None:
    script = "import triton_kernels"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "icl_patch.kernels" in done.stderr


def test_one_version_everywhere(wheel: Path) -> None:
    assert wheel.name.startswith(f"icl_patch-{icl_patch.__version__}-")
    assert f"## [{icl_patch.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text(
        encoding="utf-8"
    )


def test_the_readme_runs() -> None:
    """Its Python blocks as they stand give what their comments say; nothing is left to be filled
    in.
    """
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "@@" not in text
    [first, second, layer] = re.findall(r"```python\n(.*?)```", text, re.S)
    changed = layer.replace(
        "layer.clear_patch()",
        "print((layer(v) - layer.base_layer(v)).abs().max() > 1, end=' ')\nlayer.clear_patch()",
    )
    script = first + "print(tokenizer.decode(logits[0, -1].argmax()))\n" + second
    script += changed + "print(torch.equal(layer(v), layer.base_layer(v)))"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(script, {})
    one, all_four, alone = output.getvalue().splitlines()
    assert alone == "tensor(True) True"
    assert one == "F" and "The next token is F" in first
    assert all_four.startswith("FMRP dict_keys(['mlp.gate_proj'") and "# FMRP" in second


def test_importing_touches_no_device() -> None:
    script = (
        "import torch; torch.cuda._lazy_init = torch.cuda.init = lambda: exit('a device was"
        " touched'); import icl_patch.cli.main"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


def test_dependencies_are_the_ones_that_are_imported() -> None:
    """Nothing that is imported comes only by way of another package."""
    nodes = [
        node
        for file in (REPOSITORY / "icl_patch").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    ]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.split(".")[0] for name in names} - {"icl_patch"} - sys.stdlib_module_names
    declared = {
        re.match(r"[\w-]+", requirement).group()
        for requirement in importlib.metadata.requires("icl-patch") or []
    }
    # a hard requirement of transformers, used by the training script only
    assert imported <= declared | {"tokenizers"}


def test_contributing_lists_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):.*## ", makefile, re.M)
    listed = re.findall(r"^make ([a-z-]+)", contributing, re.M)
    assert len(targets) > 10
    assert sorted(set(targets) - set(listed)) == []
