"""The benchmark of decode steps: every way is right, or prints why not; what is counted, and the
tables and pictures of it.
"""

import copy
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numeric import noise_limit
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from icl_patch.bench import costs
from icl_patch.bench.baselines import materialised, plain
from icl_patch.bench.cases import answer, generation
from icl_patch.bench.cases.generation import (
    APPLIED,
    COMPILED,
    EXACT,
    EXACT_COMPILED,
    NAIVE,
    OURS,
    OURS_COMPILED,
    PEFT,
    PLAIN,
)
from icl_patch.bench.cases.models import RandomModel, SavedModel, twin
from icl_patch.bench.harness import Case, Comparison
from icl_patch.bench.results import Results, page
from icl_patch.cli.main import main
from icl_patch.evaluation import embedded
from icl_patch.generation import graph_partition
from icl_patch.generation.decode_state import DecodeMode
from icl_patch.generation.decode_step import decode_one_token
from icl_patch.patch.parameter_changes import parameter_changes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QWEN = RandomModel("tiny qwen", Qwen3Config, 48, 72, 1, 4, 2, 12, 97)


class Mixed(RandomModel):
    """A layer with a window, and one without."""

    def config(self) -> PreTrainedConfig:
        config = super().config()
        config.layer_types = ["sliding_attention", "full_attention"]
        return config


GEMMA = Mixed("tiny gemma", Gemma3TextConfig, 48, 72, 2, 4, 2, 12, 97, 8)
MIXTURE = RandomModel("tiny mixture", Qwen3MoeConfig, 48, 24, 1, 4, 2, 12, 97, experts=6, chosen=2)
LLAMA = RandomModel("tiny llama", LlamaConfig, 24, 40, 1, 2, 1, 12, 61)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(generation, "ceiling", lambda device: 1e10)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    if not torch.cuda.is_available():  # the whole compiler has a test of its own
        monkeypatch.setattr(graph_partition, "BACKEND", "eager")
    yield
    generation.models_of.cache_clear()


def ids_of(batch: int, context: int, shape: RandomModel) -> Tensor:
    return torch.randint(
        0, shape.vocabulary, (batch, context), generator=torch.Generator().manual_seed(context)
    )


def in_fp64(shape: RandomModel, ids: Tensor, device: torch.device) -> dict[bool, Tensor]:
    """The last logits of the fp64 model over the whole context at once, and with the first row's
    patch in its weights; on the CPU.
    """
    model, found = copy.deepcopy(generation.models_of(shape, torch.float32, device).plain).cpu(), {}
    with generation.ContextPatcher(twin(model), "stable") as patcher:
        patch = decode_one_token(
            generation._state(patcher, ids, DecodeMode.TWO_STREAM), ids[:, -1]
        ).make_patch()
    wide = model.double()
    for applied in (False, True):
        before = plain.dynamic_cache(wide, ids)
        if applied:
            for block, layer in zip(patch.blocks, patch.layers, strict=True):
                for change in parameter_changes(block.spec, layer):
                    weight = wide.get_parameter(f"{block.path}.{change.name}.{change.parameter}")
                    u = change.u[0, 0].double()
                    weight.data = weight.data + (
                        u if change.v is None else torch.outer(u, change.v[0, 0].double())
                    )
        found[applied] = wide(ids[:, -1:], past_key_values=before).logits[:, -1]
    return found


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=on_cuda)], ids=str)
@pytest.mark.parametrize(
    ("shape", "batch", "context"), [(QWEN, 3, 7), (GEMMA, 1, 11)], ids=["qwen", "gemma"]
)
def test_every_way_says_what_the_model_says(
    shape: RandomModel, batch: int, context: int, device: torch.device
) -> None:
    found = generation.comparison(shape, batch, context, torch.float32, device)
    with torch.no_grad():
        expected = {
            applied: x.to(device)
            for applied, x in in_fp64(shape, ids_of(batch, context, shape), device).items()
        }
    limit = noise_limit(generation.models_of(shape, torch.float32, device).plain)
    assert found.ours == OURS == next(iter(found.calls))
    assert {PLAIN, COMPILED, *APPLIED, NAIVE, "replay of a given patch"} <= set(found.calls)
    assert OURS_COMPILED in found.calls
    assert ("recompute and apply, CUDA graph" in found.calls) == (device == CUDA)
    assert (PEFT in found.calls) == (generation.has_peft())
    for name, call in found.calls.items():
        if name == EXACT and os.environ.get("ICL_PATCH_OPS") == "torch":
            continue  # on a pretended device: torch's products see their batch
        first = call().clone()
        assert (
            float(
                (first - expected[name in APPLIED]).abs().max()
                / expected[name in APPLIED].abs().max()
            )
            <= limit
        ), name
        assert found.check(name, first) <= limit
        if shape.window is None or call.step.compile_seconds is None:  # a full window moves
            assert torch.equal(call(), first), name  # it left everything as it found it
        for wrong in (
            expected[name not in APPLIED],
            torch.full_like(first, torch.nan),
            first[:, :-1],
        ):
            with pytest.raises(AssertionError, match="expected"):
                found.check(name, wrong)


