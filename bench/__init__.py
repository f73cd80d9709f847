"""Benchmarks, installed as ``icl_patch.bench``: ``icl-patch bench``. Each checks its results before it times anything.

A benchmark is a module with ``run(device, quick, results)``, which adds rows to the results and yields what it is about to measure.
"""

BENCHMARKS = ("inversion", "linear")
