"""The estimate of a kernel's bandwidth from its SASS."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import kernel_bandwidth

# Two sums in turn, of which the first moves to other registers; the third takes the registers that
# an operand was loaded to.
SASS = """
        /*0010*/                   HMMA.16816.F32.BF16 R4, R32.reuse, R16, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R32, R18, R8 ;
        /*0030*/                   HMMA.16816.F32.BF16 R12, R32, R16, R4 ;
        /*0040*/                   LDSM.16.M88.4 R6, [R40] ;
        /*0050*/                   HMMA.16816.F32.BF16 R12, R32, R18, R12 ;
        /*0060*/                   HMMA.16816.F32.BF16 R8, R32, R18, R8 ;
        /*0070*/              @!P0 HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
"""


def test_chains_follow_the_sums() -> None:
    assert kernel_bandwidth.chains(SASS) == [3, 1, 1, 1]


def test_the_estimate_has_three_bounds() -> None:
    """Numbers of the shape 4096 × 14336, then with few bytes in flight and with a long chain."""
    found = kernel_bandwidth.Estimate(85, 90, [4] * 4, 256, 3, 8192, 3, 2 * 4096 * 14336)
    assert 0.85 < found.share < 0.9
    assert replace(found, ahead=1).in_flight == 256 * 8192
    assert replace(found, ahead=1).share == pytest.approx(found.share * 256 * 8192 / 2.3e6, rel=0.1)
    assert replace(found, lengths=[64]).share < 0.6


@pytest.mark.skipif(kernel_bandwidth.disassembler() is None, reason="needs triton and nvdisasm")
def test_running_sums_are_seen() -> None:
    """A warp's 16 instructions a step, in four chains."""
    tool = kernel_bandwidth.disassembler()
    found = kernel_bandwidth.estimate(1152, 6912, tool)
    assert sorted(found.lengths) == [4, 4, 4, 4]
    assert found.programs == 72 and found.in_flight == 72 * 4 * 8192
    assert found.wide > 0.9 * found.copies
    few_steps = kernel_bandwidth.estimate(6912, 1152, tool)
    assert max(few_steps.lengths) == 8
    split = kernel_bandwidth.estimate(256, 1152, tool, splits=4)
    # a range of two steps of 16 × 256 elements, and programs for each range
    assert (split.programs, split.in_flight) == (16 * 4, 16 * 4 * 2 * 8192)
    pair = kernel_bandwidth.estimate(6912, 1152, tool, how="recording a pair")
    assert (pair.programs, pair.nbytes) == (2 * 216, 2 * few_steps.nbytes)
    maps = kernel_bandwidth.estimate(2048, 1152, tool, how="with k and v of 256")
    assert (maps.programs, maps.nbytes) == (128 + 16 + 16, 2 * 1152 * (2048 + 256 + 256))
    assert maps.wide > 0.9 * maps.copies and sorted(maps.lengths) == [4, 4, 4, 4]
