"""A decode step that is recorded as a program: every bit of the model's own code, and a source that
one can read.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numeric import normal, replay_error, same_bits, seeded
from support.patchers import IDS
from support.random_models import build, ragged, randomised, shallow, tokens
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DogeConfig, DogeForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from icl_patch import ContextPatcher, UnsupportedModelError, metrics, ops
from icl_patch.errors import SlowerStepsWarning
from icl_patch.generation import reusable_step
from icl_patch.generation.decode_step import StepOutput
from icl_patch.generation.decoding import DecodeState, decode_one_token, start_decoding
from icl_patch.generation.recorded_step import RecordedStep
from icl_patch.generation.reusable_step import use_program
from icl_patch.generation.sampling_loop import GenerationStep
from icl_patch.generation.step_program import StepProgram

STEPS = 16  # the fewest for which there is a program


def steps_of(patcher: ContextPatcher, **arguments: Any) -> list[GenerationStep]:
    options = {"context_ids": IDS, "max_new_tokens": STEPS, "eos_token_id": None} | arguments
    return list(patcher.generate(**options))


def state_of(patcher: ContextPatcher, ids: Tensor, mask: Tensor) -> DecodeState:
    plan = patcher.plans.choose()
    return start_decoding(
        patcher.attached_model, plan, ids, mask, ids.shape[1] + STEPS, reserve=False
    )


def leaves(output: StepOutput) -> list[Any]:
    return tree_leaves((output.logits, output.maybe_infeasible, output.details()))


def all_bits(found: list[Any], wanted: list[Any]) -> bool:
    pairs = [pair for pair in zip(found, wanted, strict=True) if isinstance(pair[0], Tensor)]
    return len(pairs) > 4 and all(same_bits(*pair) for pair in pairs)


# Norms behind the MLP and windows that fill, blocks that go on from their sum, biases, experts,
# parallel and post-LN blocks.
FAMILIES = ("gemma3", "gemma4", "llama", "gpt2", "cohere2", "qwen3_moe", "opt-post-norm")


@pytest.mark.parametrize("update", ["exact", "stable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_has_every_bit_of_the_models_own_code(family: str, update: str) -> None:
    """Ragged rows in two dtypes: logits, factors, misses and diagnostics of later tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        model = shallow(family, dtype=dtype)
        ids = tokens(0, 3, 8 + 7) % model.config.vocab_size
        with ContextPatcher(model, update) as patcher, torch.no_grad():
            state = state_of(patcher, ids[:, :8], ragged(3, 8, side="left"))
            assert use_program(patcher.plans, state) is not None
            for column in range(7, 15):
                state.advance(ids[:, column])
                assert state.run is not None
                found = leaves(state.run())  # first: the model's own code writes the cache too
                recorded = state.run
                assert isinstance(recorded, RecordedStep)
                assert all_bits(found, leaves(recorded.own_code()))
            assert recorded.program is not None
            assert recorded._run == recorded._run_program


@pytest.mark.parametrize("update", ["exact", "stable"])
def test_generation_with_and_without(update: str) -> None:
    """The same tokens, logits and patches; a later context runs the program that is there. Few
    tokens are not worth one.
    """
    model = shallow("gemma3")
    with ContextPatcher(model, update) as patcher:
        steps_of(patcher, max_new_tokens=STEPS - 1)
        wanted = steps_of(patcher, compile=False)
        assert patcher.step_source is None
        found = steps_of(patcher)
        source = patcher.step_source
        assert source is not None
        for step, other in zip(found, wanted, strict=True):
            assert torch.equal(step.logits, other.logits)
            assert step.patch.layers[0].keys() == other.patch.layers[0].keys()
            for layer, factors in zip(step.patch.layers, other.patch.layers, strict=True):
                assert all(torch.equal(layer[name], factors[name]) for name in factors)
        assert replay_error(patcher, found[-1]).max() <= (0 if update == "exact" else 1e-5)
        (before,) = patcher.plans.reusable_steps.values()
        steps_of(patcher, context_ids=tokens(5, *IDS.shape))
        (after,) = patcher.plans.reusable_steps.values()
        assert after is before and patcher.step_source == source


