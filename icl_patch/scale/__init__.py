"""Data sets of contexts: a patch for each row of a file, in shards with a Parquet index.

::

    from icl_patch import scale

    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        scale.extract_dataset(patcher, "prompts.jsonl", "patches")
        patches = scale.PatchDataset("patches")
        patch = patches[0]
        logits = patcher.forward(patch.kept_ids, patch)

It needs pyarrow: ``pip install 'icl-patch[data]'``.
"""

from importlib.util import find_spec

if find_spec("pyarrow") is None:
    raise ModuleNotFoundError(
        "expected pyarrow for data sets of contexts, found none: pip install 'icl-patch[data]'",
        name="pyarrow",
    )

from icl_patch.scale.batch_extractor import BatchExtractor
from icl_patch.scale.extraction import Plan, Share, Summary, extract_dataset
from icl_patch.scale.extractor import Batching
from icl_patch.scale.patch_dataset import PatchDataset
from icl_patch.scale.rows import Columns
from icl_patch.scale.run import Contents

__all__ = [
    "BatchExtractor",
    "Batching",
    "Columns",
    "Contents",
    "PatchDataset",
    "Plan",
    "Share",
    "Summary",
    "extract_dataset",
]
