"""The tensors that a decode step reads."""

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache


@dataclass(eq=False)
class StepInputs:
    """The tensors that a step reads: which token it is and where it stands. They keep their
    addresses, so a compiled step can run again.

    Attributes:
        current, positions: (rows, 1) int64, the current token and its position; B rows, or 2B if
            both streams are in the batch.
        mask: (rows, capacity) int64, 1 = token.
        cache: all tokens but the current one, of B rows.
        slot: (1,) int64, the current token's column in a fixed cache; None for a dynamic one.
        length: the number of tokens including the current one.
    """

    current: Tensor
    positions: Tensor
    mask: Tensor
    cache: Cache
    slot: Tensor | None
    length: int

    def advance(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token, without waiting for the device."""
        self.current.copy_(token_ids.repeat(len(self.current) // len(token_ids)).unsqueeze(1))
        self.positions += 1
        self.mask[:, self.length] = 1
        self.length += 1
        if self.slot is not None:
            self.slot += 1

    @property
    def visible(self) -> Tensor:
        """The mask over the columns of the cache, including the current token's."""
        return self.mask if self.slot is not None else self.mask[:, : self.length]
