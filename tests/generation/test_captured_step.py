"""What a CUDA graph's step hands out; the graph itself is tested in ``tests/gpu``."""

import torch

from icl_patch.generation.captured_step import _gathered


def test_tensors_are_gathered_with_all_their_bits() -> None:
    """Views of one memory in several dtypes, strided, empty and of odd sizes; a change of the
    originals is none of the copies.
    """
    memory, matrix = torch.arange(40, dtype=torch.uint8), torch.randn(7, 5)
    tensors = [
        matrix.T[1:3],
        matrix[2:, 1],
        torch.randn(63).double(),
        torch.zeros(0, 4),
        torch.tensor(True),
        memory[2:6].view(torch.bfloat16),
        memory[8:16].view(torch.float32),
        torch.randn(2, 1, 3).expand(2, 4, 3),
        torch.tensor([True, False, True]),
    ]
    expected = [x.clone() for x in tensors]
    gathered, places = _gathered(tensors)
    matrix.zero_()
    memory.zero_()
    copy = gathered.clone()
    gathered.zero_()
    for place, wanted, x in zip(places, expected, tensors, strict=True):
        found = place.tensor_in(copy)
        assert found.stride() == x.stride() and found.data_ptr() % found.itemsize == 0
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    # one copy of a memory that tensors share
    assert gathered.numel() <= 4 * 35 + 8 * 63 + 40 + 4 * 6 + 8 * 16
