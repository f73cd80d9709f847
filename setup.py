"""What pyproject.toml cannot say: the kernels' name, and how the native library is built.

``icl_patch/ops/_native.so`` is a plain shared library on torch's stable ABI: it holds no Python, so
one file serves every Python and every torch from 2.11 on, with or without CUDA. torch's own
``CUDAExtension`` cannot be built against a torch without CUDA, hence the steps
here: the CPU driver is compiled once per instruction set, the CUDA driver by nvcc where there is
one, and both are linked to torch.

ICL_PATCH_NATIVE = auto (default: what the compilers at hand can build) | cpu (no CUDA) | off
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# kept, where build_temp is not: an editable install compiles again what has changed only
OBJECTS = ROOT / "build" / "native"
TORCH_API = "0x020b000000000000"  # torch 2.11
CUDA_ARCHITECTURES = ("80", "90")

CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
# Without fused multiply-add every instruction set gives the same bits: the products alone cannot
# afford it.
CPU_DRIVERS = {
    "rmsnorm_inverse_cpu": ["-ffp-contract=off"],
    "small_ops_cpu": ["-ffp-contract=off"],
    "patched_linear_cpu": [],
}
INSTRUCTION_SETS = {"portable": []}
X86 = ["-DICL_PATCH_X86"] if platform.machine() in ("x86_64", "AMD64") else []
if X86:
    wide = ["-mavx512f", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mf16c", "-mfma"],
        "avx512": wide,
        "avx512_bf16": [*wide, "-mavx512bf16"],
    }


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else the system's."""
    return os.environ.get("CXX") or next(
        filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None
    )


def find_cuda() -> Path | None:
    """The toolkit's folder, as nvcc itself reports it: the command may be a wrapper that lies
    elsewhere.
    """
    nvcc = shutil.which("nvcc") or next(
        (str(path) for path in [Path("/usr/local/cuda/bin/nvcc")] if path.exists()), None
    )
    if nvcc is None:
        return None
    dryrun = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    ).stderr
    found = re.search(r"^#\$ _HERE_=(.+)$", dryrun, re.M)
    return Path(found[1]).parent if found else Path(nvcc).resolve().parent.parent


def find_static_runtime(cuda: Path) -> Path:
    """The toolkit's ``libcudart_static.a``."""
    folders = [
        cuda / "lib64",
        cuda / "lib",
        *sorted(cuda.glob("targets/*/lib")),
        *sorted(cuda.glob("lib/*")),
    ]
    found = next(filter(Path.exists, (folder / "libcudart_static.a" for folder in folders)), None)
    if found is None:
        raise SystemExit(
            f"icl-patch: expected libcudart_static.a in the CUDA toolkit {cuda}, found none;"
            " ICL_PATCH_NATIVE=cpu does without"
        )
    return found


def native_extension() -> Extension | None:
    """The library, or None with a line that says why there is none."""
    wanted = os.environ.get("ICL_PATCH_NATIVE", "auto")
    if wanted not in ("auto", "cpu", "off"):
        raise SystemExit(f"expected ICL_PATCH_NATIVE=auto, cpu or off, got {wanted!r}")
    if sys.platform != "linux":
        lacking = "it is built on Linux only"
    elif wanted == "off":
        lacking = "ICL_PATCH_NATIVE=off"
    elif find_compiler() is None:
        lacking = "there is no C++ compiler"
    elif find_spec("torch") is None:
        lacking = "torch is not installed; install it first and build with --no-build-isolation"
    else:
        depends = [str(path.relative_to(ROOT)) for path in CSRC.iterdir()]
        return Extension("icl_patch.ops._native", ["csrc/ops.cpp"], depends=depends)
    print(f"icl-patch: building without the native library: {lacking}", file=sys.stderr)
    return None


def target_log(target: Path) -> Path:
    """Where the compiler's messages for an object are kept: nvcc's tell registers and spills."""
    return OBJECTS / f"{target.name}.log"


