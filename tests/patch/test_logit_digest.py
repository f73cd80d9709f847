"""The digest of a patch's logits: what it tells of other logits, and its hash."""

import pytest
import torch
from support.numeric import bits, every_dtype, normal, seeded

from icl_patch import metrics
from icl_patch.patch.logit_digest import LogitDigest, row_hashes
from icl_patch.tolerances import rounding_limit

SHAPE = (2, 5, 63)
KNOWN = torch.ones(SHAPE[:2], dtype=torch.bool)
KNOWN[1, 3:] = False


def digest_of(logits: torch.Tensor, *, identical: bool = True) -> LogitDigest:
    return LogitDigest.of(logits, KNOWN, logits.dtype, identical).hashed(logits)


@every_dtype
@pytest.mark.parametrize("size", [0.1, 10.0])
def test_errors_are_at_most_the_logits_own(dtype: torch.dtype, size: float) -> None:
    """Of negative logits too, and where another element becomes the largest."""
    for offset in (0, -20):
        logits = (normal(seeded(0), *SHAPE) + offset).to(dtype)
        other = logits + (size * normal(seeded(1), *SHAPE)).to(dtype)
        digest = digest_of(logits)
        assert digest.known.equal(KNOWN) and digest.largest.dtype == dtype
        assert digest.argmax[KNOWN].equal(logits.argmax(-1)[KNOWN])
        assert not any(x.any() for x in (*digest.errors(logits), digest.other_bits(logits)))
        off, ahead = digest.errors(other)
        real = metrics.linf(other, logits)
        assert (off <= real * (1 + 1e-12)).all() and (off[KNOWN] >= 0.01 * real[KNOWN]).any()
        now = other.double().gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
        behind = (other.double().amax(-1) - now) / logits.double().abs().amax(-1)
        assert torch.allclose(ahead[KNOWN], behind[KNOWN], rtol=1e-6, atol=0)
        assert not off[~KNOWN].any() and not ahead[~KNOWN].any()


def test_logits_that_are_not_finite() -> None:
    """NaN is equal to itself; a NaN or an infinity that comes is an error without end."""
    logits = normal(seeded(0), *SHAPE, dtype=torch.float32)
    for row, value in ((0, torch.nan), (1, torch.inf)):
        wrong = logits.clone()
        wrong[row, 1, 7] = value
        for there, here in ((logits, wrong), (wrong, logits)):
            off = digest_of(there).errors(here)[0]
            assert off[row, 1] == torch.inf and off.isfinite().sum() == off.numel() - 1
        assert not digest_of(wrong).errors(wrong)[0].any()


def test_the_limit_is_that_of_the_coarser_dtype() -> None:
    """A model may give the logits in another dtype than that of its products."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for dtype, of_logits, expected in ((fp32, fp32, fp32), (bf16, fp32, bf16), (fp32, bf16, bf16)):
        logits = normal(seeded(0), *SHAPE, dtype=of_logits)
        digest = LogitDigest.of(logits, KNOWN, dtype, identical=False)
        assert digest.limit == rounding_limit(expected)


# -- the hash


@every_dtype
@pytest.mark.parametrize("width", [1, 2, 63, 1000], ids=str)
def test_a_hash_sees_every_bit(dtype: torch.dtype, width: int) -> None:
    x = normal(seeded(0), 3, width, dtype=dtype)
    before = row_hashes(x)
    assert len(before.unique()) == 3
    for place in {0, width // 2, width - 1}:
        for bit in (0, 3, 7 * x.element_size()):
            bits(x)[1, place] ^= 1 << bit
            assert (row_hashes(x) != before).tolist() == [False, True, False]
            bits(x)[1, place] ^= 1 << bit
    swapped = x.flip(-1)
    assert width == 1 or (row_hashes(swapped) != before).all()
    assert row_hashes(x.T.contiguous().T).equal(before)
    assert row_hashes(x[:0]).shape == (0,)


def test_zero_and_minus_zero_have_one_hash() -> None:
    x = torch.tensor([[0.0, 1.0, -0.0]])
    assert row_hashes(x).equal(row_hashes(torch.tensor([[-0.0, 1.0, 0.0]])))
    assert not row_hashes(x).equal(row_hashes(-x))


def test_the_hash_is_as_documented() -> None:
    """The formula with Python's integers; files hold it, so it must not change."""
    x = normal(seeded(0), 1, 5, dtype=torch.float32)
    halves = [*(bits(x)[0].long() & 0xFFFFFFFF).tolist(), 0]
    words = [signed(halves[k] | halves[k + 1] << 32) for k in (0, 2, 4)]
    factors, multiplier = [], 0x1E3779B97F4A7C15
    for place in (1, 2, 3):
        y = signed(place * multiplier)
        y = signed((y ^ (y >> 29)) * multiplier)
        factors.append((y ^ (y >> 32)) | 1)
    total = sum(f * word for f, word in zip(factors, words, strict=True))
    assert row_hashes(x).tolist() == [signed(total)]


def signed(y: int) -> int:
    """As an int64 holds it."""
    return (y + 2**63) % 2**64 - 2**63
