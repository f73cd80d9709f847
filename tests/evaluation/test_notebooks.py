"""The notebooks, run as plain scripts on the embedded model: their own assertions hold, and fail
where a formula is wrong.
"""

import re
import runpy
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot as plt

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
THEOREM = NOTEBOOKS / "from_one_theorem_to_a_whole_model.py"
WATCHING = NOTEBOOKS / "watching_a_context_become_weights.py"


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """As a script. It switches gradients off for itself; here they are put back."""
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    with torch.no_grad():
        runpy.run_path(str(path), run_name="__main__")
    assert torch.is_grad_enabled()


def test_from_one_theorem_to_a_whole_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(THEOREM, monkeypatch)
    assert capsys.readouterr().out.endswith("bit-identical: True\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('weights["gate"] @ (z_ctx - z), v', 'weights["gate"] @ (z - z_ctx), v'),
        ("delta = hidden_ctx - hidden\n\n", "delta = hidden - hidden_ctx\n\n"),
        ("direct = scale + delta / norm(h_down)", "direct = scale + delta / h_down"),
        ("outer(update.u[0], h / h.square().sum())", "outer(update.u[0], h / h.norm())"),
        ("add_outer(reader, reader.weight @ (target - x), x)", "pass"),
        ("add_outer(mlp.down_proj, update.u[0].float(), target)", "pass"),
        (
            "patch = patcher.compute(context_ids, question_ids)",
            "patch = patcher.compute(context_ids[:, 1:], question_ids)",
        ),
    ],
    ids=["reader", "residual", "direct", "stable", "readers", "writers", "exact"],
)
def test_a_wrong_formula_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    text = THEOREM.read_text(encoding="utf-8")
    assert text.count(right) == 1
    path = tmp_path / "wrong.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError):
        run(path, monkeypatch)


@pytest.mark.stress
def test_watching_a_context_become_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = plt.get_backend()
    try:
        run(WATCHING, monkeypatch, "", str(tmp_path))
    finally:
        plt.switch_backend(backend)
    assert not plt.get_fignums()
    pictures = {path.name: plt.imread(path) for path in tmp_path.iterdir()}
    names = ("sizes", "sources", "growth", "controllability")
    assert set(pictures) == {f"{name}.png" for name in names}
    for picture in pictures.values():
        colours = set(map(tuple, picture[::7, ::7].reshape(-1, 4)))
        assert picture.shape[1] == 990 and len(colours) > 9


@pytest.mark.parametrize("path", [THEOREM, WATCHING], ids=lambda path: path.stem)
def test_a_notebook_is_cells_of_text_and_code(path: Path) -> None:
    """In jupytext's percent form: a header, then text that begins with a title."""
    header, *cells = re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.M)
    assert "format_name: percent" in header and len(cells) > 8
    assert cells[0].startswith(' [markdown]\n"""\n# ')
    for cell in cells:
        kind, _, body = cell.partition("\n")
        assert kind in ("", " [markdown]")
        if kind:
            assert body.startswith('"""\n') and body.rstrip().endswith('\n"""')
        else:
            compile(body, path.name, "exec")
