"""Fits of the embedded model's tasks and of random models: what they reach, refuse and say."""

import copy
import importlib
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.random_models import build, shallow, tokens
from support.static import CLOSE, logits, random_examples, random_patch
from torch import Tensor, nn

from icl_patch import ContextPatcher, UnsupportedModelError, static
from icl_patch.errors import HarmfulPatchError, StaticPatchWarning
from icl_patch.static import Distillation, Example, StaticPatch
from icl_patch.static.answers import answered
from icl_patch.static.matrices import find_matrices
from icl_patch.static.student import Student
from icl_patch.static.targets import targets_of, targets_of_texts
from icl_patch.static.training import Training, first_factors

answers_module = importlib.import_module("icl_patch.static.answers")
fit_module = importlib.import_module("icl_patch.static.fit")
training_module = importlib.import_module("icl_patch.static.training")
QUIET: dict[str, Any] = {"preserve": (), "accept_worse": True}
FEW = Distillation(steps=2, dtype=torch.float32)
# fits of random models have nothing to preserve, and say so
pytestmark = pytest.mark.filterwarnings("ignore::icl_patch.errors.StaticPatchWarning")


def fit(model: Any, examples: list[Example], **options: Any) -> StaticPatch:
    return static.fit(model, examples, **{**QUIET, "distillation": FEW, "rank": 2, **options})


# -- what a fit reaches, and what it measures


def test_the_report_is_that_of_the_models() -> None:
    """Of one held-out prompt that has no context the model gives its own answer."""
    model, texts = build("llama"), tokens(4, 12, 6).tolist()
    examples = random_examples(count=8)
    (plain,) = answered(model, [Example(examples[0].without, examples[0].without)], 3)
    tests = [plain, *examples[1:3]]
    options = Distillation(steps=2, learning_rate=0.01, warmup=1, dtype=torch.float32)
    patch = fit(model, examples[3:], preserve=texts, held_out=tests, distillation=options)

    def compared(full: Any, kept: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """KL at each of the last tokens, and the patched model's choices."""
        with torch.no_grad():
            p = model(torch.tensor([full])).logits[0, -count:].log_softmax(-1)
            with patch.applied(model):
                q = model(torch.tensor([kept])).logits[0, -count:].log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1), q.argmax(-1)

    report = patch.report
    assert report is not None and report.held_out and report.preserved
    kl, whole = [], 0
    for example in tests:
        answer = list(example.answer or ())
        full, kept = ([*x, *answer[:-1]] for x in (example.with_context, example.without))
        own, choices = compared(full, kept, len(answer))
        kl.append(own)
        whole += choices.tolist() == answer
    # fp32 logits on both sides, from batches of other sizes
    assert report.held_out.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert report.held_out.whole == whole / 3 > 0
    unseen = texts[4::5]
    of_texts = torch.cat([compared(text, text, len(text))[0] for text in unseen])
    assert report.preserved.kl == pytest.approx(float(of_texts.mean()), rel=1e-3)
    assert report.preserved.questions == len(unseen)


def training(model: Any, examples: list[Example], texts: list, **options: Any) -> Training:
    student = Student(model)
    settings = {"kappa": 0.7, "held_out": [], "held_texts": [], "options": FEW}
    changes = random_patch(model, 3, rank=2).changes
    return Training(
        student,
        {path: change for path, change in changes.items() if "layers.0." not in path},
        questions=targets_of(student, examples),
        texts=targets_of_texts(student, texts),
        **{**settings, **options},
    )