def test_the_source_while_generations_run() -> None:
    """That of the last program that was recorded, also of a step that a generation holds."""
    options = {"max_new_tokens": STEPS, "eos_token_id": None}
    with ContextPatcher(shallow("llama")) as patcher:
        first = patcher.generate(IDS, **options)
        assert patcher.step_source is None
        next(first)
        source = patcher.step_source
        assert source is not None
        second = patcher.generate(IDS[:1], **options)  # another number of rows: another program
        assert patcher.step_source == source
        next(second)
        newer = patcher.step_source
        assert newer is not None and newer != source
        list(first)
        assert patcher.step_source == newer
        list(second)
        assert patcher.step_source == newer
    assert patcher.step_source is None


@pytest.mark.parametrize(("family", "limit"), [("llama", 22), ("gemma3", 28)])
def test_a_block_is_one_screen(family: str, limit: int) -> None:
    """The second block's part of the source has no more lines than that; it names the weights, and
    shows where the update is read and written. The documentation shows one.
    """
    with ContextPatcher(build(family), "exact") as patcher:
        steps_of(patcher, context_ids=IDS[:1])
        assert patcher.step_source is not None
        source = re.split(r"\n +# model\.layers\.\d+\n", patcher.step_source)[2]
    block = source.strip().splitlines()
    called = [x.partition(" = ")[2].partition("(")[0] for x in block]
    for name in ("linear_maps", "record_linears", "write_and_attend"):
        assert called.count(name) == 1
    assert len(block) <= limit, block
    for weight in ("self_attn_q_proj", "mlp_up_proj", "mlp_down_proj"):
        assert any(f"layers_1_{weight}_weight" in line for line in block)
    page = (Path(__file__).parents[2] / "docs/how_it_works.md").read_text()
    shown = "\n".join(["```text", *map(str.strip, block), "```"])
    assert (shown in page) == (family == "llama")


# -- what a program must not keep silently


