"""Other ways to the same result, which the benchmarks compare with: a model's own decode step, one
with every weight built, as in Algorithm 1 of Goldwaser et al. (2025), and PEFT's LoRA.

A decode step runs the last token of ``ids`` (B, C) on top of a cache of the tokens before it and
returns the next logits (B, V). It restores the cache, so that it can be repeated.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, PreTrainedModel, StaticCache

from icl_patch.models.forward import cache_name
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.parameter_changes import parameter_changes

Step = Callable[[], Tensor]


def repeatable(run: Step, rewind: Callable[[], object]) -> Step:
    """A step: ``run`` computes the logits, ``rewind`` restores the cache."""

    def step() -> Tensor:
        logits = run()
        rewind()
        return logits

    return step


# The model's own step


def plain_step(model: PreTrainedModel, ids: Tensor) -> Step:
    """The model's own step, as ``model.generate`` takes it."""
    run: Any = model
    cache, token = DynamicCache(config=model.config), ids[:, -1:].clone()
    given = {cache_name(model): cache, "logits_to_keep": 1}
    run(ids[:, :-1], **given)
    cache.activate_past_recording()  # so that it can be cropped by a token
    return repeatable(
        lambda: run(token, **given).logits[:, -1],
        lambda: cache.crop(-1),
    )


def compiled_step(model: PreTrainedModel, ids: Tensor) -> Step:
    """The model's own step over a static cache, with its mask and positions: through
    ``torch.compile`` without a graph break, and on a GPU as a CUDA graph.

    A layer with a full window moves it by a token at every step, which does not change the work; at
    the end it is moved back to the start.
    """
    model_run: Any = model
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    given = {cache_name(model): cache, "logits_to_keep": 1}
    model_run(ids[:, :-1], **given)
    layers: list[Any] = cache.layers
    windows = [layer for layer in layers if layer.is_sliding]
    full = [layer for layer in windows if layer.cumulative_length_int >= layer.max_cache_len]
    lengths = [layer.cumulative_length for layer in layers if layer not in full]
    saved = [(x, x.clone()) for layer in full for x in (layer.keys, layer.values)]
    token, position = ids[:, -1:].clone(), torch.full_like(ids[:, -1:], ids.shape[1] - 1)

    def rewind() -> None:
        if lengths:
            torch._foreach_sub_(lengths, 1)  # one launch for all layers
        for layer in windows:
            layer.cumulative_length_int -= 1

    def run() -> Tensor:
        logits: Tensor = model_run(token, position_ids=position, **given).logits[:, -1]
        return logits

    step = repeatable(torch.compile(run, fullgraph=True, dynamic=False), rewind)
    step()
    if ids.is_cuda:
        step = _graph(step)
    for keys_or_values, held in saved:
        keys_or_values.copy_(held)
    return step


def _graph(step: Step) -> Step:
    """Replay the step, its rewinding included, as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay(_read_by_the_graph: Step = step) -> Tensor:  # its tensors must stay
        graph.replay()
        return logits

    return replay


# Every weight built


def materialised(model: nn.Module, patch: ContextPatch) -> dict[str, Tensor]:
    """Every changed parameter, ``W + u vᵀ``, ``b + Δb`` or ``m + Δm``, of the first row's token."""
    return {
        name: (parameter := model.get_parameter(name)) + change.to(parameter.dtype)
        for name, change in patch.weight_changes(0, 0)
    }


def bare_step(
    model: PreTrainedModel, patch: ContextPatch, changed: dict[str, Tensor] | None = None
) -> Tensor:
    """The kept tokens alone, without context or cache, with changed parameters: (B, V)."""
    inputs = {"position_ids": patch.position_ids, "use_cache": False}
    output = functional_call(model, changed or {}, (patch.kept_ids,), inputs)
    logits: Tensor = output.logits[:, -1]
    return logits


def naive_step(model: PreTrainedModel, patch: ContextPatch, context_step: Step) -> Step:
    """A context step, every matrix built row by row, a reduced step; the update is not computed."""

    def run() -> Tensor:
        context_step()
        rows = []
        for row in range(len(patch.kept_ids)):
            alone = patch.select(rows=slice(row, row + 1))
            rows.append(bare_step(model, alone, materialised(model, alone)))
        return torch.cat(rows)

    return run


# PEFT, an optional library


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
    layer = lora.Linear(base, "default", config, r=len(u), lora_alpha=len(u)).eval()
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

    def run() -> Tensor:
        context_step()
        torch._foreach_copy_(places, factors)
        logits: Tensor = wrapped(
            input_ids=patch.kept_ids, position_ids=patch.position_ids, use_cache=False, **chosen
        ).logits[:, -1]
        return logits

    return run
