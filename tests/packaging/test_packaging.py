"""What is installed is what runs: the wheel holds everything, under the right names."""

import ast
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import icl_patch
from icl_patch.ops import native

REPOSITORY = Path(__file__).parents[2]


def run(script: str, path: object = None, **environment: str) -> subprocess.CompletedProcess:
    """A script in a fresh interpreter, with a folder on its path."""
    variables = os.environ | ({"PYTHONPATH": str(path)} if path else {}) | environment
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because building writes into the source folder."""
    source = tmp_path_factory.mktemp("source") / "source"
    names = ("icl_patch", "triton_kernels", "csrc", "bench", "MANIFEST.in", "pyproject.toml")
    names = [REPOSITORY / name for name in (*names, "setup.py", "README.md", "LICENSE")]
    source.mkdir()
    subprocess.run(["cp", "-r", *names, source], check=True)
    for built in source.rglob("*.so"):
        built.unlink()
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "-w", folder, source]
    environment = os.environ | {"ICL_PATCH_NATIVE": "cpu"}
    if compiler := shutil.which(os.environ.get("CXX", "c++")):
        # The library of the wheel is loaded here, not measured: it need not be optimised, and its
        # kernels may be those that make has compiled.
        made, real = shlex.quote(str(REPOSITORY / "build" / "native")), shlex.quote(compiler)
        quick = folder / "c++"
        quick.write_text(
            "#!/bin/sh\nfor out; do :; done\n"
            f'case $out in *-*.o) test -f {made}/"$out" && exec cp {made}/"$out" "$out"; esac\n'
            f'exec {real} "$@" -O0\n'
        )
        quick.chmod(0o755)
        environment["CXX"] = str(quick)
    subprocess.run(command, check=True, env=environment)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_what_is_needed_at_run_time(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        "icl_patch/py.typed",
        "icl_patch/static/preserved_texts.txt",
        "icl_patch/evaluation/context_report.html.jinja",
        "icl_patch/evaluation/tiny_models.json",
    }
    needed |= {"icl_patch/ops/_native.so"} if native.cpu_instructions else set()
    assert needed <= names
    assert not [name for name in names if name.startswith(("triton_kernels", "tests", "build"))]
    assert any(name.endswith("LICENSE") for name in names)


def test_the_source_distribution_holds_every_source(source: Path, tmp_path: Path) -> None:
    """Those of the library too, although the machine that makes it builds none."""
    script = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    environment = os.environ | {"ICL_PATCH_NATIVE": "off"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, env=environment)
    [built] = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("icl_patch", "triton_kernels", "bench")
    needed = {
        path.relative_to(source).as_posix()
        for pattern in (*(f"{folder}/**/*.py" for folder in folders), "csrc/*/*.*")
        for path in source.glob(pattern)
    }
    assert "csrc/cuda/rmsnorm_inverse.cu" in needed
    assert needed <= names, needed - names


def test_the_installed_package_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "linear-cpu.json").write_text(
        '{"benchmark": "linear", "environment": {"device": "cpu", "threads": 1,'
        ' "cuda": null}, "rows": []}'
    )
    script = (
        "import icl_patch, icl_patch.kernels, runpy, sys; from icl_patch import embedded;"
        " from icl_patch.ops import native; print(icl_patch.__file__); embedded.load();"
        " print(native.describe());"
        f" sys.argv[1:] = ['bench', '--tables', '--out', {str(tmp_path)!r}];"
        " runpy.run_module('icl_patch', run_name='__main__')"
    )
    done = run(script, site)
    assert done.returncode == 0, done.stderr
    package, description, written = done.stdout.splitlines()
    assert package.startswith(str(site))
    assert description.startswith("native library") or not native.cpu_instructions
    assert written == str(tmp_path / "linear-cpu.md")


def test_kernels_are_not_importable_under_the_name_of_another_package() -> None:
    done = run("import triton_kernels", REPOSITORY)
    assert done.returncode != 0
    assert "icl_patch.kernels" in done.stderr


def test_one_version_everywhere(wheel: Path) -> None:
    assert wheel.name.startswith(f"icl_patch-{icl_patch.__version__}-")
    lines = {"CITATION.cff": "version: {}\n", "CHANGELOG.md": "## [{}]"}
    for name, line in lines.items():
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        assert f"\n{line.format(icl_patch.__version__)}" in text


def test_dependencies_are_the_ones_that_are_imported() -> None:
    """Nothing that is imported comes only by way of another package."""
    files = (REPOSITORY / "icl_patch").rglob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.split(".")[0] for name in names} - {"icl_patch"} - sys.stdlib_module_names
    declared = {
        re.match(r"[\w-]+", requirement).group()
        for requirement in importlib.metadata.requires("icl-patch") or []
    }
    # a hard requirement of transformers, used by the training script only
    assert imported <= declared | {"tokenizers"}


def test_importing_touches_no_device_and_a_machine_without_triton_runs_on_the_cpu() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "begin = torch.cuda._lazy_init, torch.cuda.init\n"
        "torch.cuda._lazy_init = torch.cuda.init = lambda: exit('a device was touched')\n"
        "import icl_patch.cli.main\n"
        "torch.cuda._lazy_init, torch.cuda.init = begin\n"
        "from icl_patch import ContextPatcher, embedded\n"
        "import icl_patch.bench.commands.bench, icl_patch.bench.results, icl_patch.evaluation\n"
        "icl_patch.bench.results.code_fingerprint()\n"
        "model, tokenizer = embedded.load()\n"
        "with ContextPatcher(model, tokenizer=tokenizer) as patcher:\n"
        "    print(patcher.ask('mode upper\\n', 'fmrp>', max_new_tokens=4).text)\n"
    )
    done = run(script, PYTHONWARNINGS="error")
    assert done.stdout == "FMRP\n", done.stderr
    assert "triton" not in done.stderr
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [name for name in project["dependencies"] if name.startswith("triton")]
    assert [name for name in project["optional-dependencies"]["gpu"] if name.startswith("triton")]


def test_without_the_native_library_the_cure_is_said_once(tmp_path: Path) -> None:
    package = Path(icl_patch.__file__).parent
    shutil.copytree(package, tmp_path / "icl_patch", ignore=shutil.ignore_patterns("*.so"))
    # the child has chosen plain torch, and is warned of nothing
    silent = tmp_path / "stderr"
    script = (
        "import os, torch, warnings\n"
        "if child := os.fork(): assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    os.environ['ICL_PATCH_OPS'] = 'torch'\n"
        f"    os.dup2(os.open({str(silent)!r}, os.O_CREAT | os.O_WRONLY), 2)\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('error')\n"
        "    from icl_patch import ops\n"
        "    from icl_patch.ops import native\n"
        "print(native.describe())\n"
        "x = torch.ones(2, 8); v = torch.ones(8)\n"
        "for _ in range(3): ops.rms_norm(x, v, 1e-6)\n"
        "if child:\n"
        "    from icl_patch.cli.main import main\n"
        "    main(['--version'])\n"
    )
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install --no-build-isolation") == 1
    assert not silent.read_text()
    assert done.stdout.count("no native library: it was not built") == 2
    assert "native library: no" in done.stdout and "docs/installing.md" in done.stdout


def test_scripts_have_names_of_their_own() -> None:
    # tests import scripts of several folders in one process, where a name is one module
    names = [file.stem for file in (REPOSITORY / "examples").rglob("*.py")]
    assert len(names) > 10
    assert sorted(names) == sorted(set(names))


def test_an_old_setuptools_is_named() -> None:
    """As in a new environment, where pip asks for none without build isolation."""
    script = (
        "import runpy, setuptools\nsetuptools.__version__ = '65.5.0'\n"
        f"runpy.run_path({str(REPOSITORY / 'setup.py')!r}, run_name='__main__')"
    )
    done = run(script)
    assert done.returncode == 1
    assert (
        "expected setuptools 77 or later, got 65.5.0: pip install 'setuptools>=77'" in done.stderr
    )
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]
    assert "setuptools>=77" in required["requires"]
