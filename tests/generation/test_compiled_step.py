"""A decode step that is traced once and compiled: the eager step's numbers, for every token and
context that come after.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.generation import mostly_stress
from support.numeric import noise_limit, replay_error, replay_limit
from support.patchers import IDS, works
from support.random_models import build, ragged, shallow, tokens
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from icl_patch import ContextPatcher, UnsupportedModelError, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.generation import recorded_step, region_compiler, reusable_step
from icl_patch.generation.sampling_loop import GenerationStep


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that were traced. They run as they are: compiling takes up to ten seconds a graph,
    and the tests of the compiler set ``BACKEND`` themselves.
    """
    found: list[Any] = []

    def compiled(function: Any, blocks: Any, **options: Any) -> Any:
        found.append(function)
        return region_compiler.in_regions(function, blocks, **options)

    monkeypatch.setattr(recorded_step, "in_regions", compiled)
    monkeypatch.setattr(region_compiler, "BACKEND", "eager")
    yield found
    torch.compiler.reset()


def steps_of(patcher: ContextPatcher, ids: Any = IDS, **arguments: Any) -> list[GenerationStep]:
    options = {"max_new_tokens": 3, "eos_token_id": None, "mode": "auto"} | arguments
    return list(patcher.generate(ids, **options))


def llama(layers: int = 1) -> PreTrainedModel:
    """Of as few layers as a test needs: tracing takes a tenth of a second for each."""
    return build("llama", num_hidden_layers=layers)


def same(
    patcher: ContextPatcher, steps: list[GenerationStep], others: list[GenerationStep]
) -> None:
    """The same tokens, and the same logits but for the model's noise."""
    assert len(steps) == len(others)
    limit = noise_limit(patcher.model)
    for step, other in zip(steps, others, strict=True):
        assert torch.equal(step.token_ids, other.token_ids)
        assert metrics.linf(step.logits, other.logits).max() <= limit


# the others run with the stress tests
CHOSEN = [(family, "auto") for family in ("gemma3", "gpt2", "cohere2", "gpt_oss")]
CHOSEN += [("qwen3_moe", "two_stream")]
FAMILIES = ("gemma3", "gpt2", "cohere2", "gemma3n", "qwen3_moe", "gpt_oss")
EVERY_MODE = [*itertools.product(FAMILIES, ("two_stream", "auto")), ("llama", "auto")]
BACKENDS = {("gpt2", "auto"): "aot_eager", ("llama", "auto"): "inductor"}


