"""The settings of ``make mutants`` name files that exist: whoever moves one changes them too."""

from tools import mutants


def test_every_named_fault_has_its_place_and_its_tests() -> None:
    for fault in mutants.SETTINGS["named"]:
        assert fault["old"] in mutants.text_of(fault) and mutants.tests_of(fault["path"])
    for part, tests in mutants.SETTINGS["tests"].items():
        assert list(mutants.ROOT.glob(f"{part}*")), part
        named = [test.removeprefix("--ignore=").partition("::")[0] for test in tests]
        assert all((mutants.ROOT / test).exists() for test in named), named
