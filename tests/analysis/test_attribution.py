"""The relative change of a patch when tokens of its context are left out, against its formula on
matrices of the weights' sizes.
"""

from collections import defaultdict

import pytest
import torch
from support.random_models import tokens
from torch import Tensor

from icl_patch import ContextPatcher
from icl_patch.analysis.attribution import attribution
from icl_patch.evaluation import tiny_models

CONTEXT, KEPT = tokens(0, 1, 7), tokens(1, 1, 3)
SPANS = [(0, 1), (2, 5), (3, 4)]


def by_hand(patcher: ContextPatcher, start: int, stop: int, keep_first: int) -> list[float]:
    """a_l(i, j) from every changed matrix and vector, of experts each by itself."""
    rest = torch.cat([CONTEXT[:, :start], CONTEXT[:, stop:]], 1)
    patches = [patcher.compute(ids, KEPT, keep_first=keep_first) for ids in (CONTEXT, rest)]
    # block and parameter -> the squares of the change and of the difference
    squares: dict[tuple[int, str], Tensor] = defaultdict(lambda: torch.zeros(2))
    for token in range(KEPT.shape[1]):
        changes = [{name: x.double() for name, x in p.weight_changes(0, token)} for p in patches]
        for name in changes[0] | changes[1]:
            a, b = (found.get(name, torch.zeros(())) for found in changes)
            places = enumerate(patches[0].blocks)
            block = next(i for i, block in places if name.startswith(f"{block.path}."))
            sums = torch.stack([a.square().sum(), (a - b).square().sum()])
            squares[block, name.partition("[")[0]] = squares[block, name.partition("[")[0]] + sums
    found = []
    for block in range(len(patches[0].blocks)):
        pairs = [pair for (own, _), pair in squares.items() if own == block and pair[0] > 0]
        found.append(float(sum((b / a).sqrt() for a, b in pairs) / len(pairs)))
    return found


@pytest.mark.parametrize(
    ("family", "update", "keep_first"),
    [
        ("llama", "stable", 0),
        ("gemma3", "stable", 1),  # scales
        ("gpt2", "direct", 0),  # biases, stored as (in, out)
        ("mixtral", "direct", 0),  # experts, others without some tokens
        ("recurrent_gemma", "stable", 0),
    ],
)
def test_each_span_against_its_formula(family: str, update: str, keep_first: int) -> None:
    model = tiny_models.build(family, 0)
    if family != "mixtral":  # transformers' product of experts has no fp64
        model = model.double()
    with ContextPatcher(model, update) as patcher:
        spans = [span for span in SPANS if span[0] >= keep_first]
        found = attribution(patcher, CONTEXT, KEPT, spans, keep_first=keep_first, batch_size=2)
        by_span = [by_hand(patcher, *span, keep_first) for span in spans]
        expected = torch.tensor(by_span, dtype=torch.float64)
    assert found.shape == (len(spans), 4) and found.dtype == torch.float64
    # half of the digits: a batch rounds otherwise, and four blocks pass it on
    digits = torch.finfo(model.dtype).eps ** 0.5
    torch.testing.assert_close(found, expected, rtol=digits, atol=digits)
    assert (found.amax(1) > 0.05).all()  # a block with a window may not see a token at all


@pytest.mark.parametrize(
    ("family", "update", "dtype"),
    [
        ("llama", "stable", torch.float32),  # its readers' factors are rounding
        ("gpt_neox", "exact", torch.bfloat16),  # its writer's: the attention is beside the MLP
    ],
)
def test_a_block_that_the_context_does_not_reach_has_no_change(
    family: str, update: str, dtype: torch.dtype
) -> None:
    """Its factors are not 0, but rounding. A block that is reached a little has a change."""
    model = tiny_models.build(family, 0, dtype)
    blocks = model.gpt_neox.layers if family == "gpt_neox" else model.model.layers
    added = [x.attention.dense if family == "gpt_neox" else x.self_attn.o_proj for x in blocks]
    with torch.no_grad():
        added[0].weight.zero_()
        added[2].weight.mul_(0.2)
    with ContextPatcher(model, update) as patcher:
        sizes = patcher.compute(CONTEXT, KEPT).norms().values()
        found = attribution(patcher, CONTEXT, KEPT, [*SPANS, (0, 7)])
    assert any(size[0].any() for size in sizes)
    assert not found[:, 0].any() and (found[:, 1:].amax(0) > 0.05).all()


def test_leaving_out_the_whole_context_takes_the_whole_change_away() -> None:
    """Nothing changes nothing, and spans that are none are refused."""
    done = []
    with ContextPatcher(tiny_models.build("llama", 0), "direct") as patcher:
        spans = [(0, 7), (1, 2), (0, 7)]
        found = attribution(patcher, CONTEXT, KEPT, spans, progress=lambda *x: done.append(x))
        nothing = attribution(patcher, CONTEXT, KEPT, [])
        behind = attribution(patcher, CONTEXT, KEPT, [(2, 7)], keep_first=2)
        assert (behind == 1).all()
        assert (found[[0, 2]] == 1).all() and not (found[1] == 1).any()
        for arguments, message in (
            ({"spans": [(3, 3)]}, r"0 ≤ start < stop ≤ 7, got \(3, 3\)"),
            ({"spans": [(0, 1), (5, 8)]}, r"got \(5, 8\)"),
            ({"spans": [(-1, 2)]}, r"got \(-1, 2\)"),
            ({"keep_first": 1}, r"1 ≤ start < stop ≤ 7, got \(0, 1\)"),
            ({"context_ids": tokens(0, 2, 7)}, r"one row, .* got \(2, 7\)"),
            ({"batch_size": 0}, "batch_size ≥ 1, got .* and 0"),
        ):
            given = {"context_ids": CONTEXT, "kept_ids": KEPT, "spans": SPANS, **arguments}
            with pytest.raises(ValueError, match=message):
                attribution(patcher, **given)
    assert done == [(1, 1)]
    assert nothing.shape == (0, 4)
