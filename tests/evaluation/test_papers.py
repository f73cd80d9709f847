"""The papers' experiments: the models are the ones described, the quick form runs, and what is
shown is what was measured.
"""

import copy
import json
import math
from itertools import pairwise
from pathlib import Path

import linear_regression
import pytest
import regression_experiments as experiments
import table_1
import torch
from regression_models import Attention, Block, Recurrence, Stack, StackBlock, Tasks, sample
from support.numeric import ULP, UNIT, noise_limit, seeded
from torch import Tensor, nn

from icl_patch.evaluation import tiny_models

RESULTS = Path(__file__).parents[2] / "docs" / "papers"

layers = pytest.mark.parametrize("layer", [Attention, Recurrence], ids=["attention", "rnn"])


def block(layer: type = Attention) -> Block:
    torch.manual_seed(3)
    return Block(layer())


def in_fp64(tasks: Tasks) -> Tasks:
    return Tasks(*(x.double() for x in vars(tasks).values()))


def same(got: Tensor, expected: Tensor) -> bool:
    """In fp64, but for the rounding of sums of up to 128 products, eight deep."""
    assert got.dtype == expected.dtype == torch.float64
    return bool((got - expected).abs().max() <= 8 * 128 * ULP * expected.abs().max())


@torch.no_grad()
def test_attention_is_the_formula_at_the_last_token() -> None:
    """``H_i = W_V X softmax((W_K X)ᵀ W_Q X / √d_k)`` head by head, columns as tokens, as the paper
    writes it.
    """
    layer, tasks = block().layer.double(), in_fp64(sample(1, 9, seeded(1)))
    x = torch.cat([tasks.context[0], tasks.query]).T  # (3, 10)
    heads = []
    parts = (layer.queries, layer.keys, layer.values)
    for i in range(8):
        q, k, v = (part.weight[4 * i : 4 * i + 4] @ x for part in parts)
        heads.append(v @ ((k.T @ q[:, -1:]) / math.sqrt(4)).softmax(0))
    want = layer.output.weight @ torch.cat(heads)
    assert same(layer(tasks.context, tasks.query[None])[0, 0], want[:, 0])
    assert not same(layer(tasks.context[:, 1:], tasks.query[None])[0, 0], want[:, 0])


@torch.no_grad()
def test_recurrence_is_an_rnn() -> None:
    layer, tasks = block(Recurrence).layer.double(), in_fp64(sample(4, 9, seeded(1)))
    rnn = nn.RNN(3, 64, batch_first=True).double()
    rnn.weight_ih_l0.copy_(layer.inputs.weight)
    rnn.bias_ih_l0.copy_(layer.inputs.bias)
    rnn.weight_hh_l0.copy_(layer.recurrent.weight)
    rnn.bias_hh_l0.zero_()
    want = layer.output(rnn(torch.cat([tasks.context, tasks.query[:, None]], 1))[1][0])
    assert same(layer(tasks.context, tasks.query[:, None])[:, 0], want)


@torch.no_grad()
@layers
def test_context_is_a_rank_one_change(layer: type) -> None:
    """Φ_W(C, x) = Φ_{W+ΔW}(x), and the update of another context is another change."""
    model, tasks = block(layer).double(), in_fp64(sample(6, 9, seeded(1)))
    query = tasks.query[:, None]
    u, v, z = model.update(tasks.context, query)
    with_context = model(tasks.context, query)
    assert same(model.without_context(z, u, v), with_context)
    assert (model.without_context(z, u.roll(1, 0), v) - with_context).abs().max() > 0.01
    one, many = tasks.context[:1], tasks.query[None]  # several queries of one task
    u_many, v_many, z_many = model.update(one, many)
    assert same(model.without_context(z_many, u_many, v_many), model(one, many))
    delta = (model.layer(tasks.context, query) - z)[2, 0]
    # equation 2
    written_out = torch.outer(model.first.weight @ delta, z[2, 0]) / z[2, 0].square().sum()
    assert same(torch.outer(u[2, 0], v[2, 0]), written_out)