@pytest.mark.parametrize(("family", "mode"), mostly_stress(EVERY_MODE, CHOSEN))
def test_a_compiled_step_is_the_eager_one(
    family: str, mode: str, traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows, windows that have moved on, scales, parallel blocks, a shared cache; the patch
    of every step replays. With the compiler's front half: GPT-2's shared cache; with the whole one,
    whose g++ takes two seconds for each of a layer's kernels: a Llama. With the other tests it
    compiles an exact step: ``test_region_compiler``.
    """
    monkeypatch.setattr(region_compiler, "BACKEND", BACKENDS.get((family, mode), "eager"))
    model = shallow(family)
    ids = tokens(0, 3, 9) % model.config.vocab_size
    arguments: dict = {"context_mask": ragged(3, 9, side="left"), "mode": mode}
    with ContextPatcher(model, "stable") as patcher:
        eager = steps_of(patcher, ids, **arguments)
        model.generation_config.cache_implementation = "static"  # the compiled step has its own
        made = steps_of(patcher, ids, compile=True, **arguments)
        same(patcher, made, eager)
        assert {step.mode for step in made} == {step.mode for step in eager}
        for step in made:
            assert replay_error(patcher, step).max() <= replay_limit(patcher, step.patch)
        assert len(traces) == 1
    assert not patcher.plans.reusable_steps


EXACT = [("gemma3", torch.float32)]
BF16 = ("gemma4", "gpt2", "opt-post-norm", "phi3", "qwen2_moe")
EXACT += itertools.product(BF16, [torch.bfloat16])


@pytest.mark.parametrize(("family", "dtype"), EXACT, ids=str)
def test_a_compiled_exact_step_has_the_bits_of_its_replay(
    family: str, dtype: torch.dtype, traces: list[Any]
) -> None:
    """Also alone; ragged rows, windows. The operators run one by one here, see
    ``test_region_compiler``.
    """
    model = shallow(family, 1, dtype)
    ids = tokens(0, 3, 9) % model.config.vocab_size
    with ContextPatcher(model) as patcher:
        steps = steps_of(patcher, ids, compile=True, context_mask=ragged(3, 9, side="left"))
        for step in steps + steps_of(patcher, ids[:, 2:], compile=True):
            patch = step.patch
            made = step.mode, patch.passes, patch.info.arithmetic
            mode = "two_stream" if family == "gemma4" else "shared_cache"
            assert made == (mode, 1, "batch_invariant")
            assert not replay_error(patcher, step).any()
            assert patch.report is not None and not patch.report.misses.any()
            assert patch.logits is not None and torch.equal(patch.logits[:, -1], step.logits)
            alone = patch.select(rows=slice(1))
            assert torch.equal(patcher.forward(alone.kept_ids, alone)[:, -1], step.logits[:1])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("update", "by", "message"),
    [
        ("exact", 2.0**-23, "other bits than the step"),
        ("stable", 1e-3, "off by 0.001 of the"),
    ],
)
def test_a_step_with_other_numbers_is_refused(
    update: str, by: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler might give them: here in the graph's outputs."""

    def inexact(*arguments: Any, **options: Any) -> Callable[[], list[Any]]:
        graph = region_compiler.in_regions(*arguments, **options)

        def run() -> list[Any]:
            return [x * (1 + by) if x.is_floating_point() else x for x in graph()]

        return run

    monkeypatch.setattr(recorded_step, "in_regions", inexact)
    refusal = pytest.raises(UnsupportedModelError, match=message)
    with ContextPatcher(llama(), update) as patcher, refusal:
        steps_of(patcher, compile=True)


def test_a_step_is_kept_for_the_contexts_to_come(traces: list[Any]) -> None:
    """Other lengths and other weights in the same places find it made; other rows, and the third
    shape of all, do not.
    """
    model = llama()
    with ContextPatcher(model, "stable") as patcher:
        for length in (5, 9, 1):
            ids = tokens(length, 2, length)
            same(patcher, steps_of(patcher, ids, compile=True), steps_of(patcher, ids))
        assert len(traces) == 1
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
            model.lm_head.weight.neg_()
        same(patcher, steps_of(patcher, compile=True), steps_of(patcher))
        assert len(traces) == 1
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
        same(patcher, steps_of(patcher, compile=True), steps_of(patcher))
        assert len(traces) == 2
        for rows in (1, 3, 1):
            ids = tokens(rows, rows, 6)
            same(patcher, steps_of(patcher, ids, compile=True), steps_of(patcher, ids))
        assert len(traces) == 4
        assert len(patcher.plans.reusable_steps) == 2


def test_a_model_with_hooks_is_not_compiled(traces: list[Any]) -> None:
    """A trace keeps what the hook did once: neither a hook on a matrix below a patched module, nor
    a forward in another's place, nor a hook on all modules.
    """
    model = llama()
    block = model.model.layers[0]
    with ContextPatcher(model, "stable") as patcher:
        expected = steps_of(patcher, compile=True)
        matrix = patcher.attached_model.blocks[0].readers["mlp.up_proj"].base_layer
        modules = (matrix.register_forward_hook, block.register_forward_hook)
        for set_hook in (*modules, register_module_forward_hook):
            hook = set_hook(lambda *_: None)
            with pytest.raises(UnsupportedModelError, match="does not cover forward hooks"):
                steps_of(patcher, compile=True)
            hook.remove()
        block.forward = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
        with pytest.raises(UnsupportedModelError, match=r"are some on model\.layers\.0"):
            steps_of(patcher, compile=True)
        del block.forward
        same(patcher, steps_of(patcher, compile=True), expected)
    assert len(traces) == 1


def test_the_room_of_a_step() -> None:
    sizes = [reusable_step.bucketed_capacity(length) for length in range(1, 5000)]
    assert all(n <= size <= max(n + 31, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 25


def test_generations_beside_each_other_do_not_mix(traces: list[Any]) -> None:
    """Patches, asked for when all is over, are those of their steps; a row that has ended has
    none.
    """
    others, steps = tokens(5, 2, 7), list[GenerationStep]()
    with ContextPatcher(llama(2), "stable") as patcher:
        arguments: dict = {"max_new_tokens": 3, "eos_token_id": None, "compile": True}
        both = (patcher.generate(ids, **arguments) for ids in (IDS, others))
        pairs = list(zip(*both, strict=True))
        for place, ids in enumerate((IDS, others)):
            expected = steps_of(patcher, ids, mode="two_stream")
            same(patcher, [pair[place] for pair in pairs], expected)
        assert len(traces) == 2
        ends = {"eos_token_id": int(pairs[1][0].token_ids[0]), "pad_token_id": 0}
        ended = steps_of(patcher, compile=True, **ends)
        next(patcher.generate(IDS, **arguments))  # which nobody finishes
        works(patcher)
        made = steps_of(patcher, mode="two_stream", compile=True)
        same(patcher, made, steps_of(patcher, mode="two_stream"))
        steps += [step for pair in pairs for step in pair] + ended
        assert not ended[-1].live[0]
        for step in steps:
            assert replay_error(patcher, step).max() <= replay_limit(patcher, step.patch)
            for name, factor in step.patch.layers[0].items():
                assert not factor[~step.live].any(), name


def test_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            steps_of(patcher, ids, compile=True, **options)

    refusal, ids = UnsupportedModelError, IDS % tiny_models.VOCABULARY
    with ContextPatcher(build("llama"), "exact") as patcher:
        refused(ValueError, r"for steps of one pass of .*'two_pass'", mode="two_pass")
    with ContextPatcher(tiny_models.build("xglm"), "stable") as patcher:
        before = steps_of(patcher, ids)
        refused(refusal, "compile does not cover XGLMForCausalLM")
        same(patcher, steps_of(patcher, ids), before)
    with ContextPatcher(shallow("llama4"), "stable") as patcher:
        refused(refusal, "does not cover Llama4ForCausalLM: these experts: the host reads how many")
    with torch.inference_mode():
        model = build("llama")
    with ContextPatcher(model, "stable") as patcher:
        steps_of(patcher)
        refused(refusal, "weights made in inference mode")
    compiler = Mock(side_effect=RuntimeError("no C++ compiler\nin the PATH"))
    monkeypatch.setattr(region_compiler, "BACKEND", compiler)
    with ContextPatcher(llama(), "stable") as patcher:
        refused(refusal, r"compile does not cover LlamaForCausalLM: .*no C\+\+ compiler")
    with ContextPatcher(shallow("qwen2_moe")) as patcher:
        reusable_step.check_compilable(patcher.attached_model)
        monkeypatch.setattr(reusable_step, "input_device", lambda _: torch.device("cuda"))
        with pytest.raises(refusal, match="exact steps with experts as a CUDA graph"):
            reusable_step.check_compilable(patcher.attached_model)
