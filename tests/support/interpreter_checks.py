"""What runs in Triton's interpreter beside the kernels themselves: whole models, and the check that
a tuned configuration has to pass. ``test_kernels.py`` runs it with :mod:`kernel_checks`.
"""

from typing import Any

import pytest
import torch
from support import interpreter
from support.backend_checks import check_backend

from icl_patch.bench import tuning
from icl_patch.kernels import Config

interpreter.prepare()


def test_whole_models(capsys: pytest.CaptureFixture[str]) -> None:
    check_backend("triton")
    assert capsys.readouterr().out.count("exact 0.0") == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda rows, call: 0.1, "fp64"),
        (lambda rows, call: float("nan"), "fp64"),
        (lambda rows, call: 0.002 * (call - 1), "twice"),
        (lambda rows, call: 0.002 * (rows == 1), "alone"),
    ],
    ids=["off", "nan", "not repeatable", "sees its batch"],
)
def test_a_tuned_configuration_is_checked(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, said: str
) -> None:
    weight = torch.randn(17, 70).bfloat16() / 8
    config = Config(True, 16, 32, 128, 4, 2)
    operands = tuning.operands_of(weight, 2, 1)
    tuning.check(operands, weight, config)
    right, calls = tuning.launch_linear, []

    def launch(z: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return right(z, *given, **options) + wrong(len(z), len(calls))

    monkeypatch.setattr(tuning, "launch_linear", launch)
    with pytest.raises(AssertionError, match=said):
        tuning.check(operands, weight, config)
