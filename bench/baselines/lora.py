"""PEFT's LoRA, an optional library: a layer around one weight, and a decode step."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.bench.decode_steps import Step
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.parameter_changes import parameter_changes


def has_peft() -> bool:
    """Whether the library is installed; without it the benchmarks leave out its column."""
    return find_spec("peft") is not None


def lora_layer(weight: Tensor, u: Tensor, v: Tensor) -> nn.Module:
    """PEFT's layer around this weight, with factors u (R, N) and v (R, K) in its dtype,
    unmerged.
    """
    from peft import LoraConfig
    from peft.tuners import lora

    base = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    base.weight = nn.Parameter(weight, requires_grad=False)
    config = LoraConfig(r=len(u), lora_alpha=len(u), lora_dropout=0.0)
    layer = (
        lora.Linear(base, "default", config, r=len(u), lora_alpha=len(u))
        .requires_grad_(False)
        .eval()
    )
    for name, factor in (("lora_A", v), ("lora_B", u.T.contiguous())):
        getattr(layer, name)["default"].weight = nn.Parameter(
            factor.to(weight.device, weight.dtype), requires_grad=False
        )
    return layer


def lora_step(model: PreTrainedModel, patch: ContextPatch, context_step: Step) -> Step:
    """PEFT: a context step, the patch's factors copied into LoRA layers of rank 1, a reduced step;
    computing the update is left out.

    Every row of a batch has its own adapter, and PEFT applies them in one pass
    (``adapter_names``). LoRA has no layer for a norm's scale: the new scales (B, 1, n) are copied
    into the norm.

    Args:
        model: a model of its own: PEFT's layers replace its readers and output matrices.
    """
    from peft import LoraConfig, get_peft_model

    changes = [
        (block, change)
        for block, layer in zip(patch.blocks, patch.layers, strict=True)
        for change in parameter_changes(block.spec, layer)
    ]
    names = [block.path_of(change.name) for block, change in changes if change.v is not None]
    config = LoraConfig(r=1, lora_alpha=1, lora_dropout=0.0, target_modules=names)
    adapters = [f"row{row}" for row in range(len(patch.kept_ids))]
    base: Any = model
    wrapped: Any = get_peft_model(
        base, config, adapter_name=adapters[0], autocast_adapter_dtype=False
    )
    for adapter in adapters[1:]:
        wrapped.add_adapter(adapter, config, autocast_adapter_dtype=False)
    wrapped.requires_grad_(False).eval()
    places, factors = [], []
    for block, change in changes:
        module: Any = model.get_submodule(block.path_of(change.name))
        u, v = change.u[:, 0], None if change.v is None else change.v[:, 0]  # (B, N), (B, K)
        if v is None:
            scale = (module.weight + u).to(module.weight.dtype).unsqueeze(1)
            module.weight = nn.Parameter(torch.zeros_like(scale), requires_grad=False)
            places.append(module.weight)
            factors.append(scale)
            continue
        for row, adapter in enumerate(adapters):
            places += [module.lora_A[adapter].weight, module.lora_B[adapter].weight]
            factors += [v[row].unsqueeze(0), u[row].unsqueeze(1)]
    chosen = {"adapter_names": adapters} if len(adapters) > 1 else {}

    def step() -> Tensor:
        context_step()
        torch._foreach_copy_(places, factors)
        logits: Tensor = wrapped(
            input_ids=patch.kept_ids, position_ids=patch.position_ids, use_cache=False, **chosen
        ).logits[:, -1]
        return logits

    return Step(step, cache=context_step.cache)
