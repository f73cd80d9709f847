"""The package as it is installed, as a tree of links.

``triton_kernels/`` and ``bench/`` are installed as ``icl_patch.kernels`` and ``icl_patch.bench``,
which a checkout does not show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def installed_tree(checkout: Path) -> Iterator[Path]:
    """A temporary folder with ``icl_patch`` as a checkout's installation lays it out."""
    with TemporaryDirectory() as folder:
        package = Path(folder).resolve() / "icl_patch"
        package.mkdir()
        for path in (checkout / "icl_patch").iterdir():
            (package / path.name).symlink_to(path)
        (package / "kernels").symlink_to(checkout / "triton_kernels")
        (package / "bench").symlink_to(checkout / "bench")
        yield package.parent
