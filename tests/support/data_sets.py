"""Data sets of contexts for tests, and the model's own logits for their rows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch import embedded


def prompts(count: int) -> list[dict[str, str]]:
    """Different rows of different lengths, of all tasks of the embedded model."""
    each = -(-count // len(embedded.KINDS))
    found = [
        prompt for kind in embedded.KINDS for prompt in embedded.held_out_prompts(kind, 2 * each)
    ]
    texts = list(dict.fromkeys(prompt.context + prompt.question for prompt in found))
    assert len(texts) >= count
    cuts = [-1 - number % 7 for number in range(count)]
    chosen = texts[:: len(texts) // count][:count]
    return [
        {"context": text[:cut], "kept": text[cut:]} for text, cut in zip(chosen, cuts, strict=True)
    ]


def write_json_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder and the folders in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@torch.no_grad()
def own_logits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: dict[str, str]
) -> Tensor:
    """The logits (T, V) of a row's kept tokens, one byte each, from one call of the model."""
    ids = tokenizer(row["context"] + row["kept"], return_tensors="pt").input_ids
    return model(ids).logits[0, -len(row["kept"].encode()) :]
