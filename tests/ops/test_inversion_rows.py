"""A row's bits depend on the row alone: not on its neighbours, its place, its strides, the threads;
and every size is computed whole.
"""

import pytest
import torch
from support.inversion import (
    LAYOUTS,
    Invert,
    check_rows,
    every_implementation,
    mixed_rows,
    needs_native,
    same_rows,
)
from support.numeric import (
    ULP,
    UNIT,
    every_dtype,
    normal,
    numbers_of_threads,
    poisoned_memory,
    same_bits,
    seeded,
)
from support.rows import rows_of
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops import reference

POISON: dict[str, tuple[str, float, Status]] = {
    "g-nan": ("g", torch.nan, Status.NONFINITE),
    "g-inf": ("g", torch.inf, Status.NONFINITE),
    "m-nan": ("m", torch.nan, Status.NONFINITE),
    "m-inf": ("m", -torch.inf, Status.NONFINITE),
    "rms-zero": ("rms", 0.0, Status.BAD_RADIUS),
    "rms-negative": ("rms", -1.0, Status.BAD_RADIUS),
    "rms-nan": ("rms", torch.nan, Status.BAD_RADIUS),
    "rms-inf": ("rms", torch.inf, Status.BAD_RADIUS),
    "rms-minus-inf": ("rms", -torch.inf, Status.BAD_RADIUS),
    "fallback-nan": ("fallback", torch.nan, Status.HARD),
}


@pytest.mark.parametrize("poison", POISON)
@every_implementation
def test_a_poisoned_row_leaves_the_others_alone(invert: Invert, poison: str) -> None:
    """One of 1,024, in the middle of the batch."""
    name, value, status = POISON[poison]
    m, g = (x[:1024] for x in mixed_rows(33, 74))
    arguments = {"m": m, "g": g, "rms": torch.rand(1024, generator=seeded(4)) + 0.5}
    arguments["fallback"] = normal(seeded(3), 1024, 33, dtype=torch.float32)
    row = 517
    arguments["m"][row], arguments["g"][row] = (x[0] for x in rows_of("sparse", 1, 33))
    arguments["g"][row] *= 1e-3  # no root: the fallback is looked at

    def run(m: Tensor, g: Tensor, rms: Tensor, fallback: Tensor) -> ops.RMSNormInverse:
        return invert(g, m, rms, 1e-6, fallback)

    clean = run(**arguments)
    assert clean.status[row] == Status.HARD
    if name == "rms":
        arguments["rms"][row] = value
    else:
        arguments[name][row, 5] = value
        arguments[name][row, int(arguments["m"][row].abs().nan_to_num(9).argmin())] = value
    result = run(**arguments)
    assert result.status[row] == status
    assert result.evaluations[row] == 0
    others = torch.arange(1024) != row
    for part in ("hidden", "shift", "new_scale", "status", "evaluations"):
        assert same_bits(getattr(result, part)[others], getattr(clean, part)[others])
    spoilt = {part: getattr(result, part)[row] for part in ("hidden", "shift", "new_scale")}
    if status is Status.NONFINITE:
        assert all(x.isnan().all() for x in spoilt.values())
    elif status is Status.BAD_RADIUS:
        assert not spoilt["hidden"].any() and spoilt["shift"] == 0
        assert torch.equal(spoilt["new_scale"], arguments["m"][row].double())
    else:
        assert all(x.isfinite().all() for x in spoilt.values())