def test_a_mixture_of_experts() -> None:
    """Our forms and the plain step's; of the experts the bytes of those that were chosen, once."""
    found = generation.comparison(MIXTURE, 1, 7, torch.float32, CPU)
    assert set(found.calls) == {
        OURS,
        OURS_COMPILED,
        EXACT,
        EXACT_COMPILED,
        "recompute and apply, two streams",
        "recompute and apply, exact, two passes",
        PLAIN,
        COMPILED,
    }
    model, ids = generation.models_of(MIXTURE, torch.float32, CPU).plain, ids_of(1, 7, MIXTURE)
    wide, limit = copy.deepcopy(model).double(), noise_limit(model)
    wide.set_experts_implementation("eager")  # the others have no fp64
    with torch.no_grad():
        expected = wide(ids).logits[:, -1]
    for name, call in found.calls.items():
        logits = call()
        assert found.check(name, logits) <= limit
        assert float((logits - expected).abs().max() / expected.abs().max()) <= limit, name
    experts = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() == 3)
    assert (
        found.nbytes[OURS]
        == sum(parameter.nbytes for parameter in model.parameters()) - experts * 4 // 6
    )


def test_a_compiled_step_goes_on_with_factors_that_change_in_place() -> None:
    found, ids = generation.comparison(GEMMA, 2, 7, torch.float32, CPU), ids_of(2, 7, GEMMA)
    step = found.calls[APPLIED[1]]
    plain = generation.models_of(GEMMA, torch.float32, CPU).plain
    limit = noise_limit(plain)
    assert found.check(APPLIED[1], step()) <= limit
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for block in generation.models_of(GEMMA, torch.float32, CPU).applied.attached_model.blocks:
            for reader in (*block.readers.values(), block.down):
                reader.update_patch(torch.zeros_like(reader.u), reader.v)
            block.post_norm.new_scale.copy_(block.post_norm.scale)
        assert found.check(PLAIN, step()) <= limit
    assert found.check(PLAIN, plain(ids).logits[:, -1]) <= limit


@pytest.mark.stress
def test_the_compilers_code_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(generation, "ceiling", lambda device: 1e10)
    found = generation.comparison(LLAMA, 2, 6, torch.float32, CPU)
    limit = noise_limit(generation.models_of(LLAMA, torch.float32, CPU).plain)
    for name in (COMPILED, APPLIED[1], OURS_COMPILED):
        assert found.check(name, found.calls[name]()) <= limit
        assert found.costs(name)["compile s"] > 0


def measured(
    folder: Path, shape: RandomModel, batch: int, context: int, results: Results | None = None
) -> dict[str, Any]:
    results = Results("generation", CPU, folder) if results is None else results
    build = functools.partial(generation.comparison, shape, batch, context, torch.float32, CPU)
    case = Case(
        f"{shape.name} {batch} {context}",
        build,
        {"model": shape.name, "batch": batch, "context": context},
    )
    list(results.measure([case], rounds=2))
    return results.to_dict()


def test_what_fails_prints_why_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nin the PATH")

    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(graph_partition, "BACKEND", no_compiler)
    # Algorithm 1 that changes nothing
    monkeypatch.setattr(materialised, "materialised", lambda *_: torch.no_grad())
    monkeypatch.setattr(generation, "has_peft", lambda: False)
    found = measured(tmp_path, QWEN, 2, 7)
    rows = {row["call"]: row for row in found["rows"]}
    for name in (COMPILED, APPLIED[1]):
        assert rows[name]["failed"] == "RuntimeError: no C++ compiler"
    for name in (OURS_COMPILED, EXACT_COMPILED):
        assert rows[name]["failed"].endswith("no C++ compiler")
    assert rows[NAIVE]["failed"].startswith("expected the fp64 result within")
    assert {name for name, row in rows.items() if "seconds" in row} == set(rows) - {
        COMPILED,
        APPLIED[1],
        OURS_COMPILED,
        EXACT_COMPILED,
        NAIVE,
    }
    text = page(found)
    assert f"| {COMPILED} | FAILED: RuntimeError: no C++ compiler |  |" in text
    for row in rows.values():
        if "seconds" in row:
            assert row["operator calls"] > 20
    assert rows[PLAIN]["operator calls"] < rows[OURS]["operator calls"]
    assert rows["recompute and apply, two streams"]["cache MB"] == 2 * rows[OURS]["cache MB"]


# What is counted


