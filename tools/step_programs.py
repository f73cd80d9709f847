"""Run the decode steps of every model type as programs, and compare all bits with the model's own
code.

    build/python tools/step_programs.py                 # all types and variants
    build/python tools/step_programs.py llama gemma2    # these types, again

Every type runs in a process of its own: one row in fp32 and fp16, three padded rows in bf16, exact
and stable. The results are written to ``docs/data/step-programs.jsonl`` as soon as they are known,
and a second call goes on with the types that are missing. ``tools/sweep.py`` puts them into the
page of model classes.
"""

import argparse
import json
import warnings
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves

from icl_patch import ContextPatcher
from icl_patch.errors import SlowerStepsWarning, UnsupportedModelError
from icl_patch.generation.decode_step import StepOutput
from icl_patch.generation.decoding import start_decoding
from icl_patch.generation.recorded_step import RecordedStep, same_bits
from icl_patch.generation.reusable_step import use_program
from icl_patch.models.trial_tokens import trial_tokens
from tools.model_types import build, jobs
from tools.sweep import PROGRAMS, apart, read

UPDATES, RUNS = ("exact", "stable"), (("float32", 1), ("bfloat16", 3), ("float16", 1))
CONTEXT, STEPS, CAPACITY = 7, 5, 24  # tokens; more than these would not fit into small windows


def leaves(output: StepOutput) -> list[Any]:
    """All that a step gives."""
    return tree_leaves((output.logits, output.maybe_infeasible, output.details()))


def result(patcher: ContextPatcher, rows: int) -> str:
    """``"program"``; or the reason why steps run in another way, or that their bits differ."""
    attached, plan = patcher.attached_model, patcher.plans.choose()
    if plan is None:
        return "two passes"
    padding = 2 if attached.takes_padding and rows > 1 else 0
    starts = [0] + [padding] * (rows - 1)
    ids = trial_tokens(attached.model, CONTEXT + STEPS, rows, None, starts=starts)
    mask = torch.ones_like(ids[:, :CONTEXT], dtype=torch.bool)
    mask[1:, :padding] = False
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", SlowerStepsWarning)
        state = start_decoding(attached, plan, ids[:, :CONTEXT], mask, CAPACITY, reserve=False)
        use_program(patcher.plans, state)
        for column in range(CONTEXT - 1, CONTEXT - 1 + STEPS):
            state.advance(ids[:, column])
            assert state.run is not None
            found = leaves(state.run())
            run = state.run  # the first step has compared two caches
            if not isinstance(run, RecordedStep):
                break
            # the model's own code, on the same cache: it writes the same column again
            for expected, got in zip(leaves(run.own_code()), found, strict=True):
                if isinstance(expected, Tensor) and not same_bits(expected, got):
                    return f"other bits in step {state.steps}"
    if reasons := [str(x.message) for x in caught if issubclass(x.category, SlowerStepsWarning)]:
        return reasons[0]
    program = isinstance(run, RecordedStep) and run.program is not None
    return "program" if program else "no program, without a warning"


def lines_of(key: dict[str, str], changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a type, by update."""
    lines = []
    for update in UPDATES:
        runs: dict[str, str] = {}
        for dtype, rows in RUNS:
            name = f"{dtype}, {rows} row{'s' * (rows > 1)}"
            try:
                model: Any = build(key["type"], changes).to(getattr(torch, dtype))
                with ContextPatcher(model, update) as patcher:
                    runs[name] = result(patcher, rows)
            except UnsupportedModelError as error:
                runs[name] = f"refused: {error}"[:200]
            except Exception as error:  # of a class of transformers, or a fault of ours
                runs[name] = f"{type(error).__name__}: {error}"[:200]
        lines.append(
            key | {"transformers": transformers.__version__, "update": update, "runs": runs}
        )
    return lines


def main() -> None:
    """Run the types that have no results yet, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="these types alone, again")
    options = parser.parse_args()
    lines = read(PROGRAMS)
    lines = [line for line in lines if line["type"] not in options.types]
    done = {(line["type"], line["variant"]) for line in lines}
    for key, changes in jobs():
        chosen = not options.types or key["type"] in options.types
        if chosen and (key["type"], key["variant"]) not in done:
            own = apart(partial(lines_of, key, changes))
            lines += own or [key | {"update": x, "runs": {"all": "not finished"}} for x in UPDATES]
            PROGRAMS.write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(*key.values(), *(sorted({*x["runs"].values()}) for x in lines[-2:]), flush=True)


if __name__ == "__main__":
    main()
