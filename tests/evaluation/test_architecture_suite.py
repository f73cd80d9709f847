"""The architecture suite: what it measures, and the table of models."""

from pathlib import Path

import pytest
from support.numeric import noise_limit

from icl_patch.evaluation import report, tiny_models
from icl_patch.evaluation.architecture_suite import FamilyReport, run_suite

FEW = ["gemma3", "gpt2", "mixtral", "mamba", "deepseek_v4"]


@pytest.fixture(scope="module")
def reports() -> list[FamilyReport]:
    return run_suite(FEW)


def test_covered_forms_pass_and_the_rest_is_refused(reports: list[FamilyReport]) -> None:
    by_name = {entry.name: entry for entry in reports}
    assert list(by_name) == FEW
    for name in FEW[:-1]:
        entry = by_name[name]
        assert entry.passed
        assert entry.exact_fp32 == entry.exact_bf16 == 1.0
        assert 0 < entry.direct <= noise_limit(tiny_models.build(name))
        assert (entry.experts_identical is None) == (name != "mixtral")
    assert by_name["deepseek_v4"].passed
    assert "residual streams" in by_name["deepseek_v4"].refused


def test_it_would_show_a_form_that_is_refused_or_off(reports: list[FamilyReport]) -> None:
    good = reports[0].to_dict()
    del good["passed"]
    assert not FamilyReport(**good | {"refused": "something new"}).passed
    assert not FamilyReport(**good | {"exact_bf16": 0.99}).passed
    assert not FamilyReport(**good | {"direct": 2e-4, "noise_floor": 1e-5}).passed
    assert FamilyReport(**good | {"direct": 2e-4, "noise_floor": 3e-5}).passed
    assert not FamilyReport(**good | {"reader_error": 17.0}).passed
    assert not FamilyReport(**good | {"experts_identical": 0.9}).passed
    assert not FamilyReport(**good | {"name": "deepseek_v4"}).passed  # it should have been refused


def test_the_page_of_models_names_all_of_them() -> None:
    table = report.support_markdown()
    assert table in (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(name in table for name in [*tiny_models.SUPPORTED, *tiny_models.REFUSED])


def test_every_refused_family_is_reported_with_its_reason() -> None:
    """A model that its own baseline cannot run, too: the suite goes through all of them."""
    reports = run_suite(tiny_models.REFUSED)
    assert [report.name for report in reports] == [*tiny_models.REFUSED]
    assert all(report.refused for report in reports)
