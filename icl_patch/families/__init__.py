"""What the blocks of a model are made of, as data: where the residual stream is seen, the readers, the writer.

The form of a block is read from its module tree and from one small forward, see :mod:`icl_patch.families.recognise`.
"""

from icl_patch.families.forms import Block, Form, Writer
from icl_patch.families.model import (
    check_language_model,
    check_length,
    check_vocabulary,
    chooses_tokens,
    depends_on_cache,
    family_of,
    layers_of,
    position_limit,
    random_tokens,
    text_config,
    vocabulary,
)
from icl_patch.families.recognise import blocks_of

__all__ = [
    "Block",
    "Form",
    "Writer",
    "blocks_of",
    "check_language_model",
    "check_length",
    "check_vocabulary",
    "chooses_tokens",
    "depends_on_cache",
    "family_of",
    "layers_of",
    "position_limit",
    "random_tokens",
    "text_config",
    "vocabulary",
]
