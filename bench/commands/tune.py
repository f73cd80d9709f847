"""``icl-patch tune``: choose the Triton kernels' configurations on a GPU."""

import argparse
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from icl_patch.cli import arguments, output

HELP = "choose the kernels' configurations for this GPU, by measuring, and write its data file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_device(parser, "cpu", "cuda, cuda:1, … (required)")
    parser.add_argument(
        "--dtype",
        type=arguments.dtype,
        nargs="+",
        metavar="DTYPE",
        help="default: bf16 fp16 fp32",
    )
    parser.add_argument(
        "--quick", action="store_true", help="minutes: one shape per class, fewer numbers of rows"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the data file (default: where the kernels look for it)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure and write the GPU's data file."""
    if options.device.type != "cuda":
        raise ValueError(
            f"expected a CUDA device (--device cuda), got {options.device}: configurations are"
            " measured on their own GPU"
        )
    if find_spec("triton") is None:
        raise ValueError(
            "expected triton, the compiler of the tuned kernels, and it is not installed: pip"
            " install 'icl-patch[gpu]'"
        )
    from icl_patch.bench import tuning

    dtypes = options.dtype or [arguments.dtype(name) for name in ("bf16", "fp16", "fp32")]
    path, entries = tuning.write(
        options.device,
        dtypes,
        options.quick,
        options.out,
        lambda line: print(f"tune: {line}", file=sys.stderr, flush=True),
    )
    result = {"file": str(path), "entries": [asdict(entry) for entry in entries]}
    output.print_result(options, result, f"{len(entries)} entries in {path}")
    return 0
