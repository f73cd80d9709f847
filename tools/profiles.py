"""Print Nsight Compute's report on the patched products, where there are a GPU and ncu, and
torch.profiler's on decode steps.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import profile

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import GPU_SHAPES, random_ids, twin
from icl_patch.bench.results import environment

MODEL = replace(GPU_SHAPES[2], layers=4, vocabulary=1024)  # Gemma-3-1B
STEPS = 8
# the clocks are left as they are: the machine may be shared
NCU = "ncu --clock-control none --kernel-name regex:_linear_kernel --launch-count 40 --kill yes"
SECTIONS = "--section SpeedOfLight --section Occupancy --section WarpStateStats"
BENCH = "-m icl_patch bench linear --device cuda --quick --out"

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
print(environment(device), flush=True)
if cuda and shutil.which("ncu"):
    with tempfile.TemporaryDirectory() as folder:
        bench = [sys.executable, "-P", *BENCH.split(), folder]
        # --kill ends the benchmark, with a status of its own
        subprocess.run([*NCU.split(), *SECTIONS.split(), *bench], check=False)
else:
    print("no products: there is no CUDA device, or no ncu")
model: Any = MODEL.build(device, torch.bfloat16 if cuda else torch.float32)
context = random_ids(model, 1, 64)
given: Any = {"attention_mask": torch.ones_like(context), "max_new_tokens": STEPS}
greedy = {"min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
patcher = ContextPatcher(twin(model), "stable")
calls = {
    "patched": lambda: list(patcher.generate(context, **given)),
    "plain": lambda: model.generate(context, **given, **greedy),
}
for title, call in calls.items():
    call()
    with profile() as profiler:
        call()
    order = f"self_{device.type}_time_total"
    print(f"{title}, {STEPS} tokens after 64, {MODEL.layers} layers of {MODEL.name}")
    print(profiler.key_averages().table(sort_by=order, row_limit=12))
