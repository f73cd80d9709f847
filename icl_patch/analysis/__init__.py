"""Analyses with patches: implicit dynamics, controllability, attribution to
context tokens, folded norms, OV matrices.
"""
