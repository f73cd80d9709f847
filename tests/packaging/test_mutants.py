"""The settings of ``make mutants`` name files that exist: a file that moves takes its faults along."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    sys.modules["mutants"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETTINGS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())


def test_every_named_fault_has_its_place(mutants: ModuleType) -> None:
    assert len(list(mutants.named_faults(SETTINGS["named"]))) == len(SETTINGS["named"]) >= 9


def test_the_sample_is_of_all_files(mutants: ModuleType) -> None:
    for pattern, _ in mutants.LANGUAGES.values():
        top, _, name = pattern.partition("/")
        suffixes = {".py"} if name.endswith(".py") else {".cpp", ".cu", ".h"}
        sources = {path for path in (ROOT / top).rglob("*") if path.suffix in suffixes}
        assert len(sources) > 5 and sources <= set(ROOT.glob(pattern)), pattern


def test_the_tests_of_every_part_exist(mutants: ModuleType) -> None:
    for part, tests in SETTINGS["tests"].items():
        assert list(ROOT.glob(f"{part}*")), part
        named = [test.removeprefix("--ignore=") for test in tests]
        assert all((ROOT / test).exists() for test in named), named
    for pattern, _ in mutants.LANGUAGES.values():
        for path in ROOT.glob(pattern):
            assert mutants.tests_of(str(path.relative_to(ROOT)), SETTINGS["tests"])
