"""Evaluation: the papers' protocol, tiny models of every block form, and the embedded model."""