def test_a_step_descends_on_the_divergence_of_whole_models() -> None:
    """The gradient beside that of whole models with the changed weights in fp64."""
    model = build("llama")
    examples, texts = random_examples(count=3), tokens(4, 2, 6).tolist()
    step = training(model, examples, texts)
    twin, teacher = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    pairs = [x for change in step.changes.values() for x in (change.u, change.v)]
    factors = [x.detach().double().requires_grad_() for x in pairs]
    weights = {
        f"{path}.weight": twin.get_submodule(path).weight.detach() + u.T @ v
        for path, u, v in zip(step.changes, factors[::2], factors[1::2], strict=True)
    }

    def divergence(full: Any, kept: Any, count: int) -> torch.Tensor:
        p = teacher(torch.tensor([full])).logits[0, -count:].log_softmax(-1).detach()
        out = torch.func.functional_call(twin, weights, (torch.tensor([kept]),))
        return (p.exp() * (p - out.logits[0, -count:].log_softmax(-1))).sum(-1)

    asked = []
    for x in examples:
        rows = ((*prompt, *x.answer[:-1]) for prompt in (x.with_context, x.without))
        asked.append(divergence(*rows, len(x.answer)))
    kept = torch.cat([divergence(text, text, len(text)) for text in texts])
    loss = torch.cat(asked).mean() + 0.7 * kept.mean()
    expected = torch.autograd.grad(loss, factors)
    step.optimizer = SimpleNamespace(param_groups=[], step=lambda: None)
    step.options = replace(FEW, clip=math.inf)
    step._descend(step.questions, step.texts, 1.0)
    for parameter, gradient in zip(step.parameters, expected, strict=True):
        # fp32 through two blocks and the head
        assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm()


FORMS = ("llama", "gpt2", "opt", "bloom", "granite", "gemma3", "llava", "llama with hooks")


@pytest.mark.parametrize("name", FORMS)
def test_a_pass_and_the_logits_behind_it_are_the_models(name: str) -> None:
    """Hooks on blocks are seen once."""
    model, ids = shallow(name.split()[0]), tokens(11, 3, 6)
    if "hooks" in name:
        first, second, *_ = model.model.layers
        first.register_forward_hook(lambda _m, _a, out: out + 1.0)
        second.register_forward_pre_hook(lambda _m, args: (2.0 * args[0], *args[1:]))
    student = Student(model)
    with torch.no_grad():
        expected = model(ids).logits.flatten(0, 1)
        final = student.final(ids)
        torch.testing.assert_close(student.logits(final.flatten(0, 1)), expected)
        assert torch.equal(model(ids).logits.flatten(0, 1), expected)


def test_every_target_is_drawn_once_before_any_comes_again() -> None:
    student = Student(build("llama"))
    targets = targets_of_texts(student, [[5] * n for n in (3, 9, 4, 4, 8, 2, 9)])
    draws = training_module._shuffled(targets, 3, 0, kind=student.kind, tokens=18)
    for _ in range(2):
        seen: list = []
        while len(seen) < len(targets):
            batch = next(draws)
            assert len(batch) <= 3 and len(batch) * max(len(x.ids) for x in batch) <= 18
            seen += batch
        assert {id(x) for x in seen} == {id(x) for x in targets}
        assert len(seen) == len(targets)


# -- time


