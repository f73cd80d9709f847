"""Patch files as the design documents them, read and written without the package."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from icl_patch import ContextPatch, PatchFormatError

ZEROS = "0" * 64


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors."""
    content = path.read_bytes()
    start = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(start["__metadata__"]["icl_patch"]), safetensors.torch.load(content)


def sealed(content: bytes) -> bytes:
    """The content with its SHA-256 in place of the first 64 zeros."""
    return content.replace(ZEROS.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def write(path: Path, header: Any, tensors: dict[str, Tensor]) -> None:
    """A file with this header (a text as it is) and its right SHA-256."""
    if isinstance(header, dict):
        if "sha256" in header:
            header = {"format": header.get("format"), "sha256": ZEROS} | header | {"sha256": ZEROS}
        header = json.dumps(header)
    path.write_bytes(sealed(safetensors.torch.save(tensors, {"icl_patch": header})))


def refuses(path: Path) -> bool:
    """Whether the file is refused as no good patch file; another error goes on."""
    try:
        ContextPatch.load(path)
    except PatchFormatError:
        return True
    return False
