"""Attention of one token a row against torch's, over a cache.

`decode_attention` is ours; `scaled_dot_product_attention` is torch's, as transformers calls it:
with one key for several heads (`enable_gqa`) and a mask, or with a row's keys repeated for
each head (`repeated`). All read the same keys and values; their bytes are those that must be read.
A GPU runs torch's kernels, so it has no cases here.
"""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch import ops
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.timing import Call

# heads, heads of keys and values, width: of SmolLM2-135M, and of Llama 3's 8B
HEADS = [(9, 3, 64), (32, 8, 128)]
ROWS, LENGTHS = [1, 16], [256, 1024, 4096]
DTYPES = [torch.float32, torch.bfloat16]
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def cases(device: torch.device, quick: bool) -> list[Case]:
    """A case for each form of the heads, number of rows, length and dtype."""
    if device.type != "cpu":
        return []
    lengths = LENGTHS[:2] if quick else LENGTHS
    return [
        Case(
            f"{rows} × {heads}/{groups} × {width}, {length} {dtype_name(dtype)}",
            functools.partial(comparison, rows, heads, groups, width, length, dtype, device),
            {"rows": rows, "heads": heads, "length": length},
        )
        for (heads, groups, width), rows, length, dtype in itertools.product(
            HEADS, ROWS, lengths, DTYPES
        )
    ]


def comparison(
    rows: int,
    heads: int,
    groups: int,
    width: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Comparison:
    """The calls of one case; the rows have up to 3 columns of padding on their left."""
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(rows, heads, width, generator=rng).to(device, dtype)
    key, value = (
        torch.randn(rows, groups, length, width, generator=rng).to(device, dtype) for _ in range(2)
    )
    mask = (torch.arange(length) >= (torch.arange(rows) % 4).unsqueeze(1)).to(device)
    torch_query, torch_mask = query.unsqueeze(2), mask[:, None, None]

    def repeated(dtype: torch.dtype) -> Tensor:
        keys, values = (x.repeat_interleave(heads // groups, 1).to(dtype) for x in (key, value))
        return F.scaled_dot_product_attention(
            torch_query.to(dtype), keys, values, torch_mask
        ).squeeze(2)

    def grouped() -> Tensor:
        return F.scaled_dot_product_attention(
            torch_query, key, value, torch_mask, enable_gqa=True
        ).squeeze(2)

    expected = repeated(torch.float64)

    calls: dict[str, Call] = {
        "decode_attention": lambda: ops.decode_attention(query, key, value, mask),
        "scaled_dot_product_attention": grouped,
        "repeated": lambda: repeated(dtype),
    }
    return Comparison(
        "decode_attention",
        calls,
        lambda _name, output: relative_error(output, expected, _LIMITS[dtype]),
        nbytes=dict.fromkeys(calls, key.nbytes + value.nbytes),
    )
