"""The tool that times extractions: what it writes down, on the embedded model."""

import pytest

from icl_patch import embedded
from tools import measure

pytest.importorskip("icl_patch.scale", reason="no pyarrow")


def test_the_record_of_a_process() -> None:
    records = list(measure.extract("embedded", "stable", "1", 3))
    assert len(records) == 2
    for record in records:
        assert record["seconds"]["all"] > 0 and record["seconds"]["own"] > 0
        assert record["patches"] == 3
    _, tokenizer = embedded.load()
    rows = measure.texts_of(tokenizer, range(3, 6))
    assert len({row["context"] for row in rows}) == 3
    lengths = [len(tokenizer(row["context"], add_special_tokens=False).input_ids) for row in rows]
    assert all(192 <= length <= 320 + 3 for length in lengths)
