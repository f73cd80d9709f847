"""Exact decode steps in one pass: bit for bit the same model on batch-invariant functions."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import realistic_weights
from support.generation import mostly_stress, own_steps, spoil_closing
from support.random_models import SAME_FORM, build, ragged, shallow, tokens
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher, UnsupportedModelError, batch_invariant
from icl_patch.evaluation import tiny_models
from icl_patch.generation.sampling_loop import GenerationStep
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, NATIVE
from icl_patch.invariance.functions import ROW_FUNCTIONS
from icl_patch.ops import linear
from icl_patch.ops.reference import low_rank_term
from icl_patch.recording.block_recorder import BlockRecorder

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# every kind of writer that one pass serves, a Conv1D, norms in all places, fused and absent gates,
# experts alone, beside a shared one, and read only beside a shared writer
FAMILIES = (
    *("llama", "gemma3", "olmo2", "gpt2", "opt-post-norm", "granite", "phi3", "llama-bias"),
    *("qwen2_moe", "mixtral", "granitemoe", "deepseek_v3", "olmoe"),
)
# In fp32 and fp16 one each; there the others, which differ in no arithmetic of their own, run with
# the stress tests, and so do forms that another family has.
CHOSEN = [("llama", torch.float32), ("gemma3", torch.float16)]
CHOSEN += [(family, torch.bfloat16) for family in FAMILIES if family not in SAME_FORM]
ONE_STREAM = mostly_stress(product(FAMILIES, DTYPES), CHOSEN)
# Blocks beside their attention, whose terms are added in two orders, or that go on from their sum.
TWO_STREAMS = [("llama", torch.float32), ("cohere", torch.bfloat16)]
TWO_STREAMS += [("gpt_neox", torch.bfloat16), ("phi", torch.float16), ("gemma4", torch.bfloat16)]
TWO_STREAMS += [("opt-post-norm", torch.float32)]
CASES = [pytest.param(*case.values, "shared_cache", marks=case.marks) for case in ONE_STREAM]
CASES += [pytest.param(*case, "two_stream") for case in TWO_STREAMS]
IDS, MASK = tokens(3, 3, 11), ragged(3, 11, side="left")


def steps_of(
    patcher: ContextPatcher, count: int = 4, ids: Tensor = IDS, **options: object
) -> Iterator[GenerationStep]:
    arguments = {"context_mask": MASK, "max_new_tokens": count, "eos_token_id": None} | options
    return patcher.generate(ids, do_sample=False, **arguments)


def check_replay(patcher: ContextPatcher, step: GenerationStep) -> None:
    """It has all bits of the step, and the patch knows of no miss."""
    patch = step.patch
    assert patch.report is None or not patch.report.misses.any()
    assert torch.equal(patcher.forward(patch.kept_ids, patch)[:, -1], step.logits)


def same_logits(steps: Iterable[GenerationStep], others: Iterable[Tensor]) -> bool:
    pairs = zip(steps, others, strict=True)
    return all(torch.equal(step.logits, logits) for step, logits in pairs)


def batch_invariant_logits(
    model: PreTrainedModel, steps: list[GenerationStep], ids: Tensor = IDS, attention: bool = False
) -> Iterator[Tensor]:
    """The model's own decode steps on batch-invariant functions, after its own prompt."""
    around = partial(batch_invariant, model, attention=attention)
    chosen = [step.token_ids for step in steps]
    return own_steps(model, ids, MASK, len(chosen), chosen, around)


@pytest.mark.parametrize(("family", "dtype", "mode"), CASES, ids=str)
def test_a_step_is_its_replay_and_the_model(family: str, dtype: torch.dtype, mode: str) -> None:
    """On weights with the features of trained ones. The kernel that attends for one token does not
    see padding, so batch-invariant attention gives its bits too.
    """
    model, features = realistic_weights.build(family, 1, dtype)
    ids = features.mark({"context_ids": IDS, "context_mask": MASK})["context_ids"]
    with ContextPatcher(model) as patcher:
        steps = list(steps_of(patcher, 2, ids, mode=mode))
        for step in steps:
            patch = step.patch
            assert (step.mode, patch.passes) == (mode, 1)
            assert patch.info.arithmetic == BATCH_INVARIANT and patch.report is not None
            check_replay(patcher, step)
        attached = list(batch_invariant_logits(model, steps, ids))
    assert same_logits(steps, attached)
    assert same_logits(steps, batch_invariant_logits(model, steps, ids))
    if family == "llama":
        assert same_logits(steps, batch_invariant_logits(model, steps, ids, attention=True))


