"""The experiments on a pretrained model: texts, measures, statistics, the quick form on the
embedded model, and the committed page.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_changes as changes
import real_experiments
import real_fidelity as fidelity
import real_prompts as prompts
import real_runs as runs
import real_statistics as statistics
import torch
from real_fidelity import KEPT, KEPT_DIRECT, NOISE, RUNS, STEPWISE
from support.chats import shallow_chat_model
from support.numeric import UNIT, normal, seeded
from support.random_models import build, tokens
from torch import nn

from icl_patch import ContextPatcher, embedded, metrics
from icl_patch.evaluation.report import percent

RESULTS = Path(__file__).parents[2] / "docs" / "papers"

# -- measures


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_every_run_is_compared_with_the_model_and_its_context(name: str) -> None:
    model, context, kept = build(name, dtype=torch.bfloat16), tokens(0, 1, 9), tokens(1, 1, 5)
    with fidelity.attached(model) as models:
        found = fidelity.measure(models, context, kept)
        fewer = fidelity.measure(models, context, kept, stepwise=False, first_kept=False)
    left_out = (KEPT, KEPT_DIRECT, STEPWISE)
    assert list(fewer) == [key for key in found if key.split("/")[0] not in left_out]
    assert all(np.array_equal(x, found[key]) for key, x in fewer.items())
    whole = model(torch.cat([context, kept], 1), use_cache=False).logits[0, -5:]
    for update in ("exact", "stable", "direct"):  # the first gives the reference
        with ContextPatcher(build(name, dtype=torch.bfloat16), update) as patcher:
            patch = patcher.compute(context, kept)
            logits = patcher.forward(kept, patch)[0]
            if update == "exact":
                reference = patch.logits[0]
        if update == "exact":
            assert torch.equal(logits, reference) and found["exact/identical"].all()
        linf = metrics.linf(logits, reference)
        assert found[f"{update}/linf"] == pytest.approx(linf.numpy(), rel=1e-6)
        tvd = 0.5 * (logits.double().softmax(-1) - reference.double().softmax(-1)).abs().sum(-1)
        assert found[f"{update}/tvd"] == pytest.approx(tvd.numpy(), rel=1e-6)
        norms = {key.split("/")[-1]: x for key, x in found.items() if f"{update}/norm" in key}
        assert norms.keys() == patch.norms().keys()
        for module, size in patch.norms().items():
            assert norms[module] == pytest.approx(size[:, 0].float().numpy())
        for block, layer in enumerate(patch.layers if name == "gemma3" else ()):
            new, own = (
                layer[f"post_feedforward_layernorm.{key}"].double()
                for key in ("new_scale", "scale")
            )
            largest = new[0].abs().amax(-1) / own.square().mean().sqrt()
            assert found[f"{update}/scale/largest"][block] == pytest.approx(largest.numpy())
            channel = found[f"{update}/scale/channel"][block]
            assert channel.tolist() == new[0].abs().argmax(-1).tolist()
    assert (f"{KEPT_DIRECT}/linf" in found) == (name == "gemma3")  # else it is that of KEPT
    assert found["no cache/linf"] == pytest.approx(metrics.linf(whole, reference).numpy(), rel=1e-6)
    assert (found["token by token/linf"] < 0.1).all() and not found["exact/blocks"].any()
    assert (found["stable/blocks"] > 0).any() and found["stable/blocks"].max() < 0.1
    top = reference.float().topk(2).values
    margin = (top[:, 0] - top[:, 1]) / reference.float().abs().amax(-1)
    assert found["margin"] == pytest.approx(margin.numpy())


@torch.no_grad()
def test_a_prompt_of_which_an_update_has_no_patch_is_left_out_and_counted() -> None:
    """As one of a hundred on Gemma 3 270M: no scale of a channel that is exactly 0 changes it."""
    context, kept = tokens(0, 1, 9), tokens(1, 1, 5)
    results = {}
    for name, row in {"without": None, "with": 3}.items():
        model = build("gemma3")
        if row is not None:
            model.model.layers[1].mlp.down_proj.weight[row] = 0
        with fidelity.attached(model) as models:
            results[name] = fidelity.measure(models, context, kept, stepwise=False)
    assert "direct/linf" not in results["with"] and results["with"]["exact/identical"].all()
    found = statistics.control(results)
    bad = results["with"]["direct/not output-controllable"]
    assert bad[1].all() and not bad[[0, *range(2, len(bad))]].any()
    assert (
        found["direct"]["pairs"] == 2 * bad.size
        and statistics.agreement(results)["direct"]["tokens"] == 5
    )
    assert found["direct"]["not output-controllable"] == 5


def test_a_spectrum_is_that_of_the_changes_as_long_vectors() -> None:
    generator = seeded(0)
    u, v = normal(generator, 7, 5), normal(generator, 7, 3)
    u[6], v[6] = 2 * u[0], v[0]  # six directions
    matrices = torch.stack([torch.outer(a, b).flatten() for a, b in zip(u, v, strict=True)])
    values = torch.linalg.svdvals(matrices).square()
    held = values.cumsum(0) / values.sum()
    found = changes.spectrum(u, v)
    assert found["rank"] == 6
    assert found["directions"] == [int((held < share).sum()) + 1 for share in changes.SHARES]
    mean = 7 * matrices.mean(0).square().sum() / matrices.square().sum()
    assert found["mean"] == pytest.approx(float(mean))
    same = changes.spectrum(u[:1].expand(4, -1), v[:1].expand(4, -1))
    assert same["rank"] == 1 and same["directions"] == [1, 1, 1]
    assert same["mean"] == pytest.approx(1)


def test_a_growing_context_takes_the_steps_from_line_to_line() -> None:
    model, tokenizer = embedded.load()
    pairs = [["ab", "AB"], ["cd", "CD"], ["ef", "EF"], ["gh", "GH"]]
    with ContextPatcher(model, "stable") as patcher:
        found = changes.growth(patcher, tokenizer, {"pairs": pairs}, False, (3, 1))
        weights = []
        for count in range(4):
            context = prompts.ids_of(tokenizer, prompts.shots(pairs[:count]), first=True)
            kept = torch.tensor([prompts.ids_of(tokenizer, "gh ->", first=False)])
            weights.append({})
            if count:
                patch = patcher.compute(torch.tensor([context]), kept)
                weights[-1] = dict(patch.weight_changes(0, -1))
                probability = patch.logits[0, -1].float().softmax(-1)
                answer = prompts.ids_of(tokenizer, " GH", first=False)[0]
                assert found["right"][count, 0] == pytest.approx(float(probability[answer]), 1e-3)
    for place, name in enumerate(weights[-1]):
        trajectory = [change.get(name, torch.zeros(1)) for change in weights]
        steps = [float((b - a).norm()) for a, b in pairwise(trajectory)]
        assert found["steps"][:, place, 0] == pytest.approx(steps, rel=1e-3), name
        assert found["total"][place, 0] == pytest.approx(float(trajectory[-1].norm()), rel=1e-3)


def test_a_disturbance_has_its_size_and_leaves_no_trace() -> None:
    block, noise = nn.Identity(), normal(seeded(0), 3, 8, dtype=torch.float32)
    x = normal(seeded(1), 1, 5, 8, dtype=torch.float32)
    with changes.disturbed(block, noise):
        out, short = block(x), block(x[:, :2])
    assert torch.equal(out[:, :2], x[:, :2]) and torch.equal(short, x[:, :2])
    size = (out - x)[0, 2:].norm(dim=-1) / x[0, 2:].norm(dim=-1)
    # the sum is rounded to 24 bits of the value, 1e-4 of it to 11 bits
    assert size.numpy() == pytest.approx(changes.DISTURBANCE, rel=8 * UNIT[torch.float32] / 1e-4)
    assert torch.equal(block(x), x)


# -- statistics


def test_intervals_resample_whole_prompts() -> None:
    rng = np.random.default_rng(1)
    independent = [rng.random(1) < 0.3 for _ in range(400)]
    low, high = statistics.interval(independent, np.mean)
    share = np.mean(independent)
    half = 1.96 * (share * (1 - share) / 400) ** 0.5
    assert (high - low) / 2 == pytest.approx(half, rel=0.15) and low < share < high
    alike = [np.repeat(x, 25) for x in independent[:16]]  # 400 tokens, 16 prompts
    wide = np.diff(statistics.interval(alike, np.mean))[0]
    assert wide > 3 * (high - low)
    certain = statistics.share({str(i): {"same": np.ones(3, bool)} for i in range(12)}, "same")
    assert certain == {"share": 1.0, "interval": [1.0, 1.0]}


def _results() -> dict[str, dict[str, np.ndarray]]:
    """Two prompts of three tokens and two blocks; the second token of each is lost by stable."""
    found = {}
    for place, name in enumerate(("few-shot-a-0", "code-0-0")):
        arrays: dict[str, np.ndarray] = {"margin": np.array([0.5, 0.1, 0.4])}
        for run in RUNS:
            lost = run in ("stable", "direct") or (run == "no cache" and place == 0)
            arrays |= {
                f"{run}/match": np.array([True, not lost, True]),
                f"{run}/identical": np.array([run == "exact"] * 3),
                f"{run}/linf": np.array([0, 0.2, 0.1]) * (run != "exact"),
                f"{run}/tvd": np.array([0, 0.02, 0.01]) * (run != "exact"),
                f"{run}/blocks": np.array([[0.001, 0.02, 0.001]] * 2) * (run != "exact"),
            }
        found[name] = arrays
    return found


def test_lost_tokens_are_counted() -> None:
    results = _results()
    lost = statistics.lost(results, "stable")
    assert lost == {"tokens": 2, "margin": 0.1, "margin_of_all": 0.4, "linf": 0.2}
    assert statistics.lost(results, "exact")["margin"] is None
    agreement = statistics.agreement(results)
    assert agreement["stable"]["match"]["share"] == pytest.approx(4 / 6)
    assert agreement["stable"]["linf"][3] == 0.2 and agreement["exact"]["linf"] == [0] * 4
    assert statistics.same_updates(results)
    results["code-0-0"]["direct/linf"] = np.array([0, 0.2, 0.3])
    assert not statistics.same_updates(results)
    del results["code-0-0"][f"{STEPWISE}/linf"], results["code-0-0"][f"{STEPWISE}/match"]
    del results["code-0-0"][f"{STEPWISE}/identical"], results["code-0-0"][f"{STEPWISE}/tvd"]
    of_some = statistics.agreement(results)[STEPWISE]
    assert (of_some["prompts"], of_some["tokens"]) == (1, 3)


# -- the command


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    shallow_chat_model(folder / "small")
    (folder / "small" / "chat_template.jinja").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(torch, "set_num_threads", lambda _: None)
        assert real_experiments.main(["small", "--quick", "--out", "out"]) == 0
    return folder


@pytest.mark.stress  # test_papers_protocol.py has a quick form of these runs
def test_the_quick_form_runs_on_any_folder(quick: Path) -> None:
    numbers = real_experiments.page().read(quick / "out")["real-model"]
    assert numbers["agreement"]["bfloat16"]["exact"]["identical"]["share"] == 1
    assert not numbers["direct_is_stable"]  # a norm's scale writes
    assert KEPT_DIRECT in numbers["agreement"]["bfloat16"]
    text = (quick / "out" / "real-model.md").read_text("utf-8")
    assert "gemma3_text, 2 blocks" in text and "What it shows" not in text
    for name in real_experiments.page().pictures:
        assert (quick / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"]({name}.png)" in text


@pytest.mark.stress
def test_a_stopped_run_goes_on(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(quick)
    [store] = (quick / "build" / "papers").iterdir()
    [lost, *_] = sorted((store / "bfloat16").glob("few-shot-*.npz"))
    before, measured = dict(np.load(lost)), []
    lost.unlink()
    original = runs.measure

    def counted(*arguments: Any) -> Any:
        measured.append(arguments[1])
        return original(*arguments)

    monkeypatch.setattr(runs, "measure", counted)
    monkeypatch.setattr(runs, "growth", None)
    assert real_experiments.main(["small", "--quick", "--out", "again"]) == 0
    after = dict(np.load(lost))
    assert len(measured) == 1 and before.keys() == after.keys()
    assert all(np.array_equal(x, after[key]) for key, x in before.items())
    one, other = (quick / name / "real-model.json" for name in ("out", "again"))
    assert one.read_text("utf-8") == other.read_text("utf-8")


# -- the committed page


GEMMA = "gemma-3-270m"


def committed(name: str = "real-model") -> dict[str, Any]:
    return real_experiments.page(name).read(RESULTS)[name]


@pytest.mark.parametrize("name", ["real-model", GEMMA])
def test_the_committed_page_is_that_of_the_numbers(name: str) -> None:
    text = (RESULTS / f"{name}.md").read_text("utf-8")
    page = real_experiments.page(name)
    assert page.text({name: committed(name)}) == text
    for picture in page.pictures:
        assert (RESULTS / f"{picture}.png").exists() and f"]({picture}.png)" in text


def test_the_conclusions_are_those_of_the_numbers() -> None:
    """Which are of full size. Steps shrink at first with right answers and with shuffled ones."""
    numbers = committed()
    sizes = json.loads(json.dumps(runs.asdict(runs.FULL)))
    assert sizes.pop("first_kept") == 1  # the numbers are older than this
    assert sizes.items() <= numbers["sizes_of_run"].items()
    assert list(numbers["agreement"]) == list(runs.FULL.dtypes)
    assert max(entry["length"] for entry in numbers["by_length"]["float32"]["exact"]) >= 4000
    low = numbers["agreement"]["bfloat16"]
    for found in numbers["agreement"].values():
        assert found["exact"]["match"]["share"] == found["exact"]["identical"]["share"] == 1
        for entry in (entry for run, entry in found.items() if run not in NOISE):
            lowest, highest = entry["match"]["interval"]
            assert entry["tokens"] >= 5000 and lowest <= entry["match"]["share"] <= highest
    assert numbers["direct_is_stable"]
    assert numbers["agreement"]["float32"]["stable"]["match"]["share"] == 1
    # with the first token kept the errors are those of the model itself, without it the largest are
    # not
    assert low[KEPT]["linf"][3] < 2 * low["no cache"]["linf"][3] < low["stable"]["linf"][3]
    for run in ("stable", KEPT):
        lowest, highest = low[run]["match"]["interval"]
        assert lowest <= low["no cache"]["match"]["share"] <= highest
    grown = {name: values[-1][1] for name, values in numbers["disturbed"].items()}
    assert grown["with its context"] < 1 < 3 * grown["with its context"] < grown["replayed"]
    assert grown["replayed, first token kept"] < grown["replayed"] / 3
    for span in numbers["spanned"].values():
        assert all(min(x) == 1 for key, x in span.items() if key.endswith("rank per token"))
    for found in numbers["control"].values():
        assert all(list(entry.values())[1:] == [0, 0, 0, 0] for entry in found.values())
    right, shuffled = (numbers["grown"][how] for how in ("right", "shuffled"))
    for found in (right, shuffled):
        steps = [row[1] for row in found["steps"]]
        assert steps[0] > steps[1] > steps[2] > steps[4]  # the first lines
        assert min(steps[8:]) > 0.75 * max(steps[8:])  # and then no more
    ratios = [a[1] / b[1] for a, b in zip(right["steps"], shuffled["steps"], strict=True)]
    assert all(0.8 < ratio < 1.25 for ratio in ratios)
    assert right["right"][-1] > 2 * shuffled["right"][-1]


def test_the_conclusions_on_gemma_are_those_of_the_numbers() -> None:
    numbers = committed(GEMMA)
    low, full = (numbers["agreement"][dtype] for dtype in ("bfloat16", "float32"))
    assert low["exact"]["identical"]["share"] == full["exact"]["identical"]["share"] == 1
    assert not numbers["direct_is_stable"]
    for update in ("direct", "stable"):  # no worse than the model's own noise
        assert full[update]["match"]["share"] == 1
        assert low[update]["match"]["interval"][1] >= low["no cache"]["match"]["share"]
        for found in (low, full):
            assert found[update]["linf"][3] < found["no cache"]["linf"][3]
    assert numbers["sizes_of_run"] == json.loads(json.dumps(runs.asdict(runs.SHORT)))
    for span in numbers["spanned"].values():
        matrices = [x for key, x in span.items() if "mlp" in key and key.endswith("rank per token")]
        assert len(matrices) == 3 and all(min(x) == 1 for x in matrices)
    assert np.mean(numbers["spanned"]["0"]["post_feedforward_layernorm/mean"]) > 0.9
    largest = numbers["scales"]["bfloat16"]
    worst = {run: max(high for _, high in found["largest"]) for run, found in largest.items()}
    assert worst["direct"] > 10 * worst["stable"]
    pairs = low["exact"]["tokens"] * numbers["config"]["num_hidden_layers"]
    kinds = ("not input-controllable", "not output-controllable")
    uncontrollable = {}
    for dtype, found in numbers["control"].items():
        for run, entry in found.items():
            assert entry["misses"] == 0
            uncontrollable[dtype, run] = sum(entry[kind] for kind in kinds)
        assert found["exact"]["pairs"] == pairs
    assert {key: n for key, n in uncontrollable.items() if n} == {("float32", "direct"): 1}
    rows = (RESULTS / "statements.md").read_text("utf-8")
    shares = [percent(low[run]["match"]["share"]) for run in ("direct", "stable")]
    text = f"as vectors on {low['exact']['tokens']} tokens {shares[0]}, with stable {shares[1]}"
    assert text in rows
    assert f"1 of {pairs} ([Gemma 3 270M](gemma-3-270m.md))" in rows
