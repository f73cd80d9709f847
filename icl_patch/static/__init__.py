"""Static patches: a context as one low-rank change of weights, the same for every token.

::

    examples = [static.Example.from_text(tokenizer, context, questions)]
    patch = static.fit(model, examples, preserve=static.documents(tokenizer, texts))
    print(patch.report)
    with patch.applied(model):
        model.generate(...)          # without the context
    patch.save("patch.safetensors")
    patch.to_peft("adapter", model)  # a LoRA for PEFT and vLLM
"""

from icl_patch.static.block_parts import PARTS
from icl_patch.static.distill import Distillation
from icl_patch.static.examples import Example, documents
from icl_patch.static.fit import Plan, fit
from icl_patch.static.peft_import import from_peft
from icl_patch.static.processes import ProcessError
from icl_patch.static.report import Quality, StaticReport
from icl_patch.static.ridge import LowRank
from icl_patch.static.self_study import self_study
from icl_patch.static.static_patch import RowMap, StaticInfo, StaticPatch, applied, mean

__all__ = [
    "PARTS",
    "Distillation",
    "Example",
    "LowRank",
    "Plan",
    "ProcessError",
    "Quality",
    "RowMap",
    "StaticInfo",
    "StaticPatch",
    "StaticReport",
    "applied",
    "documents",
    "fit",
    "from_peft",
    "mean",
    "self_study",
]
