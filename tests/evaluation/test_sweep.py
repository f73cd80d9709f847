"""The sweep over the model classes of transformers: one type of each form, and the table."""

import pytest
import torch
import transformers
from packaging.version import Version
from support.patchers import refuses
from support.random_models import of_the_zoo

from tools import model_types, sweep, sweep_page

# What only the sweep has, beside the forms of `icl_patch.evaluation.tiny_models`.
FORMS = {
    "afmoe": "a norm behind the sum of experts and a shared expert",
    "flex_olmo": "a norm behind experts",
    "granitemoehybrid": "a second module beside the experts; recurrent layers",
    "doge": "a residual stream times a parameter; attention to the highest scores",
    "ernie4_5_moe": "the MLP's output is cast before it is added",
    "minimax": "a cache of its own class",
    "nemotron_h": "blocks without a context layer",
    "axk2": "a norm with a gate",
    "jetmoe": "experts with the router inside, rows sorted by expert",
    "dbrx": "experts' matrices in stacks; the residual sum inside the attention's module",
    "mpt": "positions are slots of the cache",
    "modernbert-decoder": "a head with the name of a decoder",
}


# Types that are refused for a property of their class, which their own errors do not name.
REFUSED = {
    "qwen4_exp_text": r"model\.layers\.0 .*: it carries 2 residual streams",
    "xlstm": "a class of its own, xLSTMCache",
    "blt": r"global_transformer\.layers \(4\).*patches of bytes",
    "longcat_flash": r"found model\.layers \(4\): its blocks hold several attentions",
    "gemma4_assistant": "drafts tokens for another model",
    "cpmant": "a token's logits depend on the tokens after it",
}


# each has much of what the zoo's families or another one here have
SIMILAR = ("flex_olmo", "granitemoehybrid", "axk2", "modernbert-decoder")


@pytest.mark.parametrize("model_type", of_the_zoo(FORMS, stress=SIMILAR))
def test_one_type_of_each_form(model_type: str) -> None:
    """Exact in bf16, with the features of trained weights."""
    model = model_types.build(model_type, {})
    first = sweep.prepare(model, torch.bfloat16, realistic=True)
    cell = sweep.measure(model, "exact", sweep.SCENARIOS["bf16"], first)
    assert (cell["result"], cell["misses"]) == ("right", 0)


# the page names the version of its tables
of_the_tables = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="older transformers has other types"
)


@of_the_tables
@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refusal_names_the_property_of_the_class(model_type: str) -> None:
    fewer = {"encoder_hash_byte_group_vocab": 50} if model_type == "blt" else {}  # of 10⁸ numbers
    refuses(model_types.build(model_type, fewer), REFUSED[model_type])


@of_the_tables
def test_the_table_has_no_wrong_cell_and_is_what_the_page_says() -> None:
    cells, realistic = sweep.read(sweep.CELLS), sweep.read(sweep.REALISTIC_CELLS)
    for mine in (cells, realistic):
        assert {cell["type"] for cell in mine} >= set(FORMS)
        assert not [cell for cell in mine if cell["result"] in ("wrong", "crashed")]
    programs = sweep.read(sweep.PROGRAMS)
    assert {line["type"] for line in programs} >= {cell["type"] for cell in cells}
    runs = {run for line in programs for run in line["runs"].values()}
    assert not [run for run in runs if "other bits" in run or "without a warning" in run]
    assert sweep.PAGE.read_text() == sweep_page.page(sweep.SCENARIOS, cells, realistic, programs)
