"""The portable path of the CPU drivers on an ARM processor: cross-compiled, and run in an emulator.

Needs QEMU's user mode (``apt-get install qemu-user``), and a compiler for aarch64:
``aarch64-linux-gnu-g++``, or ``pip install ziglang``.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
_EXACT = ["-ffp-contract=off"]
DRIVERS = {"gated_product": _EXACT, "linear": [], "rmsnorm_inverse": _EXACT, "row_ops": _EXACT}
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
NATIVE = shutil.which("g++")


def cross_compiler() -> list[str] | None:
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc, "-static"]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    return None


CROSS = cross_compiler()
pytestmark = pytest.mark.skipif(
    not (EMULATOR and NATIVE and CROSS),
    reason="needs g++, an aarch64 compiler and QEMU's user mode",
)


def results(compiler: list[str], run: list[str], folder: Path) -> dict[str, bytes]:
    """What the driver writes when it is built by a compiler and run by a command."""
    flags = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math"]
    flags += [f"-I{ROOT / 'csrc'}", "-DICL_PATCH_ISA=portable"]
    objects = []
    for name, own in {**DRIVERS, "driver": ["-ffp-contract=off"]}.items():
        source = ROOT / "csrc/cpu" / f"{name}.cpp"
        if name == "driver":
            source = ROOT / "tests/support/aarch64/driver.cpp"
        objects.append(folder / f"{name}.o")
        command = [*compiler, *flags, *own, "-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True)
    program = folder / "driver"
    subprocess.run([*compiler, *objects, "-o", program], check=True)
    rest = subprocess.run([*run, program], check=True, capture_output=True).stdout
    found = {}
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, size = line.decode().split()
        found[name], rest = rest[: int(size)], rest[int(size) :]
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The results on this processor and on aarch64."""
    here, arm = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("aarch64")
    return results([NATIVE], [], here), results(CROSS, [EMULATOR], arm)


def numbers(name: str, data: bytes) -> np.ndarray:
    if "/bf16/" in name:
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if "/fp16/" in name else np.float32)


def without_nan_signs(name: str, data: bytes) -> bytes:
    """A NaN's sign and payload are the processor's own."""
    if name.rpartition("/")[2] in ("status", "evaluations"):
        return data
    part = name.rpartition("/")[2]
    if part in ("shift", "new_scale") or "inversion/fp64" in name:
        values = np.frombuffer(data, np.float64)
    elif part in ("hidden", "delta", "v", "inverse_norm2"):
        values = np.frombuffer(data, np.float32)
    else:
        values = numbers(f"{name}/", data)
    return np.where(np.isnan(values), np.array(np.nan, values.dtype), values).tobytes()


def test_inversions_and_rows_have_the_same_bits(both: tuple) -> None:
    here, arm = both
    assert here.keys() == arm.keys() and len(here) > 150
    for name, data in here.items():
        if not name.startswith("linear/"):
            assert without_nan_signs(name, arm[name]) == without_nan_signs(name, data), name


def test_products_agree_up_to_the_rounding_of_their_sums(both: tuple) -> None:
    """aarch64 fuses multiplications with additions, as the other builds for x86 do."""
    here, arm = both
    for name, data in here.items():
        if name.startswith("linear/"):
            expected, found = (numbers(name, x).astype(np.float64) for x in (data, arm[name]))
            eps = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}[name.split("/")[1]]
            limit = 152 * 2.0**-24 * 150**0.5 + 2 * eps * np.abs(expected)  # of the sum, of y
            assert (np.abs(found - expected) <= limit).all(), name


def test_a_row_has_the_same_bits_alone_and_beside_others(both: tuple) -> None:
    for found in both:
        for name, alone in found.items():
            if name.startswith("linear/") and name.endswith("/1"):
                assert found[f"{name[:-1]}5"].startswith(alone), name