@pytest.mark.parametrize("where", [0, 6, 7, 8, 63, 510, 511, 512, 1029], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@every_implementation
def test_one_bad_number_is_found_wherever_it_is(invert: Invert, bad: float, where: int) -> None:
    """In the last lane of a vector, in a tail, in a later chunk; in the pole, or where the other
    factor is 0; whatever the radius is.
    """
    m, g = torch.ones(4, 1030), torch.zeros(4, 1030)
    m[0, where] = g[1, where] = m[2, where] = bad
    g[2] = 1
    m[3] = 0
    g[3, where] = bad
    for rms in (torch.ones(4), torch.full((4,), bad)):
        assert (invert(g, m, rms).status == Status.NONFINITE).all()


@pytest.mark.parametrize("n", [1, 7, 48, 129, 1000])
@every_implementation
def test_a_row_does_not_see_its_batch(invert: Invert, n: int) -> None:
    m, g = mixed_rows(n, 4)
    batch = len(m)
    rms, eps = torch.rand(batch, generator=seeded(0)) + 0.5, 1e-6
    together = invert(g, m, rms, eps)
    every = torch.arange(batch)
    for rows in (every.flip(0), every[:13], *every[::5].split(1)):
        assert same_rows(invert(g[rows], m[rows], rms[rows], eps), together, rows)
    one_scale = invert(g[:5], m[3], rms[:5], eps)
    assert same_rows(one_scale, invert(g[:5], m[3].expand(5, n).clone(), rms[:5], eps))


@needs_native
@pytest.mark.parametrize(("n", "per_family"), [(1, 4000), (33, 200), (2050, 3)])
def test_a_row_does_not_see_the_threads(n: int, per_family: int) -> None:
    m, g = mixed_rows(n, per_family)
    rms = torch.rand(len(m), generator=seeded(0)) + 0.5

    def run() -> tuple[ops.RMSNormInverse, ops.StableScale]:
        return ops.invert_rmsnorm(g, m, rms, 1e-6, g), ops.stable_scale(g, m, g.flip(1), 1e-6)

    alone = run()
    for _ in numbers_of_threads(1, 2, 5):
        assert all(same_rows(one, other) for one, other in zip(run(), alone, strict=True))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@needs_native
def test_strides_do_not_show(layout: str, dtype: torch.dtype) -> None:
    """Of every argument, alone and all together, in both ops."""
    lay = LAYOUTS[layout]
    m, g = mixed_rows(37, 2, dtype)
    h = normal(seeded(3), *m.shape, dtype=dtype)
    rms = (torch.rand(len(m), generator=seeded(0)) + 0.5).to(dtype)
    for scale in (m, m[1]):
        plain = [g, scale, rms, h]
        inverse = ops.invert_rmsnorm(g, scale, rms, 1e-3, h)
        stable = ops.stable_scale(g, scale, h, 1e-3)
        assert (inverse.status == Status.HARD).any()
        for changed in [{0}, {1}, {2}, {3}, {0, 1, 2, 3}]:
            a, b, c, d = (lay(x) if i in changed else x for i, x in enumerate(plain))
            assert same_rows(ops.invert_rmsnorm(a, b, c, 1e-3, d), inverse)
            assert same_rows(ops.stable_scale(a, b, d, 1e-3), stable)


SIZES = [*range(1, 41), *(2**i + d for i in range(6, 14) for d in (-1, 1)), 64, 512]
SIZES += [504, 520, 5376, 10501, 16385, 65535, 65536]


@needs_native
@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
def test_every_size_is_computed_whole(double: bool) -> None:
    """No element is left as it was found in memory, of any kind of row; the equations hold, and
    plain torch agrees.
    """
    dtype = torch.float64 if double else torch.float32
    # a sum of 65,536 terms in another order
    few = 2.0**16 * ULP if double else 4 * UNIT[torch.float32]
    for n in SIZES:
        families = ("gaussian", "sparse", "zeros", "plateaus") if n < 5000 else ("sparse",)
        m, g = (
            torch.cat(part)
            for part in zip(*(rows_of(family, 2, n, dtype, n) for family in families), strict=True)
        )
        rms = torch.ones(len(m), dtype=dtype)
        with poisoned_memory():
            result = ops.invert_rmsnorm(g, m, rms, 1e-6)
        check_rows(m, g, rms, 1e-6, result)
        expected = reference.invert_rmsnorm(g, m, rms, 1e-6)
        assert torch.equal(result.status, expected.status)
        torch.testing.assert_close(result.hidden, expected.hidden, rtol=few, atol=few)