@torch.no_grad()
def test_stack_block_is_a_post_norm_encoder_layer() -> None:
    torch.manual_seed(0)
    made = StackBlock(32, 32, 8, 128).double()
    reference = nn.TransformerEncoderLayer(32, 8, 128, dropout=0, batch_first=True, bias=True)
    reference.double().eval()
    for ours, theirs in (
        (made.inputs.weight, reference.self_attn.in_proj_weight),
        (made.output.weight, reference.self_attn.out_proj.weight),
        (made.first.weight, reference.linear1.weight),
        (made.first.bias, reference.linear1.bias),
        (made.second.weight, reference.linear2.weight),
        (made.second.bias, reference.linear2.bias),
    ):
        theirs.copy_(ours)
    reference.self_attn.in_proj_bias.zero_()
    reference.self_attn.out_proj.bias.zero_()
    x = torch.randn(3, 11, 32).double()
    causal = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    assert same(made(x), reference(x, src_mask=causal))


@torch.no_grad()
def test_stack_without_context_block_by_block() -> None:
    torch.manual_seed(0)
    stack, tasks = Stack(layers=4).double(), in_fp64(sample(6, 9, seeded(1)))
    inputs = tasks.context, tasks.query[:, None]
    pairs = list(zip(stack.outputs(*inputs), stack.outputs_without_context(*inputs), strict=True))
    assert len(pairs) == 4
    assert all(same(a, b) for a, b in pairs)
    alone = stack.outputs(inputs[0][:, :0], inputs[1])
    assert (alone[-1] - pairs[-1][0]).abs().max() > 0.01


def test_finetuning_is_sgd_on_the_first_weight_alone() -> None:
    model, tasks = block().double(), in_fp64(sample(3, 5, seeded(1)))
    losses, changes = experiments._finetune(model, tasks, 0.1)
    for task in range(3):
        tuned = copy.deepcopy(model)
        optimizer = torch.optim.SGD([tuned.first.weight], lr=0.1)

        def loss(x: Tensor, y: Tensor, tuned: Block = tuned) -> Tensor:
            alone = torch.cat([x[:2], torch.zeros(1)])[None, None]
            return 0.5 * (tuned(alone[:, :0], alone)[0, 0] - y) ** 2

        for i in range(6):
            weight = tuned.first.weight.detach()
            assert same(losses[task, i], loss(tasks.query[task], tasks.target[task]).detach())
            assert same(changes[task, i] + model.first.weight.detach(), weight)
            assert i == 0 or not same(changes[task, i - 1] + model.first.weight.detach(), weight)
            if i < 5:
                optimizer.zero_grad()
                loss(tasks.context[task, i], tasks.context[task, i, 2]).backward()
                optimizer.step()


def test_changes_and_alignment_are_those_of_matrices_written_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, model = experiments.QUICK, block()
    monkeypatch.setattr(experiments, "trained_attention", lambda *_: (model, {}))
    tasks = sample(sizes.trials, 12, seeded(experiments._TRIALS))
    with torch.no_grad():
        updates = []
        for i in range(13):
            u, v, _ = model.update(tasks.context[:, :i], tasks.query[:, None])
            updates.append(u[:, 0, :, None] * v[:, 0, None])  # (B, 128, 3)
        steps = torch.stack([torch.linalg.matrix_norm(b - a, 2) for a, b in pairwise(updates)], 1)
    found = experiments.figure_3(sizes, 0)
    # in fp32: a step is a difference of updates, each the product of sums of up to 32 products
    rounding = 64 * UNIT[torch.float32] * float(torch.stack(updates).flatten(2).norm(dim=-1).max())
    expected = {"mean": steps.mean(0), "standard_error": steps.std(0) / sizes.trials**0.5}
    for name, value in expected.items():
        assert torch.tensor(found["change"][name]).sub(value).abs().max() <= rounding
    assert len(found["context_length"]) == 12
    against = experiments.figure_4(sizes, 0)
    _, changes = experiments._finetune(model, tasks, against["rate"])
    pairs = zip(updates[1:], changes.unbind(1)[1:], strict=True)
    flat = ((update.flatten(1), change.flatten(1)) for update, change in pairs)
    cosines = torch.stack([nn.functional.cosine_similarity(*pair) for pair in flat], 1)
    rounding = 256 * UNIT[torch.float32]  # of a cosine between a change and one of several steps
    off = torch.tensor(against["inner_product"]["mean"]) - cosines.mean(0)
    assert off.abs().max() <= rounding
    assert (cosines.mean(0) <= torch.tensor(against["inner_product_ceiling"]["mean"])).all()
    alone = model.layer(tasks.context[:, :0], tasks.query[:, None])[:, 0].detach()
    unit = nn.functional.normalize(alone, dim=1)
    closest = (changes[:, 12] @ unit[..., None]) * unit[:, None]  # M v̂ v̂ᵀ
    reached = nn.functional.cosine_similarity(closest.flatten(1), changes[:, 12].flatten(1))
    ceiling = against["inner_product_ceiling"]["mean"][-1]
    assert ceiling == pytest.approx(float(reached.mean()), abs=rounding)


