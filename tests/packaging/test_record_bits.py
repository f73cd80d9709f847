"""Records of bits: what differs is found, however small, and nothing else is."""

import itertools

import pytest
import torch
from support.numeric import bits
from torch import Tensor

from icl_patch.evaluation import tiny_models
from tools import record_bits
from tools.record_bits import Record


def flip_lowest_bit(x: Tensor) -> None:
    """The smallest change there is: of one element, in place."""
    assert x.is_contiguous()
    bits(x).view(-1)[-1] ^= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_is_of_the_bits(dtype: torch.dtype) -> None:
    x = torch.arange(1, 13).to(dtype).reshape(3, 4)
    digest = record_bits.digest
    assert digest(x) == digest(x.clone()) == digest(x.T.contiguous().T)
    changed = x.clone()
    flip_lowest_bit(changed)
    others = [changed, x.T, x.reshape(4, 3), x.view(-1), x[:0], x.to(torch.float16)]
    assert len({digest(other) for other in (x, *others)}) == 1 + len(others)
    if dtype.is_floating_point:
        assert digest(torch.zeros(1, dtype=dtype)) != digest(-torch.zeros(1, dtype=dtype))


def test_a_flipped_bit_of_a_weight_is_found_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_bits, "UPDATES", ("stable", "exact"))

    def recorded(flipped: bool) -> dict[str, str]:
        model, record = tiny_models.build("llama", num_hidden_layers=2), Record()
        weight = model.model.layers[1].mlp.up_proj.weight.data
        bits(weight).view(-1)[-1] ^= flipped << 22  # the first after the point
        cases = record_bits.cases_of("llama", torch.float32)
        record_bits.record_model(record, "m", model, cases)
        return record.entries

    before, after = recorded(False), recorded(True)
    assert before == recorded(False)
    assert before.keys() == after.keys()
    differing = {name.removeprefix("m/") for name in before if before[name] != after[name]}
    factor = "factors/layers.1.mlp.up_proj.u"
    parts = (("stable", "exact"), ("context", "prefix"), ("logits", "replay", factor))
    expected = {"/".join(names) for names in itertools.product(*parts)}
    expected.add("exact/generate/two_pass/3/logits")
    for mode in ("two_stream", "shared_cache", "auto"):
        expected |= {f"stable/generate/{mode}/{entry}" for entry in ("0/logits", "3/logits")}
    assert expected <= differing
    assert not [name for name in differing if "layers.0" in name]