def test_a_budget_holds_the_steps_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 2 s here, and a measurement after every tenth 5 s; the learning rate falls with
    the time.
    """
    clock, rates = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(training_module.time, "perf_counter", lambda: clock.now)
    run = training(build("llama"), random_examples(), [], options=Distillation(patience=99))

    def descend(_questions: Any, _texts: Any, rate: float) -> None:
        clock.now += 2.0
        rates.append(rate)

    def measure() -> None:
        clock.now += 5.0

    run._descend, run._keep_best = descend, measure  # type: ignore[method-assign]
    run.run(100.0)
    # the first measurement and 40 steps with three more; the step that ends behind is the last
    assert run.step == len(rates) == 40
    begun = [5.0 + 2.0 * step + 5.0 * (step // 10) for step in range(5, 40)]
    expected = [0.02 + 0.49 * (1 + math.cos(math.pi * now / 100)) for now in begun]
    assert rates[5:] == pytest.approx(expected)


def test_a_budget_that_is_too_short_keeps_the_answers_and_names_one_that_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, kept, said = build("llama"), {}, []
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 6, "answers": kept, "say": said.append}
    with pytest.raises(
        ValueError, match=r"got 1e-09: \d+ are enough for all 2 steps\. The model's answers"
    ) as got:
        fit(model, NO_ANSWER, seconds=1e-9, **options)
    assert re.fullmatch(
        r"the model answers 8 questions with at most 6 tokens, in \d+ s or less", said[0]
    )
    for example in NO_ANSWER:
        ids = torch.tensor([example.with_context])
        own = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert kept[example.with_context, (), 6] == tuple(own[0, ids.shape[1] :].tolist())
    monkeypatch.setattr(answers_module, "greedy", None)  # they are not asked for again
    enough = float(re.search(r": (\d+) are enough", str(got.value))[1])
    patch = fit(model, NO_ANSWER, seconds=enough, **options)
    assert patch.report.steps >= 1
    assert any("8 answers did not end within 6" in text for text in patch.report.warnings)


def test_distillation_stops_early() -> None:
    options = Distillation(steps=40, check_every=1, patience=2, learning_rate=1.0, warmup=1)
    patch = fit(build("llama"), random_examples(), distillation=options)
    assert patch.report is not None
    assert patch.report.steps == patch.report.best_step + 2 < 40


# -- nothing worse than nothing


def test_a_patch_that_harms_is_not_returned() -> None:
    model, texts = build("llama"), tokens(4, 10, 6).tolist()
    wild = Distillation(steps=2, learning_rate=3.0, warmup=1, check_every=2)
    harmful = {"accept_worse": False, "distillation": wild}
    with pytest.raises(HarmfulPatchError, match="expected a patch that is better than none") as got:
        fit(model, random_examples(), **harmful)
    report = got.value.report
    assert report.held_out.kl > report.without.kl
    assert f"{report.held_out.kl:.3f}" in str(got.value)
    assert fit(model, random_examples(), **{**harmful, "accept_worse": True}).report is not None
    # the held-out questions are those of the fit but for the context, so it helps them
    examples = random_examples()
    held_out = [replace(x, without=(*x.without[:1], 7, *x.without[1:])) for x in examples]
    slow = Distillation(steps=30, learning_rate=0.03, warmup=1)
    options = {"held_out": held_out, "preserve": texts, "kappa": 0, "distillation": slow}
    with pytest.raises(HarmfulPatchError, match="leaves other texts as they are") as got:
        fit(model, examples, **options, accept_worse=False)
    assert got.value.report.preserved.kl > 0.2


OTHER_FRONT = [replace(x, with_context=(9, *x.with_context)) for x in random_examples()]
NO_ANSWER = [replace(x, answer=None) for x in random_examples()]

KNOWN_END = [replace(x, end=(0,)) for x in NO_ANSWER]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (random_examples(count=1), "one question: nothing is held out"),
        (random_examples(), "no texts to preserve are held out"),
        (OTHER_FRONT, "begin with different tokens"),
        (NO_ANSWER, "8 answers did not end within 3 tokens: give the token that ends an answer"),
        (KNOWN_END, "8 answers did not end within 3 tokens: give more max_new_tokens"),
    ],
)
def test_what_is_not_known_is_said(examples: list, message: str) -> None:
    with pytest.warns(StaticPatchWarning) as caught:
        patch = fit(build("llama"), examples, max_new_tokens=3)
    assert patch.report is not None
    assert {warning.filename for warning in caught} == {__file__}  # the caller's line
    said = [str(warning.message) for warning in caught]
    assert [text for text in said if message in text]
    assert said == list(patch.report.warnings)
    assert all(f"warning: {text}" in str(patch.report) for text in said)


def split(examples: list[Example], texts: Any = ()) -> Any:
    return fit_module._split(build("llama"), examples, (), examples, texts)


def test_a_question_of_several_contexts_is_held_out_in_all() -> None:
    """Without its context it is one prompt: a fit that had seen it would be measured on it. Texts
    that are given twice are not held out of themselves.
    """
    examples = random_examples(count=7)
    other = [replace(x, with_context=(1, 7, 8, 9, *x.without[1:])) for x in examples]
    rows = split(examples + other, [(3, 4, 5)] * 10)
    held, fitted = ({x.without for x in part} for part in (rows.held_out, rows.fitted))
    assert len(held) == 1 and len(fitted) == 6 and not held & fitted
    assert len(rows.held_out) == 2
    assert (rows.fitted_texts, rows.held_texts) == ([(3, 4, 5)], [])


def test_few_of_many_questions_are_held_out() -> None:
    for count, held_out in ((2, 1), (4, 1), (20, 4), (200, 20), (900, 31)):
        rows = split(random_examples(count=count))
        assert (len(rows.fitted), len(rows.held_out)) == (count - held_out, held_out)


# -- starting from a patch


def test_a_fit_starts_from_a_patch() -> None:
    model, examples = build("llama"), random_examples()
    start = fit(model, examples, rank=3, distillation=Distillation(steps=3, warmup=1))
    slow = Distillation(steps=1, learning_rate=1e-9)
    patch = fit(model, examples, rank=4, start=start, distillation=slow)
    for path, change in patch.changes.items():
        expected = start.changes[path].dense()
        assert (change.dense() - expected).norm() < 1e-4 * expected.norm()
    assert fit(model, examples, rank=1, start=start, distillation=slow).rank == 1
    wild = Distillation(steps=2, warmup=1, learning_rate=3.0)
    best = fit(model, examples, rank=3, start=start, distillation=wild)
    assert best.report is not None and best.report.best_step == 0
    for path, change in best.changes.items():
        assert (change.dense() - start.changes[path].dense()).norm() < 1e-4 * change.dense().norm()
    with pytest.raises(ValueError, match=r"got one that changes model\.layers\.0\.mlp"):
        fit(model, examples, first_block=2, start=start)


def test_a_start_of_a_lower_rank_leaves_directions_to_train() -> None:
    """Those that are zero in both factors have no gradients."""
    start, cpu = random_patch(build("llama"), 0, rank=2), torch.device("cpu")
    sizes = {path: (x.u.shape[1], x.v.shape[1]) for path, x in start.changes.items()}
    fresh = first_factors(sizes, 5, 0, {}, cpu)
    for given, rank in ((0.0 * start, 0), (static.mean([start, start, start]), 2)):
        for path, change in first_factors(sizes, 5, 0, given.changes, cpu).items():
            expected = given.changes[path].dense()
            assert (change.dense() - expected).norm() <= 1e-6 * expected.norm()
            assert not change.u[rank:].any() and torch.equal(change.v[rank:], fresh[path].v[rank:])


def test_a_seed_gives_the_same_patch_and_the_model_stays_as_it_is() -> None:
    model, examples, ids = build("llama"), random_examples(), tokens(5, 2, 7)
    with torch.no_grad():
        before, modules = model(ids).logits, dict(model.named_modules())

    def fitted(seed: int) -> StaticPatch:
        return fit(model, examples, distillation=Distillation(steps=3, seed=seed))

    one, other = fitted(0), fitted(1)
    with torch.inference_mode():  # of the caller: no matter
        again = fitted(0)
    for path, change in one.changes.items():
        assert torch.equal(change.u, again.changes[path].u)
        assert not torch.equal(change.u, other.changes[path].u)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert dict(model.named_modules()) == modules
    assert not any(parameter.grad is not None for parameter in model.parameters())


# -- what may change, and what is refused


def test_parts_and_blocks_are_those_that_change() -> None:
    model, examples = build("llama"), random_examples()
    mlp = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    for parts, names in ((("mlp",), mlp), (("attention",), attention)):
        changes = fit(model, examples, parts=parts, first_block=2).changes
        assert changes.keys() == {f"model.layers.2.{name}" for name in names}
    changes = fit(model, examples, parts=("attention", "mlp")).changes
    expected = {f"model.layers.{i}.{name}" for i in range(3) for name in mlp | attention}
    assert changes.keys() == expected


def test_a_copy_in_another_dtype_keeps_its_rotary_frequencies() -> None:
    model = build("llama")
    copied = fit_module.in_dtype(model, torch.bfloat16)
    assert copied.dtype == torch.bfloat16 and model.dtype == torch.float32
    own, other = (dict(x.named_buffers()) for x in (model, copied))
    assert own and all(torch.equal(x, other[name]) for name, x in own.items())
    assert all(x.dtype == other[name].dtype for name, x in own.items())
    for name, x in copied.named_parameters():
        assert torch.equal(x, model.get_parameter(name).bfloat16())


def test_forms_that_can_and_cannot_hold_a_patch() -> None:
    for name in ("gptj", "gemma3n", "falcon"):
        assert fit(shallow(name), random_examples()).report.held_out.questions == 1
    for name, reason in (
        ("mixtral", "with experts"),
        ("llama4", "with experts"),
        ("mamba", "recurrent layers"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            fit(shallow(name), random_examples())


class Doubled(nn.Linear):
    def forward(self, z: Tensor) -> Tensor:
        return 2 * super().forward(z)


def test_a_matrix_that_no_patch_can_be_merged_into_is_refused_before_the_fit() -> None:
    model: Any = build("llama")
    mlp = model.model.layers[1].mlp
    weight, mlp.up_proj = mlp.up_proj.weight, Doubled(48, 72, bias=False).eval()
    with torch.no_grad():
        mlp.up_proj.weight.copy_(weight / 2)
    with pytest.raises(UnsupportedModelError, match=r"Doubled, which computes something"):
        fit(model, random_examples())
    mlp.up_proj = nn.Linear(48, 72, bias=False).eval()
    mlp.up_proj.weight = weight
    found = find_matrices(model, ["mlp"])
    assert found["model.layers.1.mlp.up_proj"] == (72, 48)
    patch = random_patch(model, 0)
    assert patch.changes.keys() == found.keys()
    with patch.applied(model):
        expected = logits(model)
    assert (logits(patch.merge(model)) - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": math.inf}, "kappa ≥ 0"),
        ({"seconds": 0.0}, "a positive number of seconds"),
        ({"seconds": 1e-6}, "enough seconds for a step, got 1e-06"),
        (
            {"preserve": ["text"]},
            "a text to preserve as one row of integer ids, got 'text'",
        ),
        ({"preserve": [tokens(0, 2, 3)]}, "expected a text to preserve as one row of integer ids"),
        ({"preserve": [()]}, "expected at least one id in each text to preserve, got none"),
        ({"preserve": [(200,)]}, "expected ids from 0 to 96"),
        ({"preserve": None}, "expected a tokenizer for the texts to preserve"),
        ({"held_out": random_examples()}, "not among the examples, got 8 that are"),
        ({"rank": 49}, "expected a rank from 1 to 48"),
        ({"rank": 0}, "expected a rank from 1 to 48"),
        ({"parts": ("reader",)}, "expected parts among mlp, attention"),
        ({"first_block": 3}, "expected a first block from 0 to 2, got 3"),
        ({"steps": 0}, "expected positive settings"),
        ({"seed": 2**32}, "expected a seed below 2³² in size, got 4294967296"),
        ({"learning_rate": math.nan}, "expected positive settings"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        if options.keys() & vars(FEW).keys():
            Distillation(**options)
        fit(build("llama"), random_examples(), **options)


def test_bad_models_and_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected examples, .* got 0 examples"):
        fit(build("llama"), [])
    with pytest.raises(ValueError, match="expected ids from 0 to 96, got 1 to 200"):
        fit(build("llama"), [Example((5, 6), (6,), (200, 1))])
    model = shallow("gpt2").train()
    model.config.attn_pdrop = 0.1
    with pytest.raises(ValueError, match="expected a model in eval mode"):
        fit(model, random_examples())
    model = build("llama")
    with ContextPatcher(model), pytest.raises(TypeError, match="detach the patcher"):
        fit(model, random_examples())
    with torch.inference_mode():
        without_gradients = build("llama")
    with pytest.raises(UnsupportedModelError, match="got weights created in it"):
        fit(without_gradients, random_examples())
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    with pytest.raises(ValueError, match="expected finite logits, got NaN or infinity"):
        fit(model, random_examples())


def test_factors_are_fp32_under_another_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        changes = fit(build("llama", dtype=torch.float32), random_examples()).changes.values()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for change in changes for x in (change.u, change.v)} == {torch.float32}


def test_logits_are_computed_where_they_are_compared() -> None:
    """Those of a context, all tokens at once, would take more memory than the whole fit."""
    model, sizes = build("llama"), []
    handle = model.lm_head.register_forward_pre_hook(
        lambda _, args: sizes.append(args[0].numel() // args[0].shape[-1])
    )
    fit(model, random_examples(), preserve=tokens(4, 5, 6).tolist())
    handle.remove()
    # the answers of 7 questions have 21 tokens, 4 texts 24; the questions with contexts 84
    assert max(sizes) <= 24
