"""The check of indices, whose range only the host can see."""

from torch import Tensor

from icl_patch.ops.dispatch import is_traced, is_transformed


def check_indices(name: str, indices: Tensor, least: int, count: int) -> None:
    """Indices from ``least`` to ``count - 1``: checked only if the host can read the values without
    waiting for a device.
    """
    if not indices.is_cpu or not indices.numel() or is_traced() or is_transformed():
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < least or highest >= count:
        raise ValueError(f"expected {name} from {least} to {count - 1}, got {lowest} to {highest}")
