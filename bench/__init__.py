"""Benchmarks, installed as ``icl_patch.bench``: ``icl-patch bench``. Each checks its results before
it times anything.

A benchmark is a module of :mod:`icl_patch.bench.cases` with ``cases(device, quick)``, a
list of :class:`icl_patch.bench.harness.Case`, the most telling first; its docstring stands above
its table.
"""

OF_A_MODEL = ("generation", "answer", "passes")
BENCHMARKS = ("linear", "inversion", *OF_A_MODEL)
