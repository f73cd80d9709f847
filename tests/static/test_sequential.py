"""The sequential fit against the same fit on whole forward passes, and its folds."""

from dataclasses import replace

import pytest
import torch
from support.models import build, shallow
from support.static import ReferenceFit, random_example

from icl_patch import static
from icl_patch.models.language_model import layers_of
from icl_patch.static.fit import fit

# fp32 forward passes on both sides, a solve that amplifies their difference by at most 1/λ = 100,
# block after block
TOLERANCE = 100 * 100 * torch.finfo(torch.float32).eps


def compare(reference: ReferenceFit, patch: static.StaticPatch) -> None:
    assert patch.changes
    for path, change in patch.changes.items():
        expected = reference.patched.get_submodule(path).weight.double()
        expected = expected - reference.model.get_submodule(path).weight.double()
        got = change.dense()
        got = got if got.shape == expected.shape and "c_" not in path else got.T
        # queries and keys of the first block read the embeddings, with the context and without it
        assert expected.any() or path.startswith("model.layers.0.self_attn.")
        assert (got - expected).norm() <= TOLERANCE * expected.norm(), path


def test_a_llama_with_all_parts() -> None:
    model, example = build("llama"), random_example()
    patch = fit(model, [example], "ridge", parts=static.PARTS, rank=None, folds=1)
    reference = ReferenceFit(model, example, ridge=0.01)
    for layer in (f"model.layers.{index}" for index in range(3)):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        reference.fit_inputs([f"{attention}.q_proj", f"{attention}.k_proj"])
        norm = f"{layer}.post_attention_layernorm"
        reference.fit_output(f"{attention}.o_proj", layer, norm)
        reference.fit_inputs([f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        reference.fit_output(f"{mlp}.down_proj", norm, f"output of {layer}")
    assert len(patch.changes) == 3 * 6
    compare(reference, patch)


def test_a_gemma_whose_branches_end_in_norms() -> None:
    model, example = build("gemma3"), random_example()
    with torch.no_grad():  # no zeros in the scales, which would leave tokens out
        for name, parameter in model.named_parameters():
            if "post_" in name:
                parameter.clamp_(min=-0.7)
    patch = fit(
        model, [example], "ridge", parts=("o_proj", "readers", "writer"), rank=None, folds=1
    )
    reference = ReferenceFit(model, example, ridge=0.01)
    for layer in (f"model.layers.{index}" for index in range(3)):
        hidden = f"{layer}.pre_feedforward_layernorm"
        reference.fit_output(
            f"{layer}.self_attn.o_proj", layer, hidden, f"{layer}.post_attention_layernorm"
        )
        reference.fit_inputs([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"])
        norm = f"{layer}.post_feedforward_layernorm"
        reference.fit_output(f"{layer}.mlp.down_proj", hidden, f"output of {layer}", norm)
    compare(reference, patch)


def test_a_gpt2_with_biases_and_transposed_weights() -> None:
    model, example = shallow("gpt2"), random_example()
    patch = fit(
        model, [example], "ridge", parts=("o_proj", "readers", "writer"), rank=None, folds=1
    )
    reference = ReferenceFit(model, example, ridge=0.01)
    for index in range(model.config.num_hidden_layers):
        layer = f"transformer.h.{index}"
        reference.fit_output(f"{layer}.attn.c_proj", layer, f"{layer}.ln_2")
        reference.fit_inputs([f"{layer}.mlp.c_fc"])
        reference.fit_output(f"{layer}.mlp.c_proj", f"{layer}.ln_2", f"output of {layer}")
    compare(reference, patch)


def test_a_granite_whose_branches_are_multiplied() -> None:
    model, example = shallow("granite"), random_example()
    patch = fit(model, [example], "ridge", parts=("writer",), rank=None, folds=1)
    reference = ReferenceFit(model, example, ridge=0.01)
    multiplier = model.config.residual_multiplier
    for index in range(model.config.num_hidden_layers):
        layer = f"model.layers.{index}"
        h = reference.inputs(f"{layer}.mlp.down_proj", False)
        hidden = reference.inputs(f"{layer}.post_attention_layernorm", False)
        wanted = reference.inputs(f"output of {layer}", True) - hidden
        given = reference.inputs(f"output of {layer}.mlp.down_proj", False)
        reference.change(f"{layer}.mlp.down_proj", reference.solve(h, wanted / multiplier - given))
    compare(reference, patch)


@pytest.mark.parametrize("name", ["opt", "opt-post-norm", "bloom", "phi3", "olmo2", "llava"])
def test_other_forms_come_closer_to_the_context(name: str) -> None:
    model, example = shallow(name), random_example()
    patch = fit(model, [example], "ridge", rank=None, folds=1)
    reference = ReferenceFit(model, example, ridge=0.01)
    last = f"output of {list(layers_of(model))[-1]}"
    wanted, before = reference.inputs(last, True), reference.inputs(last, False)
    patch.merge(reference.patched)
    after = reference.inputs(last, False)
    assert (wanted - after).norm() < 0.7 * (wanted - before).norm()


def test_the_report_is_of_questions_that_the_fit_has_not_seen() -> None:
    # With one matrix: a later one sees students of other folds, whose patches know this fold.
    model, example = build("llama", num_hidden_layers=1), random_example(count=4)
    parts = ("writer",)
    patch = fit(model, [example], "ridge", parts=parts, rank=4, folds=4, lambdas=(0.1,))
    assert patch.report is not None
    assert patch.report.held_out is not None
    assert patch.report.cross_fitted
    total = 0.0
    for left_out in range(4):
        kept = [i for i in range(4) if i != left_out]
        rest = replace(
            example,
            questions=tuple(example.questions[i] for i in kept),
            answers=tuple(example.answers[i] for i in kept),
        )
        alone = replace(
            example,
            questions=(example.questions[left_out],),
            answers=(example.answers[left_out],),
        )
        # three folds of one question each: any division gives the fit of all three
        one = fit(
            model, [rest], "ridge", parts=parts, rank=4, folds=3, lambdas=(0.1,), held_out=[alone]
        )
        assert one.report is not None
        assert one.report.held_out is not None
        total += one.report.held_out.kl
    assert patch.report.held_out.kl == pytest.approx(total / 4, rel=1e-3)
