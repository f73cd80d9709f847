"""Algorithm 1 of Goldwaser et al. (2025) as written: build every changed weight, block by block.

It specifies :meth:`icl_patch.ContextPatcher.compute`. It is not a practical way to compute patches:
every change is a matrix, and serves a single token.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from icl_patch.models.block_spec import Block, BlockSpec
from icl_patch.models.trace import first_tensor
from icl_patch.ops.reference import rms_normalize
from icl_patch.ops.stable_update import reference_stable_scale

Activations = dict[str, Tensor]
"""Inputs (K,) of a block's patched modules by name, of the last token, and the residual stream
before the MLP (d,) under ``""``.
"""


@torch.no_grad()
def algorithm_1(model: Any, blocks: Sequence[Block], ids: Tensor, *, stable: bool = False) -> Any:
    """A copy of the model with weights ``θ + Δθ``: on x alone it computes the same as the model
    does on ``[C, x]``.

    One run of the model on ``[C, x]`` records the target activations. In a run of the copy on x
    alone, every weight changes just before its module runs.

    Args:
        model: a causal language model.
        blocks: its blocks, of :func:`icl_patch.models.block_detection.blocks_of`: with one MLP
            without experts, and one norm behind it at most.
        ids: (1, n + 1) int64, the context and the token x, which keeps its position n.
        stable: Appendix B for the blocks that end in a norm, instead of Theorem 1.

    Source: Goldwaser et al. (2025), Algorithm 1 with the updates of Theorem 1, Appendix B.1 and
        Lemmas 6 to 9 and 12.
    """
    updated, position = copy.deepcopy(model), torch.tensor([[ids.shape[1] - 1]], device=ids.device)
    targets: list[Activations] = [{} for _ in blocks]
    current: list[Activations] = [{} for _ in blocks]

    def record(layer: int, name: str, x: Tensor) -> None:
        _record(targets[layer], name, x)

    def update(layer: int, name: str, x: Tensor) -> None:
        _record(current[layer], name, x)
        spec, target = blocks[layer].spec, targets[layer]
        module = updated.get_submodule(blocks[layer].path)
        if name in spec.readers:
            weight, difference = module.get_submodule(name).weight, target[name] - x
            u = difference @ weight if name in spec.transposed else weight @ difference
            _add_outer(module, spec, name, u, x)
        elif name == spec.down:
            delta = (target[""] - current[layer][""]) / spec.residual_multiplier
            _update_writer(module, spec, target, delta, stable)

    with _observed(model, blocks, record):
        model(input_ids=ids, use_cache=False)
    with _observed(updated, blocks, update):
        updated(input_ids=ids[:, -1:], position_ids=position, use_cache=False)
    return updated


def _record(activations: Activations, name: str, x: Tensor) -> None:
    # the residual stream is a sum of several parts in some blocks
    activations[name] = activations[name] + x if not name and name in activations else x.clone()


@contextmanager
def _observed(
    model: Any, blocks: Sequence[Block], observe: Callable[[int, str, Tensor], None]
) -> Iterator[None]:
    """Call ``observe(layer, name, x)`` with every part of the blocks' :data:`Activations`."""

    def hook(layer: int, name: str, side: str) -> Callable[..., None]:
        def called(_module: Any, args: Any, kwargs: Any, out: Any = None) -> None:
            tensor = first_tensor((*args, kwargs) if side == "input" else out)
            assert tensor is not None
            observe(layer, name, tensor.flatten(0, -2)[-1])

        return called

    with ExitStack() as hooks:
        for layer, block in enumerate(blocks):
            root = model.get_submodule(block.path)
            parts = [(f"input of {name}", name) for name in block.spec.patched]
            for place, name in (*parts, *((place, "") for place in block.spec.residual)):
                side, _, path = place.partition(" of ")
                module = root.get_submodule(path)
                kind = "forward_pre_hook" if side == "input" else "forward_hook"
                register = getattr(module, f"register_{kind}")
                hooks.callback(register(hook(layer, name, side), with_kwargs=True).remove)
        yield


def _add_outer(module: Any, spec: BlockSpec, name: str, u: Tensor, z: Tensor) -> None:
    """``W + u zᵀ / ‖z‖²``."""
    parameter, v = module.get_submodule(name).weight, z / z.square().sum()
    factors = (v, u) if name in spec.transposed else (u, v)
    parameter.data = torch.addr(parameter.data, *(x.to(parameter.dtype) for x in factors))


def _update_writer(
    module: Any, spec: BlockSpec, target: Activations, delta: Tensor, stable: bool
) -> None:
    down = module.get_submodule(spec.down)
    if spec.writer.value == "bias":
        down.bias.data = down.bias.data + delta
    elif spec.writer.value == "weight":
        _add_outer(module, spec, str(spec.down), delta, target[str(spec.down)])
    else:
        norm = module.get_submodule(spec.post_norm)
        h_down, scale = target[str(spec.post_norm)], norm.weight + spec.scale_offset
        change = delta / rms_normalize(h_down, norm.eps)
        if stable:
            found = reference_stable_scale(delta[None], scale, h_down[None], norm.eps)
            _add_outer(module, spec, str(spec.down), found.u[0], target[str(spec.down)])
            change = found.new_scale[0] - scale
        norm.weight.data = norm.weight.data + change.to(scale.dtype)