class _Numbered(nn.Module):
    """An embedding whose forward is another one."""

    def __init__(self, model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.base, self.change = model.model.embed_tokens, change
        model.model.embed_tokens = self

    @property
    def weight(self) -> nn.Parameter:
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.change(self.base(ids))


class _Counter:
    """Scales by half the number of calls before, which the host counts: the first step makes two
    calls.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += x.shape[1] == 1
        return x * (1 + (self.calls - 1) // 2 / 8)


PLANTED = {
    "a number of the host": (_Counter, "its program gives other bits than the step"),
    "item": (lambda: lambda x: x * float(x.abs().amax().item()), "reads a tensor's numbers"),
    "tolist": (lambda: lambda x: x * max(x.flatten().tolist()), "reads a tensor's numbers"),
    "numpy": (lambda: lambda x: x * float(x.numpy().max()), "reads a tensor's numbers"),
    "nonzero": (lambda: lambda x: x + 0 * len(x.nonzero()), "reads a tensor's numbers"),
    "a mask of booleans": (lambda: lambda x: x * x[x > 0].mean(), "reads a tensor's numbers"),
    "random numbers": (lambda: lambda x: x + 0 * torch.rand_like(x), "draws random numbers"),
}


COMPILED = "compile does not cover LlamaForCausalLM: .*(look|get value|reads a tensor)"


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_program_cannot_hold_runs_as_before(name: str) -> None:
    """With a warning that says why, and with a cache that no program has written. What a step that
    looks at its numbers found would be there for good: it is not compiled.
    """
    change, reason = PLANTED[name]
    logits = []
    for recorded in (False, True):
        model = build("llama", num_hidden_layers=1)
        with ContextPatcher(model, "stable") as patcher, torch.no_grad():
            state = state_of(patcher, IDS, torch.ones_like(IDS, dtype=torch.bool))
            _Numbered(model, change())
            patcher.attached_model.watch.accept()
            if not recorded:
                logits += [decode_one_token(state, IDS[:, n]).logits for n in range(5)][-1:]
                continue
            if name in ("item", "tolist", "numpy"):
                with pytest.raises(UnsupportedModelError, match=COMPILED):
                    steps_of(patcher, compile=True)
            assert use_program(patcher.plans, state) is not None
            with pytest.warns(SlowerStepsWarning, match=reason):
                logits += [decode_one_token(state, IDS[:, n]).logits for n in range(5)][-1:]
            assert isinstance(state.run, RecordedStep) and state.run.program is None
            assert patcher.step_source is None
    if name != "random numbers":
        assert torch.allclose(*logits, rtol=0, atol=1e-5 * float(logits[0].abs().max()))


@pytest.mark.parametrize("update", ["exact", "stable"])
def test_logits_that_depend_on_the_columns_of_the_cache(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step runs in a cache with room for later tokens, whether it is recorded or compiled."""
    mask_of, rotate = modeling_llama.create_causal_mask, LlamaRotaryEmbedding.forward
    columns: list[int] = []

    def create_causal_mask(*args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        columns[:] = attention_mask.shape[1:]
        return mask_of(*args, attention_mask=attention_mask, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(x * columns[0] ** 0.5 for x in rotate(*args, **kwargs))

    reason = "in a cache with room for more tokens"
    with ContextPatcher(build("llama"), update) as patcher:
        # behind attaching, which would refuse it
        monkeypatch.setattr(modeling_llama, "create_causal_mask", create_causal_mask)
        monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
        patcher.attached_model.watch.accept()
        wanted = steps_of(patcher, compile=False)
        with pytest.warns(SlowerStepsWarning, match=reason):
            found = steps_of(patcher)
        assert patcher.step_source is None and not patcher.plans.reusable_steps
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowerStepsWarning)
            with monkeypatch.context() as none_is_made:
                none_is_made.setattr(reusable_step, "ReusableStep", None)
                steps_of(patcher)  # it is said once
        with pytest.raises(UnsupportedModelError, match=f"compile does not cover .*{reason}"):
            steps_of(patcher, compile=True)
    for step, other in zip(found, wanted, strict=True):
        assert torch.equal(step.logits, other.logits)


def test_a_model_that_chooses_tokens_has_no_program() -> None:
    """Of equal scores a longer cache may choose others, in any step."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DogeConfig(**sizes, num_attention_heads=4, keep_window_size=6)
    with ContextPatcher(randomised(DogeForCausalLM, config), "stable") as patcher:
        with pytest.warns(SlowerStepsWarning, match="tokens that score highest"):
            steps_of(patcher, context_ids=IDS % 64, mode="two_stream")
        assert patcher.step_source is None


class _Scaled(nn.Module):
    """Scales by settings that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.factors = torch.tensor(1.5), [1.5]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * self.factors[0]


SETTINGS: dict[str, Callable[[Any], object]] = {
    "configuration": lambda model: setattr(model.config, "final_logit_softcapping", 0.05),
    "tensor": lambda model: setattr(model.model.embed_tokens.change, "factor", torch.tensor(-3.0)),
    "list": lambda model: model.model.embed_tokens.change.factors.__setitem__(0, -3.0),
    "class": lambda _: setattr(_Scaled, "forward", lambda self, x: -2 * x),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change_between_two_contexts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is kept does not run with the settings of before."""
    monkeypatch.setattr(_Scaled, "forward", _Scaled.forward)  # and back
    model = shallow("gemma3")
    _Numbered(model, _Scaled())
    with ContextPatcher(model, "stable") as patcher:
        before = steps_of(patcher)[-1].logits
        assert patcher.step_source is not None
        SETTINGS[name](model)
        after, plain = steps_of(patcher)[-1].logits, steps_of(patcher, compile=False)[-1].logits
    assert not torch.allclose(before, after, rtol=0.01)
    assert torch.allclose(after, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change_between_two_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one pass has read some of them: the next step is refused, with a program or
    without. Two passes go on.
    """
    model = shallow("gemma3")
    _Numbered(model, _Scaled())
    for options in ({}, {"compile": False}, {"mode": "two_pass"}):
        model.config.final_logit_softcapping = None
        model.model.embed_tokens.change = _Scaled()
        with ContextPatcher(model, "stable") as patcher, monkeypatch.context() as scope:
            scope.setattr(_Scaled, "forward", _Scaled.forward)  # and back
            steps = patcher.generate(IDS, max_new_tokens=STEPS, eos_token_id=None, **options)
            ids = torch.cat([IDS, *(next(steps).token_ids[:, None] for _ in range(5))], 1)
            cache = model(ids[:, :-1]).past_key_values
            SETTINGS[name](model)
            if "mode" in options:
                expected = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
                assert metrics.linf(next(steps).logits, expected).max() < 1e-5
                continue
            with pytest.raises(UnsupportedModelError, match="they have changed: generate again"):
                next(steps)


def test_other_weights_and_autocast_between_two_steps() -> None:
    """The step then runs the model's own code, and the program again in the next context."""
    model = build("llama", num_hidden_layers=1)
    with ContextPatcher(model, "stable") as patcher, torch.no_grad():
        state = state_of(patcher, IDS, torch.ones_like(IDS, dtype=torch.bool))
        assert use_program(patcher.plans, state) is not None
        for column in range(3):
            decode_one_token(state, IDS[:, column])
        recorded, watch = state.run, patcher.attached_model.watch
        assert isinstance(recorded, RecordedStep)
        plain = leaves(recorded())
        with torch.autocast("cpu", torch.bfloat16):
            wanted = recorded.own_code().logits
            with pytest.warns(SlowerStepsWarning, match="autocast is on"):
                assert torch.equal(recorded().logits, wanted)
            assert not torch.equal(wanted, plain[0])
        norm = model.model.norm
        for other in (nn.Parameter(2 * norm.weight), norm.weight):
            own, norm.weight = norm.weight, other
            numbers = own.data
            if other is own:
                own.data = 3 * numbers
            watch.look()
            wanted = recorded.own_code().logits
            assert torch.equal(recorded().logits, wanted) and not torch.equal(wanted, plain[0])
            norm.weight, own.data = own, numbers
        watch.look()
        assert all_bits(leaves(recorded()), plain) and recorded.program is not None
        assert not recorded.is_current
        steps_of(patcher)
        again = next(iter(patcher.plans.reusable_steps.values()))
        assert again.run is not recorded and again.run.is_current


def test_a_forward_that_somebody_has_replaced() -> None:
    """Its code runs in every step, as it would without a program."""
    model, calls = build("llama", num_hidden_layers=1), []
    own = model.model.embed_tokens

    def forward(ids: Tensor) -> Tensor:
        calls.append(ids)
        return nn.Embedding.forward(own, ids)

    own.forward = forward
    with ContextPatcher(model, "stable") as patcher:
        calls.clear()
        reason = "replaced the forward of model.embed_tokens"
        with pytest.warns(SlowerStepsWarning, match=reason):
            steps_of(patcher)
    assert len(calls) >= STEPS


def test_windows_that_would_grow() -> None:
    """A layer with a window keeps all tokens in a program, so long contexts run without one."""
    model = shallow("gemma3")  # a window of 6
    with ContextPatcher(model, "stable") as patcher:
        with pytest.warns(SlowerStepsWarning, match="keep more than 4 windows of 6 tokens"):
            steps_of(patcher, context_ids=tokens(0, 1, 26))
        assert patcher.step_source is None
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowerStepsWarning)
            steps_of(patcher, context_ids=tokens(0, 1, 26), compile=False)
            for length in (26, 30):
                steps_of(patcher, context_ids=tokens(0, 1, length))  # it is said once


# -- programs of functions


def check_program(step: Callable[[], Tensor], x: Tensor, *memory: Tensor) -> list[str]:
    """The program of a step has its bits for other numbers in ``x``, and leaves the same in memory;
    returns the lines of its source.
    """
    with torch.no_grad():
        program = StepProgram(lambda: [step()], {"x": x}, ())
    for seed in (3, 4):
        x.copy_(normal(seeded(seed), *x.shape))
        wanted, written = step(), [place.clone() for place in memory]
        for place in memory:
            place.zero_()
        assert same_bits(program.leaf(program.function(), 0), wanted)
        assert all(map(same_bits, memory, written))
    return program.source.splitlines()[1:-1]


def test_what_is_left_out() -> None:
    """Copies, repeated and constant work, unused results, views that undo each other."""
    x = torch.randn(1, 2, 3)

    def step() -> Tensor:
        unused = x.exp()
        ones = torch.ones_like(unused[0]) * 2
        doubled = x + x
        again = (x + x).clone()
        return (doubled.view(6).unsqueeze(0).view(1, 2, 3) * again.view(2, 3)) + ones

    lines = check_program(step, x)
    assert [line.partition(" = ")[2][:3] for line in lines].count("x +") == 1
    assert not re.search("clone|exp|ones", "\n".join(lines))


def test_what_only_looks_like_numbers_of_the_host() -> None:
    """A mask that is written through, attention without dropout; several operators of one name."""
    x = torch.randn(1, 2, 3, 4)

    def step() -> Tensor:
        total = x + 1
        differ = total != x
        many = total != 2
        total[x > 0.5] = 7.0
        total = total + differ + many + (x != 3)
        return nn.functional.scaled_dot_product_attention(total, x, x)

    check_program(step, x)
    with pytest.raises(RuntimeError, match="draws random numbers"):
        check_program(lambda: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), x)


def test_the_host_may_read_what_is_the_same_in_every_step() -> None:
    """Gemma 3n computes a quantile of a number. A tensor that was written is no longer constant."""
    x = torch.randn(4)

    def constant() -> Tensor:
        normal = torch.distributions.Normal(0.0, 1.0, validate_args=True)
        number = normal.icdf(torch.tensor(0.9))
        return x * number if number.item() > 1 else x

    def written() -> Tensor:
        number = torch.zeros(4).copy_(x)
        return x * number[0].item()

    assert len(check_program(constant, x)) == 1  # the product alone
    for step in (written, lambda: x * (x + 1)[0].item(), lambda: x * x[0].item()):
        with pytest.raises(RuntimeError, match="reads a tensor's numbers"):
            check_program(step, x)


def test_what_lies_together_is_not_cut_and_joined_again() -> None:
    """Neighbours in one value, in their order or not, and all of many values."""
    x = torch.randn(4, 6)

    def step() -> Tensor:
        doubled, values = x * 2, [x * number for number in (3, 4, 5)]
        rows = torch.stack([*doubled])
        halves = torch.cat([doubled[:2], doubled[2:], values[0], doubled[2:], doubled[:2]])
        whole = torch.stack([value[0:4] for value in values])
        mixed = torch.cat([value[2:] for value in (*values, doubled.double())])
        parts = rows + 1, halves + 2, whole.flatten(0, 1) + 4, mixed + 5
        return torch.cat([part.double() for part in parts])

    lines = check_program(step, x)
    joins = [line for line in lines if re.search("= (cat|stack|clone)[_0-9]*\\(", line)]
    # halves: 3 parts; whole; mixed; the result
    assert len(joins) == 4 and not any("stack(" in line for line in joins), lines


@pytest.mark.parametrize("rows", [2, 4])
def test_maps_of_one_input_are_one_call(rows: int) -> None:
    """But those with a patch, of another dtype or of another input."""
    x, weights = torch.randn(rows, 5), [torch.randn(n, 5) for n in (3, 4, 2)]
    bias, u, v = torch.randn(4), torch.randn(rows, 3), torch.randn(rows, 5)

    def step() -> Tensor:
        y = [ops.patched_linear(x, weight) for weight in weights]
        y.append(ops.patched_linear(x, weights[0], u, v))
        y.append(ops.patched_linear(x, weights[0], out_dtype=torch.float64).float())
        y.append(ops.patched_linear(x + 1, weights[1], bias=bias))
        y.append(ops.patched_linear(x, weights[1], bias=bias))
        direction = ops.read_direction(x[rows // 2 :])
        for weight in weights:
            pair, change, _ = ops.record_linear(x, weight, direction=direction)
            y += [pair, change]
        return torch.cat([part.flatten() for part in y])

    called = re.findall("= ([a-z_]+)[_0-9]*\\(", "\n".join(check_program(step, x)))
    counts = {name: called.count(name) for name in ("linear_maps", "record_linears")}
    assert counts == {"linear_maps": 1, "record_linears": 1} and "record_linear" not in called
    assert called.count("patched_linear") == 3


def test_numbers_that_only_look_alike() -> None:
    """A scalar tensor, which does not decide on a dtype; zeros of two signs; rows without numbers;
    parts that have another dtype than what they were put together to; conjugates, which are
    refused.
    """
    x, scale = torch.ones(3, 1, 4, dtype=torch.bfloat16), torch.tensor(0.3)

    def step() -> Tensor:
        half, empty = x + x, x[:0] + 1
        zeros = [1 / (half.float() * zero) for zero in (0.0, -0.0)]
        both = torch.cat([half, x.float() * 2])
        mixed = both[:3] * 3 + both[3:]
        return torch.cat([(half * scale).float(), *zeros, (empty + empty).float(), mixed])

    check_program(step, x)
    with pytest.raises(RuntimeError, match="a view with other numbers"):
        check_program(lambda: torch.view_as_real((x.float() * 1j).conj()), x)


def test_what_is_kept() -> None:
    """Writes in place, in order; copies of what is written into later, and maps of it before and
    after; bits of strided memory.
    """
    x, memory, weight = torch.randn(4, 3), torch.zeros(4, 3), torch.randn(4, 3)

    def step() -> Tensor:
        total = x + 1
        before, mapped = total.clone(), ops.patched_linear(total, weight)
        total[1:3].mul_(2)
        memory.copy_(total)
        mapped = torch.cat([mapped, ops.patched_linear(total, weight[:3])], 1)
        return torch.cat([before.T.flip(0), memory.T, mapped.T]) + total.view(-1)[:4]

    check_program(step, x, memory)
