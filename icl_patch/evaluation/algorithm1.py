"""Algorithm 1 of Goldwaser et al. (2025) as written: build every changed weight, block by block."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from icl_patch.models.block_spec import Block
from icl_patch.ops.reference import rms_normalize, stable_scale


@torch.no_grad()
def algorithm_1(model: Any, blocks: Sequence[Block], ids: Tensor, *, stable: bool = False) -> Any:
    """A copy of the model with weights ``θ + Δθ``: on x alone it computes what the model computes
    on ``[C, x]``.

    One run of the model on ``[C, x]`` records the target activations. Then, block by block, the
    copy runs on x alone up to the block, and the block is updated. This takes a pass for every
    block and a matrix for every change: it specifies :meth:`icl_patch.ContextPatcher.compute` and
    is not a way to compute patches.

    Args:
        model: a causal language model.
        blocks: its blocks, from :func:`icl_patch.models.detect.blocks_of`, without experts.
        ids: (1, n + 1) int64, the context and the token x, which keeps its position n.
        stable: Appendix B for the blocks that end in a norm, instead of Theorem 1.

    Raises:
        ValueError: a block has experts, is a mixer, or has a norm inside its norm.

    Source: Goldwaser et al. (2025), Algorithm 1 with the updates of Theorem 1, Appendix B.1 and
        Lemmas 6 to 9 and 12.
    """
    updated, position = copy.deepcopy(model), torch.tensor([[ids.shape[1] - 1]], device=ids.device)
    targets = _activations(model, blocks, input_ids=ids)
    for layer, block in enumerate(blocks):
        if block.spec.experts is not None or block.spec.mixer or block.spec.inner_norm is not None:
            raise ValueError(
                f"expected a block with one MLP and one norm behind it at most, got {block.path}"
                " with others"
            )
        current = _activations(updated, blocks, input_ids=ids[:, -1:], position_ids=position)
        module = updated.get_submodule(block.path)
        _update_block(module, block, targets[layer], current[layer], stable)
    return updated


def _activations(model: Any, blocks: Sequence[Block], **inputs: Tensor) -> list[dict[str, Tensor]]:
    """For every block, at the last token: the inputs of its patched modules by name, and the
    residual stream before the MLP under ``""``.
    """
    recorded: list[dict[str, Tensor]] = [{} for _ in blocks]

    def record(activations: dict[str, Tensor], name: str, value: Any) -> None:
        while not isinstance(value, Tensor):
            value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        last = value.reshape(-1, value.shape[-1])[-1].clone()
        is_sum = name == "" and name in activations  # the residual is a sum of module outputs
        activations[name] = activations[name] + last if is_sum else last

    with ExitStack() as hooks:
        for block, activations in zip(blocks, recorded, strict=True):
            module = model.get_submodule(block.path)
            for name in block.spec.patched:
                before = module.get_submodule(name).register_forward_pre_hook(
                    lambda _m, args, a=activations, n=name: record(a, n, args)
                )
                hooks.callback(before.remove)
            for side, _, path in (part.partition(" of ") for part in block.spec.residual):
                part = module.get_submodule(path)
                if side == "input":
                    hook = part.register_forward_pre_hook(
                        lambda _m, args, kw, a=activations: record(a, "", args or kw),
                        with_kwargs=True,
                    )
                else:
                    hook = part.register_forward_hook(
                        lambda _m, _args, out, a=activations: record(a, "", out)
                    )
                hooks.callback(hook.remove)
        model(**inputs, use_cache=False)
    return recorded


def _update_block(
    module: Any, block: Block, target: dict[str, Tensor], current: dict[str, Tensor], stable: bool
) -> None:
    """ComputeSingleBlockUpdate, and ``θ' = θ + Δθ`` in place."""
    spec = block.spec

    def add(name: str, u: Tensor, z: Tensor) -> None:
        change = torch.outer(u, z) / z.square().sum()  # u zᵀ / ‖z‖²
        parameter = module.get_submodule(name).weight
        parameter.data += (change.mT if name in spec.transposed else change).to(parameter.dtype)

    for name in spec.readers:
        weight = module.get_submodule(name).weight
        z_ctx, z = target[name], current[name]
        difference = z_ctx - z
        add(name, difference @ weight if name in spec.transposed else weight @ difference, z)
    delta = (target[""] - current[""]) / spec.residual_multiplier
    assert spec.down is not None
    h, down = target[spec.down], module.get_submodule(spec.down)
    if spec.writer.value == "bias":
        down.bias.data += delta
    elif spec.writer.value == "weight":
        add(spec.down, delta, h)
    else:
        assert spec.post_norm is not None
        norm = module.get_submodule(spec.post_norm)
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        h_down, scale = target[spec.post_norm], norm.weight + spec.scale_offset
        if stable:
            update = stable_scale(delta[None], scale, h_down[None], eps)
            add(spec.down, update.u[0], h)
            norm.weight.data += (update.new_scale[0] - scale).to(scale.dtype)
        else:
            norm.weight.data += delta / rms_normalize(h_down, eps)
