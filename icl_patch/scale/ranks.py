"""The share of one process among several, as torchrun and SLURM number them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


@dataclass(frozen=True)
class Share:
    """Every ``world_size``-th shard, from number ``rank`` on."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"expected a rank from 0 to {self.world_size - 1}, below the world size, got"
                f" {self.rank}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Share":
        """From RANK and WORLD_SIZE, else SLURM_PROCID and SLURM_NTASKS, else everything.

        Raises:
            ValueError: they are no such numbers, or one of two is missing.
        """
        for names in _VARIABLES:
            if names[0] not in environment:  # salloc sets SLURM_NTASKS alone
                continue
            values = [environment.get(name, "nothing") for name in names]
            if not all(map(str.isdecimal, values)):
                got = " and ".join(values)
                raise ValueError(f"expected numbers in {' and '.join(names)}, got {got}")
            return cls(*map(int, values))
        return cls()

    def takes(self, number: int) -> bool:
        """Whether the shard with this number belongs to this process."""
        return number % self.world_size == self.rank
