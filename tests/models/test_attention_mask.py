"""The condition on a model's masks: in force in one pass of one thread, and gone without a
trace.
"""

import threading

import pytest
import torch
from support.random_models import build, shallow, tokens
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as TABLE
from transformers.models.bloom import modeling_bloom

from icl_patch.models.attention_mask import Visibility, restricted_attention
from icl_patch.models.table_override import TableOverride
from icl_patch.recording.residual_sum import ResidualSum


def state() -> tuple:
    return {name: TABLE[name] for name in TABLE}, modeling_bloom.build_alibi_tensor


def nothing_hidden(rows: int, width: int) -> Visibility:
    return Visibility(torch.ones(rows, width, dtype=torch.bool))


def test_nothing_is_left_behind() -> None:
    before, model = state(), shallow("bloom")
    with restricted_attention(model, nothing_hidden(2, 3)):
        assert state() != before
    assert state() == before
    with pytest.raises(ZeroDivisionError), restricted_attention(model, nothing_hidden(2, 3)):
        _ = 1 / 0
    assert state() == before


@pytest.mark.parametrize("at", [1, 2], ids=["entering", "leaving"])
def test_an_interrupt_leaves_nothing_behind(at: int) -> None:
    """What takes the function's place later is wrapped in its turn."""

    class Table(dict):
        writes = 0

        def __setitem__(self, name: str, function: object) -> None:
            super().__setitem__(name, function)
            self.writes += 1
            if self.writes == at:
                raise KeyboardInterrupt

    table = Table(sdpa=len)
    override = TableOverride(table, "sdpa", lambda function, x: function(x) + 1)
    with pytest.raises(KeyboardInterrupt), override():
        assert table["sdpa"]("12") == 3
    assert table["sdpa"] is len
    for function, result in ((len, 3), (int, 13)):
        table["sdpa"] = function
        with override():
            assert table["sdpa"]("12") == result
        assert table["sdpa"] is function


@torch.no_grad()
def test_another_thread_sees_nothing_of_it() -> None:
    model, ids = build("llama", 0, num_hidden_layers=2), tokens(0, 2, 6)
    expected, found = model(ids).logits, []
    hidden = torch.ones(2, 6, dtype=torch.bool)
    hidden[:, 1:4] = False
    with restricted_attention(model, Visibility(hidden)):
        assert not torch.equal(model(ids).logits, expected)
        thread = threading.Thread(target=lambda: found.append(model(ids).logits))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


# -- sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_open_sum_hands_over_its_first_sum(dtype: torch.dtype) -> None:
    residual, written, seen = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3, 4, dtype=dtype), []
    total = residual + ResidualSum.of(written, seen.append)
    assert type(total) is torch.Tensor
    assert torch.equal(total, residual + written)
    assert torch.equal(ResidualSum.of(written, seen.append) + residual, total)
    assert len(seen) == 2 and all(torch.equal(x, total) for x in seen)


def test_what_on_sum_returns_takes_the_sums_place() -> None:
    seen: list[Tensor] = []
    written = ResidualSum.of(torch.ones(3), lambda total: 2 * total)
    written = ResidualSum.of(written, lambda total: total + 1, first=True)
    written = ResidualSum.of(written, seen.append)
    assert (torch.ones(3) + written).tolist() == seen[0].tolist() == [6.0] * 3
