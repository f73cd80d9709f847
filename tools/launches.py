"""Print how many operators that compute something a decode step runs: about as many as it launches
kernels on a GPU, counted on the CPU.

On CUDA our attention takes two launches in place of one, and maps of one input whose tuned
configurations differ take one each. An operator of torch counts once, though some launch several
kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, Qwen3Config

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import RandomModel, random_ids
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decoding import decode_one_token, start_decoding
from icl_patch.generation.reusable_step import use_reusable_step
from icl_patch.models.forward import cache_name

SHAPES = (
    RandomModel("Llama", LlamaConfig, 48, 72, 1, 4, 2, 12, 97),
    RandomModel("Qwen3", Qwen3Config, 48, 72, 1, 4, 2, 12, 97),
    RandomModel("Gemma 3", Gemma3TextConfig, 48, 72, 1, 4, 2, 12, 97, 64),
)
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Operators(TorchDispatchMode):
    """Counts the operators within this context that compute or write something."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        returns = function._schema.returns
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        self.count += not (view or function._schema.name.partition("::")[2] in ALLOCATIONS)
        return function(*args, **kwargs or {})


def operators(call: Callable[[], object]) -> int:
    """The number of operators in a call."""
    with torch.no_grad(), Operators() as counted:
        call()
    return counted.count


def steps(shape: RandomModel, update: str) -> dict[str, int]:
    """The operators of a step over a context of 9 tokens, by the code that runs."""
    model: Any = shape.build(torch.device("cpu"), torch.float32)
    ids = random_ids(model, 1, 9)
    given = {cache_name(model): DynamicCache(config=model.config)}
    model(ids[:, :-1], **given)
    counts = {"the model's own step": operators(lambda: model(ids[:, -1:], **given))}
    with ContextPatcher(model, update) as patcher, torch.no_grad():
        plan = patcher.plans.for_mode(DecodeMode.SHARED_CACHE)
        mask = torch.ones_like(ids).bool()
        state = start_decoding(patcher.attached_model, plan, ids, mask, 16, reserve=False)
        use_reusable_step(patcher.plans, state, compiled=False)
        for token in (5, 6):
            decode_one_token(state, ids.new_full((1,), token))
        run: Any = state.run
        counts[f"`{update}`, the model's own code"] = operators(run.own_code)
        counts[f"`{update}`, its program"] = operators(run._run_program)
    return counts


def main() -> None:
    """The table."""
    print("| model | step | a layer | the rest |\n| --- | --- | --- | --- |")
    for shape in SHAPES:
        for update in ("exact", "stable"):
            one, two = (steps(replace(shape, layers=n), update) for n in (1, 2))
            for name, count in one.items():
                if update == "exact" or update in name:
                    of = two[name] - count
                    print(f"| {shape.name} | {name} | {of} | {count - of} |", flush=True)


if __name__ == "__main__":
    main()
