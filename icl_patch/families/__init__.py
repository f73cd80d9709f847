"""What the blocks of a model are made of, as data: where the residual stream is seen, the readers, the writer.

A new family is a new entry here; code is only needed for a form of writer that no family has yet.
"""

from icl_patch.families.registry import FAMILIES, Block, Family, Writer, blocks_of, family_of

__all__ = ["FAMILIES", "Block", "Family", "Writer", "blocks_of", "family_of"]
