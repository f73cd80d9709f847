"""What can be studied with patches: implicit dynamics, controllability, folded norms, OV
matrices.
"""
