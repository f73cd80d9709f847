"""The benchmark of decode steps: every way is right."""

import copy
import functools
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.chats import shallow_chat_model
from support.numeric import noise_limit, on_a_gpu, seeded
from torch import Tensor
from transformers import Gemma3TextConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from icl_patch.bench import baselines
from icl_patch.bench.cases import answer, generation, passes
from icl_patch.bench.cases.models import RandomModel, SavedModel
from icl_patch.cli.main import main
from icl_patch.generation import region_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QWEN = RandomModel("tiny qwen", Qwen3Config, 48, 72, 1, 4, 2, 12, 97)


class Mixed(RandomModel):
    """A layer with a window, and one without."""

    def config(self) -> PreTrainedConfig:
        config = super().config()
        config.layer_types = ["sliding_attention", "full_attention"]
        return config


GEMMA = Mixed("tiny gemma", Gemma3TextConfig, 48, 72, 2, 4, 2, 12, 97, 8)
MIXTURE = RandomModel("tiny mixture", Qwen3MoeConfig, 48, 24, 1, 4, 2, 12, 97, experts=6, chosen=2)
COMPILED = (generation.OWN_COMPILED, generation.STABLE_COMPILED, generation.EXACT_COMPILED)
OF_EXPERTS = {*COMPILED, generation.OWN, generation.EXACT, generation.EXACT_OWN_CODE}
OF_EXPERTS |= {generation.EXACT_TWO_PASSES, generation.STABLE, generation.STABLE_OWN_CODE}
OF_EXPERTS |= {generation.TWO_STREAMS}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    if not torch.cuda.is_available():  # the compiler's code is checked where it is timed
        monkeypatch.setattr(region_compiler, "BACKEND", "eager")
    yield
    generation.models_of.cache_clear()


def ids_of(batch: int, context: int, shape: RandomModel) -> Tensor:
    return torch.randint(0, shape.vocabulary, (batch, context), generator=seeded(context))


def in_fp64(shape: RandomModel, ids: Tensor, device: torch.device) -> Tensor:
    """The last logits of the fp64 model over the whole context at once."""
    model = copy.deepcopy(generation.models_of(shape, torch.float32, device).plain).cpu().double()
    if shape.experts:
        model.set_experts_implementation("eager")  # the others have no fp64
    with torch.no_grad():
        return model(ids).logits[:, -1].to(device)


SHAPES = {"gemma": (GEMMA, 3, 11), "mixture": (MIXTURE, 1, 7), "qwen": (QWEN, 3, 7)}
EVERY_WAY = [pytest.param(*SHAPES["gemma"], CPU, id="gemma-cpu")]
EVERY_WAY += [pytest.param(*SHAPES["mixture"], CPU, id="mixture-cpu", marks=pytest.mark.stress)]
EVERY_WAY += [
    pytest.param(*shape, CUDA, id=f"{name}-cuda", marks=on_a_gpu) for name, shape in SHAPES.items()
]


