"""A quantised linear map of an unknown class."""

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """Weights of one byte with a scale per row, in buffers alone: nothing of it is an
    ``nn.Linear``, and it has no weight.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("row_scale", scale)

    def forward(self, z: Tensor) -> Tensor:
        return z @ (self.packed * self.row_scale).to(z.dtype).T