@pytest.mark.parametrize("mode", ["two_pass", "shared_cache"])
def test_misses_are_counted_with_the_gain_of_the_replay(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer's v·h is 1 but for the last bits. With other ones than the replay has, a miss could
    be counted as a hit.
    """
    found, replayed = list[Tensor](), list[Tensor]()
    postpone, add_low_rank = BlockRecorder.postpone, linear.add_low_rank

    def opened(self: BlockRecorder, base: Tensor, gain: Tensor, *of: Any) -> None:
        found.append(gain.flatten())
        postpone(self, base, gain, *of)

    def added(y: Tensor, z: Tensor, u: Tensor, v: Tensor, **options: Any) -> Tensor:
        replayed.append(low_rank_term(z, u.new_ones(len(z), 1), v).flatten())
        return add_low_rank(y, z, u, v, **options)

    with ContextPatcher(build("llama"), "exact") as patcher:
        patcher.plans.choose(mode)  # which is tried now
        monkeypatch.setattr(BlockRecorder, "postpone", opened)
        patch = next(steps_of(patcher, 1, mode=mode)).patch
        monkeypatch.setattr(linear, "add_low_rank", added)
        patcher.forward(patch.kept_ids, patch)
    gains = torch.stack(replayed[-len(patcher.attached_model.blocks) :])
    assert (gains != 1).any()
    assert torch.equal(torch.stack(found), gains)


@pytest.mark.parametrize("family", ["gemma3", "olmo2"])
def test_outputs_that_underflow_in_fp16_are_reached(family: str) -> None:
    """W_down writes numbers of which fp16 keeps few bits, and zeros, before a norm."""
    model = tiny_models.build(family, 1, torch.float16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                parameter.mul_(2.0**-14)
    with ContextPatcher(model) as patcher:
        for mode, passes in (("shared_cache", 1), ("two_pass", 2)):
            for step in steps_of(patcher, 6, mode=mode):
                assert step.patch.passes == passes and step.patch.report is not None
                check_replay(patcher, step)


def test_a_row_replays_alike_in_any_batch() -> None:
    """Of 19 rows, which take another product by default than one row does."""
    ids = tokens(4, 19, 6)
    with ContextPatcher(build("llama")) as patcher:
        (step,) = patcher.generate(ids, max_new_tokens=1, mode="shared_cache")
        patch = step.patch
        for rows in (slice(1, 2), slice(3, 20)):
            part = patch.select(rows=rows)
            assert torch.equal(patcher.forward(part.kept_ids, part)[:, -1], step.logits[rows])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_moe", "gpt_neox", "gemma4"])
def test_a_miss_is_closed_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block's factor is spoilt: the blocks are closed again, and the replay is right."""
    with ContextPatcher(shallow(family)) as patcher:
        expected = list(steps_of(patcher))
        spoil_closing(monkeypatch, -1)
        steps = list(steps_of(patcher))
        for step in steps:
            patch = step.patch
            assert (patch.passes, patch.info.arithmetic) == (2, BATCH_INVARIANT)
            assert patch.report is not None
            check_replay(patcher, step)
    assert same_logits(steps, (step.logits for step in expected))


def test_the_order_of_a_parallel_sum_is_found_again_for_other_weights() -> None:
    """Where attention writes 0 no order shows."""
    model = tiny_models.build("phi")
    weights = [layer.self_attn.dense.weight for layer in model.model.layers]
    kept = [weight.detach().clone() for weight in weights]
    with ContextPatcher(model) as patcher:
        for factor in (0, 1):
            with torch.no_grad():
                for weight, before in zip(weights, kept, strict=True):
                    weight.copy_(factor * before)
            for step in steps_of(patcher, 2, mode="two_stream"):
                check_replay(patcher, step)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs vector instructions"
)
@pytest.mark.parametrize("width", [24, 72])
def test_a_function_that_sees_a_rows_place_is_found(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own computes the last elements of a tensor by other instructions, here of an odd
    number of rows.
    """
    model = build("llama", intermediate_size=width, hidden_act="mish")
    with ContextPatcher(model) as patcher:
        for rows in (slice(1), slice(2), slice(3)):
            ids, mask = IDS[rows], MASK[rows]
            for step in steps_of(patcher, 2, ids, context_mask=mask, mode="shared_cache"):
                check_replay(patcher, step)
    monkeypatch.delitem(ROW_FUNCTIONS, F.mish)
    refusal = pytest.raises(UnsupportedModelError, match="replays of its steps are off by")
    with ContextPatcher(model) as patcher, refusal:
        patcher.plans.choose("shared_cache")


def test_where_it_does_not_go() -> None:
    """Asked for by name it is refused with the reason; else two passes serve."""
    with ContextPatcher(tiny_models.build("llama4")) as patcher:
        with pytest.raises(UnsupportedModelError, match="its experts scale their input"):
            steps_of(patcher, mode="shared_cache")
        (step,) = steps_of(patcher, 1)
        assert (step.mode, step.patch.info.arithmetic) == ("two_pass", NATIVE)
    refusal = pytest.raises(UnsupportedModelError, match="its attention is none of transformers'")
    with ContextPatcher(tiny_models.build("bloom")) as patcher, refusal:
        steps_of(patcher, mode="two_stream")
    model = build("llama")
    with ContextPatcher(model) as patcher:
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="forward hooks"):
            steps_of(patcher, mode="shared_cache")
        hook.remove()
        with torch.autocast("cpu"), pytest.raises(UnsupportedModelError, match="autocast"):
            steps_of(patcher, mode="shared_cache")
        (step,) = steps_of(patcher, 1, mode="two_pass")
        assert (step.mode, step.patch.info.arithmetic) == ("two_pass", NATIVE)


def test_autocast_changes_neither_steps_nor_replays() -> None:
    with ContextPatcher(build("llama")) as patcher:
        expected = [step.logits for step in steps_of(patcher, 3)]
        steps = steps_of(patcher, 3)
        with torch.autocast("cpu"):
            steps = list(steps)
            for step in steps:
                check_replay(patcher, step)
    assert same_logits(steps, expected)


@pytest.mark.parametrize(
    ("family", "update", "dtype"),
    [
        *(("llama", "direct", torch.float16), ("gpt_neox", "direct", torch.bfloat16)),
        *(("mixtral", "stable", torch.float16), ("olmo2", "stable", torch.bfloat16)),
    ],
    ids=str,
)
def test_two_streams_in_16_bits_have_the_bits_of_their_replays(
    family: str, update: str, dtype: torch.dtype
) -> None:
    """Large activations would magnify another rounding to that of other logits."""
    model, features = realistic_weights.build(family, 1, dtype)
    ids = features.mark({"context_ids": IDS, "context_mask": MASK})["context_ids"]
    with ContextPatcher(model, update) as patcher:
        for step in steps_of(patcher, 3, ids, mode="two_stream"):
            assert step.patch.info.arithmetic == BATCH_INVARIANT
            check_replay(patcher, step)


@pytest.mark.parametrize(
    ("family", "update", "mode"),
    [("gemma3", "stable", "two_stream"), ("llama", "exact", "shared_cache")],
)
def test_norms_round_alike_in_wide_models(family: str, update: str, mode: str) -> None:
    """Their sum of squares: in 16 bits another order shows in one of some ten thousand elements. A
    step runs the norms that a replay runs, also with hooks on gradients.
    """
    model = build(family, dtype=torch.float16, hidden_size=640)
    norms = [module for path, module in model.named_modules() if path.endswith("norm")]
    for norm in norms if update == "exact" else ():
        norm.register_full_backward_hook(lambda *_: None)
    with ContextPatcher(model, update) as patcher:
        for step in steps_of(patcher, 4, tokens(0, 8, 11), context_mask=None, mode=mode):
            assert step.mode == mode and norms
            check_replay(patcher, step)
