"""Print, as JSON, the behaviour of scaled-dot-product attention on a device with the masks of a
decode step.

For each head size, dtype and backend setting: the backend that torch chooses; NaNs; the largest
error against fp64; whether a key that the mask hides shows in the bits; whether a row that hides
every key is NaN; and the host time of the first calls with new numbers of keys.

usage: build/python tools/sdpa_probe.py [--device cuda] [--keys 300]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch.bench.costs import profiled

HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, HEADS = 3, 4
NEW_LENGTHS = 6


def operands(dtype: torch.dtype, head: int, keys: int, device: str) -> tuple[Tensor, ...]:
    """q (B, H, 1, D), k and v (B, H, keys, D), and a mask of bool (B, 1, 1, keys): row 0 sees all
    keys, row 1 hides the first third, row 2 hides all of them.
    """
    rng = torch.Generator().manual_seed(head)
    sizes = ((ROWS, HEADS, 1, head), *[(ROWS, HEADS, keys, head)] * 2)
    q, k, v = (torch.randn(size, generator=rng).to(device, dtype) for size in sizes)
    mask = torch.ones(ROWS, 1, 1, keys, dtype=torch.bool)
    mask[1, ..., : keys // 3] = False
    mask[2] = False
    return q, k, v, mask.to(device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As transformers calls it."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def host_seconds(dtype: torch.dtype, head: int, keys: int, device: str) -> list[float]:
    """Of the first call with each of some new numbers of keys."""
    seconds = []
    for more in range(1, NEW_LENGTHS + 1):
        inputs = operands(dtype, head, keys + more, device)
        started = time.perf_counter()
        attend(*inputs)
        seconds.append(time.perf_counter() - started)
    return seconds


def probe(dtype: torch.dtype, head: int, keys: int, device: str) -> dict[str, Any]:
    """The numbers of one head size and dtype."""
    q, k, v, mask = operands(dtype, head, keys, device)
    out = attend(q, k, v, mask)
    seen = slice(0, 2)  # the rows that see a key
    scores = q[seen].double() @ k[seen].double().mT / head**0.5
    expected = scores.masked_fill(~mask[seen], -torch.inf).softmax(-1) @ v[seen].double()
    other_k, other_v = k.clone(), v.clone()
    hidden = keys // 3
    other_k[1, :, :hidden], other_v[1, :, :hidden] = 7.0, -7.0
    other = attend(q, other_k, other_v, mask)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "head": head,
        "backend": profiled(lambda: attend(q, k, v, mask), torch.device(device)).get("SDPA"),
        "nan": bool(out[seen].isnan().any()),
        "error": float((out[seen].double() - expected).abs().max()),
        "hidden_keys_show": not torch.equal(out[1], other[1]),
        "row_without_keys": "nan" if out[2].isnan().any() else float(out[2].abs().max()),
        "row_without_keys_changes_others": not torch.equal(
            out[seen], attend(q[seen], k[seen], v[seen], mask[seen])
        ),
        "host_ms_of_new_lengths": [
            round(1e3 * s, 3) for s in host_seconds(dtype, head, keys, device)
        ],
    }


def probes(device: str, keys: int) -> Iterator[dict[str, Any]]:
    """With cuDNN's backend, where there is one, and without."""
    for cudnn in (True, False) if device.startswith("cuda") else (False,):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for head in HEAD_SIZES:
            for dtype in DTYPES:
                found: dict[str, Any] = {"cudnn_allowed": cudnn}
                try:
                    found |= probe(dtype, head, keys, device)
                except RuntimeError as error:  # no backend, or a kernel that fails: say which
                    found |= {"dtype": str(dtype), "head": head, "failed": str(error)[:200]}
                yield found


def main() -> int:
    """One line for each case, as it is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keys", type=int, default=300)
    options = parser.parse_args()
    for found in probes(options.device, options.keys):
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
