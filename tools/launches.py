"""Print how many kernels a decode step launches on CUDA, counted without a GPU: the operators that
compute something on a pretended device, and the launches of our kernels in Triton's interpreter.

A row is what a layer adds, and what the rest of the step takes. An operator of torch counts as one
launch, though some take several.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"ICL_PATCH_OPS": "triton", "TRITON_INTERPRET": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from support import pretend_cuda
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, Qwen3Config

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import RandomModel, random_ids
from icl_patch.generation.compiled_step import use_compiled_step
from icl_patch.generation.decode_step import decode_one_token, prefill
from icl_patch.generation.one_pass import DecodeMode
from icl_patch.generation.recorded_step import RecordedStep
from icl_patch.kernels.runtime import launching
from icl_patch.kernels.runtime.launching import Launch
from icl_patch.models.forward import cache_name

SHAPES = (
    RandomModel("Llama", LlamaConfig, 48, 72, 2, 4, 2, 12, 97),
    RandomModel("Qwen3", Qwen3Config, 48, 72, 2, 4, 2, 12, 97),
)
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
CUDA = torch.device("cuda", 0)


class Launches(TorchDispatchMode):
    """Counts what is launched within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        launch = Launch.__call__

        def counted(of: Launch, *inputs: Any) -> Any:
            self.count += 1
            return launch(of, *inputs)

        self._own, self._counted = launch, counted

    def __enter__(self) -> Any:
        Launch.__call__ = self._counted  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        Launch.__call__ = self._own  # type: ignore[method-assign]
        return super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        returns = function._schema.returns
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        ours = function.namespace == "icl_patch"
        if not (view or ours or function._schema.name.partition("::")[2] in ALLOCATIONS):
            self.count += 1
        return function(*args, **kwargs or {})


def launches(call: Callable[[], object]) -> int:
    """Of a call."""
    with torch.no_grad(), Launches() as counted:
        call()
    return counted.count


def steps(shape: RandomModel, update: str) -> dict[str, int]:
    """Of a step over a context of 9 tokens, by what it runs."""
    model: Any = shape.build(CUDA, torch.float32)
    ids = random_ids(model, 1, 9)
    cache = DynamicCache(config=model.config)
    given = {cache_name(model): cache}
    model(ids[:, :-1], **given)
    counts = {"the model's own step": launches(lambda: model(ids[:, -1:], **given))}
    with ContextPatcher(model, update) as patcher, torch.no_grad():
        plan = patcher.plans.of(DecodeMode.SHARED_CACHE)
        state = prefill(
            patcher.attached_model, plan, ids, torch.ones_like(ids).bool(), 16, reserve=False
        )
        use_compiled_step(patcher.plans, state, traced=False)
        run: Any = state.run
        assert isinstance(run, RecordedStep)
        for token in (5, 6):
            decode_one_token(state, ids.new_full((1,), token))
        counts["as the model's own code runs"] = launches(run._step)
        counts["as a program"] = launches(run._run_program)
    return counts


def allocated(memory: launching.Memory | None, device: torch.device) -> Any:
    """An output of a kernel, below the operators that the pretended device sees."""
    if memory is None:
        return None
    size, dtype = memory
    empty = torch.empty(size, dtype=dtype, device="cpu")
    empty.untyped_storage().claim = pretend_cuda.name_of(device)  # type: ignore[attr-defined]
    return empty


def main() -> None:
    """The table."""
    pretend_cuda.pytest_configure()
    launching._allocated = allocated
    print("| model | step | launches a layer | beside them |\n| --- | --- | --- | --- |")
    for shape in SHAPES:
        for update in ("exact", "stable"):
            few, many = (steps(replace(shape, layers=n), update) for n in (2, 3))
            for name, count in few.items():
                of = many[name] - count
                label = name if name.startswith("the model") else f"`{update}`, {name}"
                if update == "exact" or label != name:
                    print(f"| {shape.name} | {label} | {of} | {count - 2 * of} |", flush=True)


if __name__ == "__main__":
    main()
