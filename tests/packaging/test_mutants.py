"""The settings of ``make mutants`` name files that exist: whoever moves one changes them too."""

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import mutants

ROOT = mutants.ROOT
SETTINGS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())


def test_every_named_fault_has_its_place() -> None:
    assert len(list(mutants.named_faults(SETTINGS["named"]))) == len(SETTINGS["named"]) >= 9


def test_the_sample_is_of_all_files() -> None:
    for pattern, _ in mutants.LANGUAGES.values():
        top, _, name = pattern.partition("/")
        suffixes = {".py"} if name.endswith(".py") else {".cpp", ".cu", ".h"}
        sources = {path for path in (ROOT / top).rglob("*") if path.suffix in suffixes}
        assert len(sources) > 5 and sources <= set(ROOT.glob(pattern)), pattern


def test_the_tests_of_every_part_exist() -> None:
    for part, tests in SETTINGS["tests"].items():
        assert list(ROOT.glob(f"{part}*")), part
        named = [test.removeprefix("--ignore=").partition("::")[0] for test in tests]
        assert all((ROOT / test).exists() for test in named), named
    for pattern, _ in mutants.LANGUAGES.values():
        for path in ROOT.glob(pattern):
            assert mutants.tests_of(str(path.relative_to(ROOT)), SETTINGS["tests"])
