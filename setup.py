"""Package metadata and build steps that pyproject.toml cannot express: the names of the packages in
``triton_kernels`` and ``bench``, and the native library.

``icl_patch/ops/_native.so`` is a plain shared library on torch's stable ABI: it holds no Python, so
one file serves every Python and every torch from 2.11 on, with or without CUDA. torch's own
``CUDAExtension`` cannot be built against a torch without CUDA. Here ninja compiles the CPU drivers
once per instruction set and, where there is an nvcc, the CUDA driver, and links them to torch. It
compiles again only the parts whose command, sources or headers have changed.

ICL_PATCH_NATIVE = auto (default: what the compilers at hand can build) | cpu (no CUDA) | off
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import setuptools

# pip checks pyproject.toml's build requirements only where it isolates the build
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"icl-patch: expected setuptools 77 or later, got {setuptools.__version__}: pip install"
        " 'setuptools>=77' ninja"
    )

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# Not setuptools' build_temp, which a build by pip does not keep.
OBJECTS = ROOT / "build" / "native"
TORCH_API = "0x020b000000000000"  # torch 2.11
CUDA_ARCHITECTURES = ("80", "90")

X86 = ["-DICL_PATCH_X86"] if platform.machine() in ("x86_64", "AMD64") else []
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", f"-I{CSRC}", *X86]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-psabi"]
CPU_FLAGS = ["-fno-math-errno", "-fno-trapping-math"]
# Without fused multiply-add every instruction set gives the same bits. Products and attention need
# it.
CPU_DRIVERS = {
    "attention": [],
    "gated_product": ["-ffp-contract=off"],
    "linear": [],
    "rmsnorm_inverse": ["-ffp-contract=off"],
    "row_ops": ["-ffp-contract=off"],
}
INSTRUCTION_SETS = {"portable": []}
if X86:
    avx512 = ["-mavx512f", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
    avx512_bf16 = [*avx512, "-mavx512bf16"]
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mf16c", "-mfma"],
        "avx512": avx512,
        "avx512_bf16": avx512_bf16,
        # Its instructions are written in assembly: a compiler needs no flag for them.
        "amx": [*avx512_bf16, "-DICL_PATCH_TILES=AmxTiles"],
    }


def find_ninja() -> list[str] | None:
    """The command of the ninja package, else the system's."""
    if find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    return [command] if (command := shutil.which("ninja")) else None


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
    elif find_ninja() is None:
        lacking = "there is no ninja; pip install ninja"
    elif find_spec("torch") is None:
        lacking = "torch is not installed; install it first and build with --no-build-isolation"
    else:
        sources = [str(path.relative_to(ROOT)) for path in CSRC.rglob("*.cpp")]
        depends = [str(path.relative_to(ROOT)) for path in CSRC.rglob("*.[hc]*")]
        return Extension("icl_patch.ops._native", sources, depends=depends)
    print(f"icl-patch: building without the native library: {lacking}", file=sys.stderr)
    return None


def cpu_commands(compiler: str, cuda: Path | None) -> dict[str, tuple[Path, list[str]]]:
    """Source and command of every object file that the C++ compiler makes."""
    torch = Path(find_spec("torch").submodule_search_locations[0])
    flags = [f"-DTORCH_TARGET_VERSION={TORCH_API}", f"-isystem{torch / 'include'}"]
    if cuda:
        flags.append(f'-DICL_PATCH_CUDA="{",".join(CUDA_ARCHITECTURES)}"')
    commands = {
        f"{source.stem}.o": (source, [compiler, *CXX_FLAGS, *flags])
        for source in sorted(CSRC.glob("bindings/*.cpp"))
    }
    for isa, isa_flags in INSTRUCTION_SETS.items():
        for driver, driver_flags in CPU_DRIVERS.items():
            if isa == "amx" and driver != "linear":
                continue  # the rest is avx512_bf16's
            flags = [f"-DICL_PATCH_ISA={isa}", *CPU_FLAGS, *driver_flags, *isa_flags]
            source = CSRC / "cpu" / f"{driver}.cpp"
            commands[f"{driver}-{isa}.o"] = (source, [compiler, *CXX_FLAGS, *flags])
    return commands


