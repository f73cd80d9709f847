"""The tool that times extractions: what it writes down, on the embedded model."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from icl_patch import embedded

pytest.importorskip("icl_patch.scale", reason="no pyarrow", exc_type=ModuleNotFoundError)
TOOL = Path(__file__).parents[2] / "tools" / "extraction_speed.py"


def test_the_record_of_a_process(tmp_path: Path) -> None:
    tool = runpy.run_path(str(TOOL))
    records: list[dict[str, Any]] = []
    waited: list[None] = []
    barrier = SimpleNamespace(wait=lambda: waited.append(None))
    tool["work"]("embedded", "stable", 1, 3, 2, barrier, SimpleNamespace(put=records.append))
    assert len(records) == 2 and len(waited) == 4
    for record in records:
        seconds = record["seconds"]
        parts = [seconds[part] for part in tool["PARTS"]]
        assert (
            all(part > 0 for part in parts) and sum(parts) < seconds["all"] and seconds["own"] > 0
        )
        assert record["patches"] == 3
        # factors of 3 rows of 16 tokens, and more: see docs/design.md
        assert record["bytes"]["shards"] > 3 * 16 * 4 * 1000 and record["bytes"]["index"] > 0
    _, tokenizer = embedded.load()
    tool["write_rows"](tokenizer, tmp_path / "rows.jsonl", range(3, 6))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len({row["context"] for row in rows}) == 3
    lengths = [len(tokenizer(row["context"], add_special_tokens=False).input_ids) for row in rows]
    assert all(192 <= length <= 320 + 3 for length in lengths)