class BuildNative(build_ext):
    """Compiles every part that is older than its sources, side by side, and links them."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python in the file, no Python in its name."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link ``ext``."""
        target = Path(self.get_ext_fullpath(ext.name))
        OBJECTS.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler, cuda = (
            find_compiler(),
            find_cuda() if os.environ.get("ICL_PATCH_NATIVE") != "cpu" else None,
        )
        commands = {OBJECTS / "ops.o": self.ops_command(compiler, cuda)}
        for name, flags in INSTRUCTION_SETS.items():
            for driver, driver_flags in CPU_DRIVERS.items():
                isa = [
                    f"-DICL_PATCH_ISA={name}",
                    *X86,
                    "-fno-math-errno",
                    "-fno-trapping-math",
                    *driver_flags,
                    *flags,
                ]
                commands[OBJECTS / f"{driver}-{name}.o"] = [
                    compiler,
                    *CXX_FLAGS,
                    *isa,
                    "-c",
                    str(CSRC / f"{driver}.cpp"),
                ]
        if cuda:
            commands[OBJECTS / "cuda.o"] = cuda_command(cuda)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.make, commands, commands.values()))
        self.make(
            target, self.link_command(compiler, cuda, list(commands)), newer_than=list(commands)
        )

    def ops_command(self, compiler: str, cuda: Path | None) -> list[str]:
        """The registration: the one part that sees torch."""
        torch = Path(find_spec("torch").submodule_search_locations[0])
        flags = [f"-DTORCH_TARGET_VERSION={TORCH_API}", *X86]
        if cuda:
            flags.append(f'-DICL_PATCH_CUDA="{",".join(CUDA_ARCHITECTURES)}"')
        return [
            compiler,
            *CXX_FLAGS,
            *flags,
            f"-isystem{torch / 'include'}",
            "-c",
            str(CSRC / "ops.cpp"),
        ]

    def link_command(self, compiler: str, cuda: Path | None, objects: list[Path]) -> list[str]:
        """Torch's libraries are those the process has loaded already: no run path."""
        libraries = Path(find_spec("torch").submodule_search_locations[0]) / "lib"
        names = [
            name
            for name in ("torch", "torch_cpu", "torch_cuda", "c10")
            if (libraries / f"lib{name}.so").exists()
        ]
        link = [
            "-shared",
            "-s",
            f"-L{libraries}",
            "-Wl,--no-as-needed",
            *(f"-l{name}" for name in names),
            "-Wl,--as-needed",
        ]
        if cuda:
            link += [str(find_static_runtime(cuda)), "-ldl", "-lrt", "-lpthread"]
        return [compiler, *map(str, objects), *link]

    def make(self, target: Path, command: list[str], newer_than: list[Path] | None = None) -> None:
        """Run ``command -o target`` unless the target was made by the same command and is newer
        than what it is made from.
        """
        sources = newer_than or [*CSRC.iterdir(), Path(__file__)]
        record = OBJECTS / f"{target.name}.command"
        line = " ".join([*command, "-o", str(target)])
        made_so = (
            target.exists() and record.exists() and record.read_text() == line and not self.force
        )
        if made_so and target.stat().st_mtime > max(source.stat().st_mtime for source in sources):
            return
        done = subprocess.run(
            [*command, "-o", str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                "icl-patch: the native library cannot be"
                f" built:\n{line}\n{done.stderr}\nICL_PATCH_NATIVE=off does without"
            )
        record.write_text(line)
        target_log(target).write_text(done.stderr)


def cuda_command(cuda: Path) -> list[str]:
    """Machine code for the architectures known, and PTX for those to come."""
    *_, latest = CUDA_ARCHITECTURES
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHITECTURES]
    flags = [
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-Xptxas=-v",
        "--threads=0",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
    ]
    ptx = f"-gencode=arch=compute_{latest},code=compute_{latest}"
    return [str(cuda / "bin/nvcc"), *flags, *code, ptx, "-c", str(CSRC / "rmsnorm_inverse.cu")]


class PythonlessWheel(bdist_wheel):
    """The library depends on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform> where there is a library."""
        python, abi, platform_tag = super().get_tag()
        return (python, abi, platform_tag) if self.root_is_pure else ("py3", "none", platform_tag)


if __name__ == "__main__":
    native = native_extension()
    setup(
        packages=[
            *find_packages(include=["icl_patch", "icl_patch.*"]),
            "icl_patch.kernels",
            *(f"icl_patch.{name}" for name in find_packages(include=["bench", "bench.*"])),
        ],
        package_dir={"icl_patch.kernels": "triton_kernels", "icl_patch.bench": "bench"},
        package_data={
            "icl_patch": ["py.typed"],
            "icl_patch.evaluation.embedded": ["model/*"],
            "icl_patch.kernels": ["configs/*.json"],
        },
        ext_modules=[native] if native else [],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PythonlessWheel},
    )
