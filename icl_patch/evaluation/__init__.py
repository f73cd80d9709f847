"""Measuring patches: the papers' protocol, small random models of every architecture, the embedded
model.
"""
