"""C++ of ``csrc`` compiled for a test, with g++ alone."""

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # in the order of DType
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def compiled(name: str, *flags: str) -> ctypes.CDLL:
    """The library of ``tests/support/NAME/entry.cpp`` with ``csrc``, compiled once for the same
    sources and flags.
    """
    include = [Path(__file__).parent / name, ROOT / "csrc"]
    flags = ("-std=c++17", "-fPIC", "-shared", "-w", *flags)
    command = [COMPILER, *flags, *(f"-I{folder}" for folder in include), include[0] / "entry.cpp"]
    digest = hashlib.sha256(" ".join(map(str, command)).encode())
    for file in sorted(file for folder in include for file in folder.rglob("*") if file.is_file()):
        digest.update(file.read_bytes())
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{digest.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            subprocess.run([*command, "-o", library.with_suffix(".new")], check=True)
            library.with_suffix(".new").rename(library)
    return ctypes.CDLL(str(library))


def address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def apart(x: Tensor, column: int) -> Tensor:
    """x with a number in every ``column``-th place, and NaN between and behind them."""
    spread = torch.full((x.numel() * max(column, 1),), torch.nan, dtype=x.dtype)
    spread[column * torch.arange(x.numel())] = x.flatten()
    return spread
