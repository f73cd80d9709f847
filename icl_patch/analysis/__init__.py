"""Analyses with patches: implicit dynamics, controllability, folded norms, OV
matrices.
"""