def cuda_command(cuda: Path) -> list[str]:
    """Machine code for the known architectures, and PTX for later ones."""
    *_, latest = CUDA_ARCHITECTURES
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHITECTURES]
    code.append(f"-gencode=arch=compute_{latest},code=compute_{latest}")
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", "--threads=0", f"-I{CSRC}"]
    return [str(cuda / "bin/nvcc"), *flags, "-Xcompiler=-fPIC,-fvisibility=hidden", *code]


def link_flags(cuda: Path | None) -> list[str]:
    """No run path: torch's libraries are those that the process has loaded already."""
    libraries = Path(find_spec("torch").submodule_search_locations[0]) / "lib"
    names = ("torch", "torch_cpu", "torch_cuda", "c10")
    present = [f"-l{name}" for name in names if (libraries / f"lib{name}.so").exists()]
    flags = ["-shared", "-s", f"-L{libraries}", "-Wl,--no-as-needed", *present, "-Wl,--as-needed"]
    if cuda:
        flags += [str(find_static_runtime(cuda)), "-ldl", "-lrt", "-lpthread"]
    return flags


def ninja_file(compiler: str, cuda: Path | None) -> str:
    """What ninja builds in OBJECTS. The report of a compiler goes to a log beside its object file:
    ptxas tells registers and spills.
    """
    commands = {}
    if cuda:  # first, because it takes longest: ninja starts in this order
        commands["cuda.o"] = (CSRC / "cuda" / "rmsnorm_inverse.cu", cuda_command(cuda))
    commands |= cpu_commands(compiler, cuda)
    log = "> $out.log 2>&1 || (cat $out.log; false)"
    lines = [
        "rule compile",
        f"  command = $line -MD -MF $out.d -c $in -o $out {log}",
        "  description = $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {escaped(compiler)} $in $flags -o $out",
        f"build _native.so: link {' '.join(commands)}",
        f"  flags = {escaped(*link_flags(cuda))}",
    ]
    for target, (source, command) in commands.items():
        path = re.sub(r"([$ :])", r"$\1", str(source))
        lines += [f"build {target}: compile {path}", f"  line = {escaped(*command)}"]
    return "\n".join(lines) + "\n"


def escaped(*words: str) -> str:
    """For the shell, in a ninja file."""
    return shlex.join(words).replace("$", "$$")


class BuildNative(build_ext):
    """Builds the library with ninja."""

    def get_ext_filename(self, fullname: str) -> str:
        """The file's name says nothing of Python, as it holds none."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link."""
        cuda = find_cuda() if os.environ.get("ICL_PATCH_NATIVE") != "cpu" else None
        OBJECTS.mkdir(parents=True, exist_ok=True)
        (OBJECTS / "build.ninja").write_text(ninja_file(find_compiler(), cuda))
        done = subprocess.run(
            [*find_ninja(), "-C", str(OBJECTS)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                "icl-patch: the native library cannot be built:\n"
                f"{done.stdout}{done.stderr}ICL_PATCH_NATIVE=off does without"
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(OBJECTS / "_native.so", target)


class PythonlessWheel(bdist_wheel):
    """The library depends on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform> where there is a library."""
        python, abi, platform_tag = super().get_tag()
        return (python, abi, platform_tag) if self.root_is_pure else ("py3", "none", platform_tag)


def installed_packages(name: str, folder: str) -> list[str]:
    """``folder`` and its subpackages, as ``name``."""
    return [name, *(f"{name}.{package}" for package in find_packages(folder))]


if __name__ == "__main__":
    native = native_extension()
    setup(
        packages=[
            *find_packages(include=["icl_patch", "icl_patch.*"]),
            *installed_packages("icl_patch.kernels", "triton_kernels"),
            *installed_packages("icl_patch.bench", "bench"),
        ],
        package_dir={"icl_patch.kernels": "triton_kernels", "icl_patch.bench": "bench"},
        package_data={
            "icl_patch": ["py.typed"],
            "icl_patch.evaluation": ["*.html.jinja", "*.json"],
            "icl_patch.evaluation.embedded": ["model/*"],
            "icl_patch.kernels": ["configs/*.json"],
            "icl_patch.static": ["preserved_texts.txt"],
        },
        ext_modules=[native] if native else [],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PythonlessWheel},
    )
