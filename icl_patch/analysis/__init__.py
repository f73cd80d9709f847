"""Analyses with patches: implicit dynamics, controllability, attribution to
context tokens, steering vectors, other weights, sums, folded norms, OV matrices.
"""