def test_a_cache_has_the_bytes_of_its_tensors() -> None:
    storage = torch.zeros(3, 100)

    class Layer:
        def __init__(self, **held: Any) -> None:
            vars(self).update(held)

    cache: Any = type(
        "Cache",
        (),
        {
            "layers": [
                Layer(keys=storage[:, :2], rooms={"keys": storage}),
                Layer(keys=torch.zeros(5), length=3),
            ]
        },
    )
    assert costs.cache_bytes(cache) == 4 * 305
    assert costs.cache_bytes(None) == 0


def test_an_operator_inside_another_does_not_count() -> None:
    x = torch.randn(4, 48)
    found = costs.profiled(lambda: [nn.functional.linear(x, x).exp() for _ in range(10)], CPU)
    assert found == {"operator calls": 20}


def test_a_profiler_that_fails_leaves_the_time(tmp_path: Path) -> None:
    def broken(name: str) -> dict[str, Any]:
        raise RuntimeError(f"no profiler for {name}")

    case = Case(
        "a",
        lambda: Comparison("ours", {"ours": int}, lambda *_: None, costs=broken),
    )
    results = Results("generation", CPU, tmp_path)
    assert [good for _, good in results.measure([case], rounds=1)] == [True] * 3
    [row] = results.rows
    assert row["seconds"]["median"] > 0
    assert row["not profiled"] == "RuntimeError: no profiler for ours"
    assert "- Not profiled: a, ours: RuntimeError: no profiler for ours" in page(results.to_dict())


# Tables


def row(call: str, batch: int, context: int, seconds: float, **more: Any) -> dict[str, Any]:
    parameters = {"model": "M", "batch": batch, "context": context}
    timing = {"median": seconds, "low": seconds, "high": seconds}
    return {
        "case": f"B={batch} {context}",
        "parameters": parameters,
        "call": call,
        "ours": call == OURS,
        "seconds": timing,
        **more,
    }


def test_the_tables_of_some_numbers() -> None:
    rows = [
        row(
            OURS,
            1,
            16,
            3e-3,
            **{
                "of ceiling": 0.5,
                "launches": 12,
                "cache MB": 1.5,
                "weights MB": 88.4,
                "ceiling GB/s": 7.0,
                "error": 1e-7,
            },
        ),
        row(PLAIN, 1, 16, 2e-3, **{"transient MB": 2048.0, "operator calls": 1234}),
        row(COMPILED, 1, 16, 1e-3, **{"compile s": 61.0}),
        row(OURS, 4, 16, 5e-3),
        row(PLAIN, 4, 16, 5e-3),
        row(OURS, 1, 256, 4e-3),
        row(PLAIN, 1, 256, 3e-3),
    ]
    text = "\n".join(generation.tables(rows))
    assert (
        f"| {OURS} | 3 ms | 3 ms – 3 ms | 1.50× | 3.00× | 0.5 | 1.5 | - | - | 12 | - | 1e-07 |"
        in text
    )
    assert (
        "| plain step | 2 ms | 2 ms – 2 ms | 1.00× | 2.00× | - | - | 2048 | 1234 | - | - | - |"
        in text
    )
    assert "| plain step, compiled | 1 ms | 1 ms – 1 ms | 0.50× | 1.00× |" in text and "61" in text
    assert text.count("## B=") == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_model_takes_the_place_of_a_random_one(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    QWEN.build(CPU, dtype).save_pretrained(tmp_path / "own-model")
    chosen = generation.cases(CPU, quick=True, model=str(tmp_path / "own-model"))
    names = [case.name for case in chosen]
    assert names[0] == "own-model float32 B=1 context=256"
    every = generation.cases(CPU, quick=False, model=str(tmp_path / "own-model"))
    assert (len(names), len(every)) == (4, 18)
    saved = SavedModel.of(str(tmp_path / "own-model"))
    compared = generation.comparison(saved, 2, 9, dtype, CPU)
    assert compared.ours in (OURS, "recompute and apply, two streams")
    assert (NAIVE in compared.calls) is (dtype == torch.float32)
    for name in (compared.ours, EXACT, PLAIN, *(set(APPLIED[:1]) & {*compared.calls})):
        compared.check(name, compared.calls[name]())
    status = main(["bench", "linear", "--model", str(tmp_path / "own-model")])
    assert status == 2
    assert "expected --model with generation or answer alone" in capsys.readouterr().err


def test_a_whole_answer_has_the_tokens_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "chat-model"
    shutil.copytree(embedded.MODEL_DIR, folder)
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    chosen = answer.cases(CPU, quick=False, model=str(folder))
    assert [case.name for case in chosen] == ["chat-model float32", "chat-model bfloat16"]
    assert answer.cases(CPU, quick=False) == []
    compared = chosen[0].build()
    for name in ("generate, exact", "generate, stable", "ask", "forward"):
        assert compared.check(name, compared.calls[name]()) == 0
    with pytest.raises(AssertionError, match="expected the model's own tokens"):
        compared.check("ask", 1 - compared.calls["ask"]())
