"""The inversion on a real model's rows: its 80-bit reference, which rows, the committed numbers."""

import json

import numpy as np
import pytest
import real_inversion
import torch
from support.numeric import ULP, normal, seeded

from icl_patch import ContextPatcher, embedded, ops


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs 80-bit numbers")
def test_the_reference_solves_the_secular_equation() -> None:
    """``mean(y²) = C² / (C² + eps)`` and a y that is parallel to ``g m / (m² - μ)``, in 80 bits."""
    g, m, c, eps = normal(seeded(0), 5, 63), normal(seeded(1), 63), torch.full((5,), 0.7), 1e-3
    x, has_root = real_inversion.reference(g, m, c, eps)
    wide = (c.double()[:, None].numpy().astype(np.longdouble) ** 2 + np.longdouble(eps)) ** 0.5
    y, radius2 = x / wide, np.longdouble(float(c[0])) ** 2 / wide[0, 0] ** 2
    assert has_root.all() and np.abs((y**2).mean(1) / radius2 - 1).max() < ULP / 64
    mu = m.numpy() ** 2 - g.numpy() * m.numpy() / y  # (5, 63): one number a row
    assert np.abs(mu / mu[:, :1] - 1).max() < 1e-9 and (mu[:, 0] < (m**2).min().item()).all()
    found = ops.invert_rmsnorm(g, m, c, eps)
    assert real_inversion.errors(found.hidden, x, has_root) < 64 * ULP
    m[3], g[:, 3] = 0, 0  # nothing at the pole, and a norm that the others cannot have
    _, has_root = real_inversion.reference(1e-3 * g, m, c, eps)
    assert not has_root.any()
    assert (ops.invert_rmsnorm(1e-3 * g, m, c, eps).status == ops.InversionStatus.HARD).all()


def test_the_rows_are_those_of_the_stable_update() -> None:
    model, _ = embedded.load()
    ids, own = torch.arange(1, 13)[None], ops.stable_scale
    with ContextPatcher(model, "stable") as patcher, real_inversion.observed() as found:
        patch = patcher.compute(ids[:, :7], ids[:, 7:])
    assert ops.stable_scale is own and len(found) == len(patch.layers)
    for rows, layer in zip(found, patch.layers, strict=True):
        [name] = [name for name in layer if name.endswith(".new_scale")]
        again = ops.stable_scale(rows.delta, rows.scale, rows.hidden_down, rows.eps)
        assert torch.equal(again.new_scale.float(), layer[name][0].float())


def test_the_committed_rows_are_solved() -> None:
    numbers = json.loads(real_inversion.OUT.read_text(encoding="utf-8"))
    for block in numbers["blocks"]:
        raised, own = block["raised scale"], block["own scale"]
        assert raised["status"] == {"EASY": block["rows"]} and block["rows"] == 1000
        assert raised["error"] < 128 * ULP and raised["left over"] < 16 * ULP
        assert raised["error of fp32"] < 2e-6
        assert (own["status"].get("EASY", 0) == 1000) == (block["zeros"] == 0)
