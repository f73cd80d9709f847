"""Static patches: a context as one low-rank change of weights, the same for every token.

::

    examples = static.examples(model, tokenizer, questions, system="You are a pirate.")
    patch = static.fit(model, examples, tokenizer=tokenizer)
    print(patch.report)
    with patch.applied(model):
        model.generate(...)          # without the system message
    patch.save("patch.safetensors")
    patch.to_peft("adapter", model)  # a LoRA for PEFT and vLLM
"""

from icl_patch.patch.low_rank import LowRank
from icl_patch.static.examples import Example, documents, examples, front, preserved_texts
from icl_patch.static.fit import fit
from icl_patch.static.matrices import PARTS
from icl_patch.static.static_patch import StaticInfo, StaticPatch, mean
from icl_patch.static.targets import Quality, StaticReport
from icl_patch.static.training import Distillation

__all__ = [
    "PARTS",
    "Distillation",
    "Example",
    "LowRank",
    "Quality",
    "StaticInfo",
    "StaticPatch",
    "StaticReport",
    "documents",
    "examples",
    "fit",
    "front",
    "mean",
    "preserved_texts",
]