@pytest.mark.parametrize(("shape", "batch", "context", "device"), EVERY_WAY)
def test_every_way_says_what_the_model_says(
    shape: RandomModel, batch: int, context: int, device: torch.device
) -> None:
    found = generation.comparison(shape, batch, context, torch.float32, device)
    expected = in_fp64(shape, ids_of(batch, context, shape), device)
    limit = noise_limit(generation.models_of(shape, torch.float32, device).plain)
    assert (found.ours, found.base) == (generation.STABLE, generation.OWN)
    assert next(iter(found.calls)) == generation.OWN
    if shape.experts:  # our forms and the model's own step
        assert set(found.calls) == OF_EXPERTS
    else:
        always = {generation.OWN, generation.STABLE, generation.STABLE_OWN_CODE, *COMPILED[:2]}
        assert always | {generation.NAIVE, "a given patch replayed"} <= set(found.calls)
        assert (generation.PEFT in found.calls) == generation.has_peft()
    for name, call in found.calls.items():
        exact = name in (generation.EXACT, generation.EXACT_OWN_CODE)
        if exact and os.environ.get("ICL_PATCH_OPS") == "torch":
            continue  # on a pretended device: torch's products see their batch
        first = call().clone()
        assert float((first - expected).abs().max() / expected.abs().max()) <= limit, name
        assert found.check(name, first) <= limit
        if shape.window is None or name not in COMPILED:  # a full window moves
            assert torch.equal(call(), first), name  # it left everything as it found it
        for wrong in (1.5 * expected, torch.full_like(first, torch.nan), first[:, :-1]):
            with pytest.raises(AssertionError, match="expected"):
                found.check(name, wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_model_takes_the_place_of_a_random_one(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    QWEN.build(CPU, dtype).save_pretrained(tmp_path / "own-model")
    chosen, every = (
        generation.cases(CPU, quick=quick, model=str(tmp_path / "own-model"))
        for quick in (True, False)
    )
    assert chosen[0].name == "own-model float32 B=1 context=256"
    assert (len(chosen), len(every)) == (4, 18)
    saved = SavedModel(str(tmp_path / "own-model"))
    compared = generation.comparison(saved, 2, 9, dtype, CPU)
    assert (generation.NAIVE in compared.calls) is (dtype == torch.float32)
    for name in (generation.STABLE, generation.EXACT, generation.OWN):
        compared.check(name, compared.calls[name]())
    assert main(["bench", "linear", "--model", str(tmp_path / "own-model")]) == 2
    assert "expected --model with none but generation, answer, passes" in capsys.readouterr().err


def test_a_whole_answer_has_the_tokens_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "NEW", 3)
    chosen = answer.cases(CPU, quick=False, model=shallow_chat_model(tmp_path / "chat-model"))
    assert [case.name for case in chosen] == ["chat-model float32", "chat-model bfloat16"]
    assert answer.cases(CPU, quick=False) == []
    compared = chosen[0].build()
    names = (
        "generate, exact",
        "generate, exact, compile=False",
        "generate, stable",
        "ask",
        "forward",
    )
    for name in names:
        assert compared.check(name, compared.calls[name]()) == 0
    with pytest.raises(AssertionError, match="expected the model's own tokens"):
        compared.check("ask", 1 - compared.calls["ask"]())
    assert all(case.name.endswith("bf16 random") for case in answer.cases(CUDA, quick=False))
    compared = answer.of_random_weights(QWEN, CPU, context=5, new=3)
    tokens = compared.calls["generate, stable"]()
    assert compared.check("generate, stable", tokens) == 0
    with pytest.raises(AssertionError, match=r"expected 3 tokens, got \(2,\)"):
        compared.check("generate, stable", tokens[:2])


def test_passes_before_a_step_are_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "own-model")
    QWEN.build(CPU, torch.float32).save_pretrained(folder)
    monkeypatch.setattr(passes, "CONTEXTS", (9,))
    monkeypatch.setattr(passes, "CONTEXT", 17)
    assert passes.cases(CPU, quick=False) == []
    chosen = passes.cases(CPU, quick=True, model=folder)
    assert len(passes.cases(CPU, quick=False, model=folder)) == 2 * len(chosen) == 6
    attaching, computing, first = (case.build() for case in chosen)
    for call in attaching.calls.values():
        call()
    assert all(computing.check(name, call()) <= 1e-6 for name, call in computing.calls.items())
    with pytest.raises(AssertionError, match="expected the fp64 result"):
        computing.check(passes.OWN, 2 * computing.calls[passes.OWN]())
    patch = computing.calls["compute, exact"]()
    wrong = [{name: -x if name[-2:] == ".u" else x for name, x in y.items()} for y in patch.layers]
    with pytest.raises(AssertionError, match="expected the fp64 result"):
        computing.check("compute, exact", replace(patch, layers=tuple(wrong)))
    assert all(first.check(name, call()) == 0 for name, call in first.calls.items())
    with pytest.raises(AssertionError, match="expected the model's own token"):
        first.check("generate, exact", 1 + first.calls[passes.OWN]())


def test_a_graph_keeps_the_tensors_that_its_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph holds addresses alone."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())

    def captured() -> tuple[baselines.Step, weakref.ref]:
        token = torch.ones(3)
        return baselines._graph(lambda: token.clone()), weakref.ref(token)

    replay, token = captured()
    gc.collect()
    assert token() is not None and replay().tolist() == [1, 1, 1]
