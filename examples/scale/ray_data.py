"""Patches of a data set by two actors of Ray Data.

    python ray_data.py PROMPTS.parquet FOLDER [MODEL]

FOLDER is the checkpoint: stopped and started again, this computes only what is missing. The data
set is Parquet, which keeps texts as they are: Ray's readers of JSON lines make numbers and dates of
some.

Each actor asks for half a CPU. Reading the data set needs a CPU too: on a machine with two, actors
that take one each wait for it for ever, without an error (Ray issue 44687).
"""

import sys

import ray
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.evaluation.loading import load_model
from icl_patch.scale import BatchExtractor


def main(prompts: str, folder: str, model: str | None = None) -> int:
    """Run two actors; 1 if some rows have no patch."""

    def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        torch.set_num_threads(1)
        return load_model(model)

    ray.init(num_cpus=2, include_dashboard=False)
    rows = ray.data.read_parquet(prompts).repartition(target_num_rows_per_block=64)
    done = rows.map_batches(
        BatchExtractor,
        fn_constructor_args=(load, folder, "stable"),
        batch_format="pyarrow",
        batch_size=16,
        num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    patches = rejected = 0
    for row in done.iter_rows():
        if row["reason"] is None:
            patches += 1
        else:
            rejected += 1
            print(row["id"], row["reason"])
    print(f"{folder}: {patches} rows with a patch, {rejected} without")
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
