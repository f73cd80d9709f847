"""Batch invariance: the bits of a row do not depend on the other rows of its batch."""
