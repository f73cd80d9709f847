"""A decode step that is traced once and compiled: the eager step's numbers, for every token and
context that come after.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.numeric import noise_limit, replay_error, replay_limit
from support.patchers import IDS, works
from support.random_models import build, ragged, shallow, tokens, two_layers
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from icl_patch import ContextPatcher, UnsupportedModelError, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.generation import region_compiler, reusable_step, traced_step
from icl_patch.generation.loop import GenerationStep


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that were traced. They run as they are: compiling takes up to ten seconds a graph,
    and the tests of the compiler set ``BACKEND`` themselves.
    """
    found: list[Any] = []

    def compiled(module: Any, blocks: Any, **options: Any) -> Any:
        found.append(module)
        return region_compiler.in_regions(module, blocks, **options)

    monkeypatch.setattr(traced_step, "in_regions", compiled)
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
EVERY_MODE = [
    pytest.param(
        family,
        mode,
        id=f"{family}-{mode.replace('two_stream', 'two streams')}",
        marks=[] if (family, mode) in CHOSEN else pytest.mark.stress,
    )
    for family in ("gemma3", "gpt2", "cohere2", "gemma3n", "qwen3_moe", "gpt_oss")
    for mode in ("two_stream", "auto")
]


@pytest.mark.parametrize(("family", "mode"), EVERY_MODE)
def test_a_compiled_step_is_the_eager_one(
    family: str, mode: str, traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows, windows that have moved on, scales, parallel blocks, a shared cache; the patch
    of every step replays. With the compiler's front half: GPT-2's shared cache.
    """
    if (family, mode) == ("gpt2", "auto"):
        monkeypatch.setattr(region_compiler, "BACKEND", "aot_eager")
    model = shallow(family)
    ids = tokens(0, 3, 9) % model.config.vocab_size
    arguments: dict = {"context_mask": ragged(3, 9, side="left"), "mode": mode}
    with ContextPatcher(model, "stable") as patcher:
        eager = steps_of(patcher, ids, **arguments)
        made = steps_of(patcher, ids, compile=True, **arguments)
        same(patcher, made, eager)
        assert {step.mode for step in made} == {step.mode for step in eager}
        for step in made:
            assert replay_error(patcher, step).max() <= replay_limit(patcher, step.patch)
        assert len(traces) == 1
    assert not patcher.plans.reusable_steps


@pytest.mark.stress
def test_with_the_whole_compiler() -> None:
    """Of one layer: g++ takes two seconds for each of a layer's kernels. With the other tests one
    compiles an exact step: ``test_eager_operators``.
    """
    model = llama()
    with pytest.MonkeyPatch.context() as patch, ContextPatcher(model, "stable") as patcher:
        eager = steps_of(patcher)
        model.generation_config.cache_implementation = "static"  # the compiled step has its own
        patch.setattr(region_compiler, "BACKEND", "inductor")
        same(patcher, steps_of(patcher, compile=True), eager)


def replays_bit_for_bit(patcher: ContextPatcher, ids: Tensor, **arguments: Any) -> None:
    """Compiled exact steps, each with its patch's replay, also alone, and the model's logits."""
    for step in steps_of(patcher, ids, compile=True, **arguments):
        patch = step.patch
        assert (step.mode, patch.passes, patch.info.arithmetic) == (
            "shared_cache",
            1,
            "batch_invariant",
        )
        assert not replay_error(patcher, step).any()
        assert patch.report is not None and not patch.report.misses.any()
        assert patch.logits is not None and torch.equal(patch.logits[:, -1], step.logits)
        alone = patch.select(rows=slice(1))
        assert torch.equal(patcher.forward(alone.kept_ids, alone)[:, -1], step.logits[:1])


EXACT = [("gemma3", torch.float32)]
EXACT += itertools.product(("gpt2", "opt-post-norm", "phi3", "qwen2_moe"), [torch.bfloat16])


@pytest.mark.parametrize(("family", "dtype"), EXACT, ids=str)
def test_a_compiled_exact_step_has_the_bits_of_its_replay(
    family: str, dtype: torch.dtype, traces: list[Any]
) -> None:
    """Ragged rows, windows; the operators run one by one here, see ``test_eager_operators``."""
    model = shallow(family, 1, dtype)
    ids = tokens(0, 3, 9) % model.config.vocab_size
    with ContextPatcher(model) as patcher:
        replays_bit_for_bit(patcher, ids, context_mask=ragged(3, 9, side="left"))
        replays_bit_for_bit(patcher, ids[:, 2:])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("update", "by", "message"),
    [("exact", 2.0**-23, "other bits than the replay"), ("stable", 1e-3, "off by 0.001 of the")],
)
def test_a_step_with_other_numbers_is_refused(
    update: str, by: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler might give them: here in the last graph's output."""

    def inexact(*arguments: Any, **options: Any) -> Callable[[], list[Any]]:
        graph = region_compiler.in_regions(*arguments, **options)

        def run() -> list[Any]:
            logits, *others = graph()
            return [logits * (1 + by), *others]

        return run

    monkeypatch.setattr(traced_step, "in_regions", inexact)
    refusal = pytest.raises(UnsupportedModelError, match=message)
    with ContextPatcher(llama(), update) as patcher, refusal:
        steps_of(patcher, compile=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_compiler_sees_all_but_the_products(family: str, traces: list[Any]) -> None:
    """And attention, and the norm of a scale writer: what it does not see, it cannot fuse."""
    with ContextPatcher(two_layers(family), "stable") as patcher:
        steps_of(patcher, compile=True)
        blocks = len(patcher.attached_model.blocks)
    ours = Counter(
        str(node.target).split(".")[1]
        for node in traces[0].graph.nodes
        if str(node.target).startswith("icl_patch")
    )
    products = {"attention_pair", "patched_linear", "record_linear"}
    assert set(ours) <= {*products, "record_norm"}
    assert ours["record_linear"] == 2 * blocks
    assert ours["record_norm"] == blocks * (family == "gemma3")


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


def test_a_step_that_looks_at_its_numbers() -> None:
    """What it found while it was traced would be there for good."""
    for look in (lambda x: x.tolist()[3], lambda x: x.numpy()[3], lambda x: x[3].item()):
        model = llama()
        norm: Any = model.model.norm

        def forward(x: Tensor, norm: Any = norm, look: Any = look) -> Tensor:
            return type(norm).forward(norm, x) * (1.5 if look(x[0, -1]) > 0 else 0.5)

        norm.forward = forward
        message = r"compile does not cover LlamaForCausalLM: .*(look|get value|reads a tensor)"
        refusal = pytest.raises(UnsupportedModelError, match=message)
        with ContextPatcher(model, "stable") as patcher, refusal:
            steps_of(patcher, compile=True)


def test_the_room_of_a_step() -> None:
    sizes = [reusable_step.bucketed_capacity(length) for length in range(1, 5000)]
    assert all(n <= size <= max(n + 31, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 25


def test_generations_beside_each_other_do_not_mix(traces: list[Any]) -> None:
    others = tokens(5, 2, 7)
    with ContextPatcher(llama(), "stable") as patcher:
        arguments: dict = {"max_new_tokens": 3, "eos_token_id": None}
        both = (patcher.generate(ids, compile=True, **arguments) for ids in (IDS, others))
        pairs = list(zip(*both, strict=True))
        for place, ids in enumerate((IDS, others)):
            expected = steps_of(patcher, ids, mode="two_stream")
            same(patcher, [pair[place] for pair in pairs], expected)
        assert len(traces) == 2
        half = patcher.generate(IDS, compile=True, **arguments)
        next(half)
        del half
        works(patcher)
        made = steps_of(patcher, mode="two_stream", compile=True)
        same(patcher, made, steps_of(patcher, mode="two_stream"))


def test_patches_outlive_their_steps() -> None:
    """Asked for when all is over, and after another generation on the same buffers; a row that has
    ended has none.
    """
    model = llama(2)
    with ContextPatcher(model, "stable") as patcher:
        ends = int(steps_of(patcher)[1].token_ids[0])
        steps = steps_of(patcher, compile=True, eos_token_id=ends, pad_token_id=0, max_new_tokens=4)
        steps_of(patcher, tokens(8, 2, 6), compile=True)
        live, limit = [step.live.tolist() for step in steps], noise_limit(model)
        assert not live[-1][0]
        for step in steps:
            patch = step.patch
            assert replay_error(patcher, step).max() <= limit
            for name, factor in patch.layers[0].items():
                assert not factor[~step.live].any(), name


def test_in_inference_mode() -> None:
    with ContextPatcher(llama(), "stable") as patcher:
        with torch.inference_mode():
            same(patcher, steps_of(patcher, compile=True), steps_of(patcher))
        same(patcher, steps_of(patcher, compile=True), steps_of(patcher))


def test_what_cannot_be_compiled() -> None:
    refusal = pytest.raises(ValueError, match=r"for steps of one pass of .*'two_pass'")
    with ContextPatcher(build("llama"), "exact") as patcher, refusal:
        patcher.generate(IDS, compile=True, max_new_tokens=2, mode="two_pass")
    model = tiny_models.build("xglm")
    ids = IDS % model.config.vocab_size
    with ContextPatcher(model, "stable") as patcher:
        before = steps_of(patcher, ids)
        with pytest.raises(UnsupportedModelError, match="compile does not cover XGLMForCausalLM"):
            steps_of(patcher, ids, compile=True)
        same(patcher, steps_of(patcher, ids), before)
    expected = "does not cover Llama4ForCausalLM: these experts: the host reads how many"
    refusal = pytest.raises(UnsupportedModelError, match=expected)
    with ContextPatcher(shallow("llama4"), "stable") as patcher, refusal:
        patcher.generate(tokens(0, 1, 5), compile=True)
    with torch.inference_mode():
        model = build("llama")
    with ContextPatcher(model, "stable") as patcher:
        steps_of(patcher)
        with pytest.raises(UnsupportedModelError, match="weights made in inference mode"):
            steps_of(patcher, compile=True)


def test_no_cuda_graph_holds_exact_steps_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    with ContextPatcher(tiny_models.build("qwen2_moe")) as patcher:
        reusable_step.check_compilable(patcher.attached_model, traced=False)
        monkeypatch.setattr(reusable_step, "input_device", lambda _: torch.device("cuda"))
        refusal = "exact steps with experts as a CUDA graph"
        with pytest.raises(UnsupportedModelError, match=refusal):
            reusable_step.check_compilable(patcher.attached_model, traced=False)