def check(folder: Path) -> None:
    """What is exact in theory is apart by rounding, and the page is that of the numbers.

    One block in fp32 is off by a few spacings, ten of them by tens, and the product of a hundred
    factors by hundreds.
    """
    page, spacing = linear_regression.PAGE, 2.0**-23
    numbers = page.read(folder)
    assert page.text(numbers) == (folder / f"{page.name}.md").read_text()
    for name, found in numbers.items():
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        if curves := found.get("curves"):
            losses = (curves[f"validation_loss_{way}"] for way in ("patched", "context"))
            assert all(abs(a - b) <= 8 * spacing for a, b in zip(*losses, strict=True))
    assert numbers["dherin-figure-2"]["plane"]["average"] <= 8 * spacing
    assert max(numbers["dherin-figure-5"]["difference"]["mean"]) <= 64 * spacing
    assert numbers["dherin-appendix-e"]["largest_difference"] <= 512 * spacing


def test_the_quick_form_writes_pictures_numbers_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert linear_regression.main(["--quick", "--out", str(tmp_path)]) == 0
    check(tmp_path)


def test_committed_results_are_of_full_size_and_say_what_they_show() -> None:
    check(RESULTS)
    for found in linear_regression.PAGE.read(RESULTS).values():
        assert found["sizes"] == json.loads(json.dumps(linear_regression.asdict(experiments.FULL)))


# -- Table 1 of Goldwaser et al.


def test_table_1_covers_the_papers_lemmas_and_every_family() -> None:
    assert [row.statement for row in table_1.ROWS] == ["6", "7", "8", "9", "10", "11", "12", "B"]
    assert all(row.family in table_1.families_of(row) for row in table_1.ROWS)
    assert {name for row in table_1.ROWS for name in table_1.families_of(row)} == {
        name for name, entry in tiny_models.SUPPORTED.items() if not entry.images
    }


def test_table_1_quick_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_1, "ROWS", [row for row in table_1.ROWS if row.statement == "8"])
    assert table_1.main(["--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "table-1.json").read_text())
    [row] = found["rows"]
    assert row["families"] == ["gpt2"] and row["statement"] == "8"
    assert 0 < row["linf"] <= max(noise_limit(tiny_models.build("gpt2", seed)) for seed in range(3))
    assert row["bit_identical"] == row["input_controllable"] == row["output_controllable"] == 1.0
    page = (tmp_path / "table-1.md").read_text()
    assert f"| {row['linf']:.1e} |" in page


def test_table_1_committed() -> None:
    numbers = table_1.PAGE.read(RESULTS)
    found = numbers["table-1"]
    assert [row["families"] for row in found["rows"]] == [
        table_1.families_of(row) for row in table_1.ROWS
    ]
    assert all(family["passed"] for family in found["families"].values())
    assert table_1.PAGE.text(numbers) == (RESULTS / "table-1.md").read_text()


def test_sizes_are_the_papers() -> None:
    shapes = {name: tuple(x.shape) for name, x in block().named_parameters() if x.dim() > 1}
    layer = {f"layer.{name}.weight": (32, 3) for name in ("queries", "keys", "values")}
    rest = {"layer.output.weight": (3, 32), "first.weight": (128, 3), "second.weight": (3, 128)}
    assert shapes == layer | rest and block().layer.heads == 8
    assert block(Recurrence).layer.recurrent.weight.shape == (64, 64) and len(Stack().blocks) == 10
    full, recurrence = experiments.FULL, experiments.FULL.recurrence
    assert (full.attention.length, recurrence.length, full.trials) == (100, 200, 100)
    assert (recurrence.batch, recurrence.steps, recurrence.every) == (32, 10_000, 100)
