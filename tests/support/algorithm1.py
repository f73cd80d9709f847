"""Algorithm 1 of Goldwaser et al. (2025) as written: build every changed weight, block by block.

It specifies :meth:`icl_patch.ContextPatcher.compute`. It is not a practical way to compute patches:
every change is a matrix, and serves a single token.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from icl_patch.models.block_spec import Block, BlockSpec
from icl_patch.ops.reference import rms_normalize, stable_scale

Activations = dict[str, Tensor]
"""Inputs (T, K) of a block's patched modules by name, and the residual stream before the MLP (T, d)
under ``""``."""


@torch.no_grad()
def algorithm_1(model: Any, blocks: Sequence[Block], ids: Tensor, *, stable: bool = False) -> Any:
    """A copy of the model with weights ``θ + Δθ``: on x alone it computes the same as the model
    does on ``[C, x]``.

    One run of the model on ``[C, x]`` records the target activations. In a run of the copy on x
    alone, every weight changes just before its module runs.

    Args:
        model: a causal language model.
        blocks: its blocks, of :func:`icl_patch.models.block_detection.blocks_of`, without experts.
        ids: (1, n + 1) int64, the context and the token x, which keeps its position n.
        stable: Appendix B for the blocks that end in a norm, instead of Theorem 1.

    Raises:
        ValueError: a block has experts, is a mixer, or has a norm inside its norm.

    Source: Goldwaser et al. (2025), Algorithm 1 with the updates of Theorem 1, Appendix B.1 and
        Lemmas 6 to 9 and 12.
    """
    updated, position = copy.deepcopy(model), torch.tensor([[ids.shape[1] - 1]], device=ids.device)
    with recorded(model, blocks) as targets:
        model(input_ids=ids, use_cache=False)
    with updating(updated, blocks, targets, -1, stable=stable):
        updated(input_ids=ids[:, -1:], position_ids=position, use_cache=False)
    return updated


@contextmanager
def recorded(model: Any, blocks: Sequence[Block]) -> Iterator[list[Activations]]:
    """Record the activations of every block while the model runs once."""
    activations: list[Activations] = [{} for _ in blocks]
    with _observed(model, blocks, functools.partial(_record, activations)):
        yield activations


@contextmanager
def updating(
    model: Any,
    blocks: Sequence[Block],
    targets: Sequence[Activations],
    token: int,
    *,
    stable: bool = False,
) -> Iterator[None]:
    """Within this context a run of one token replaces every weight by ``θ + Δθ`` before its use.

    Args:
        targets: the activations with the context, from :func:`recorded`.
        token: the token's row in the targets.

    Raises:
        ValueError: as :func:`algorithm_1`.
    """
    for block in blocks:
        if block.spec.experts is not None or block.spec.mixer or block.spec.inner_norm is not None:
            raise ValueError(
                f"expected a block with one MLP and one norm behind it at most, got {block.path}"
                " with others"
            )
    current: list[Activations] = [{} for _ in blocks]

    def update(layer: int, name: str, x: Tensor) -> None:
        _record(current, layer, name, x)
        spec, module = blocks[layer].spec, model.get_submodule(blocks[layer].path)
        target = {key: value[token] for key, value in targets[layer].items()}
        if name in spec.readers:
            weight, difference = module.get_submodule(name).weight, target[name] - x[0]
            u = difference @ weight if name in spec.transposed else weight @ difference
            _add_outer(module, spec, name, u, x[0])
        elif name == spec.down:
            delta = (target[""] - current[layer][""][0]) / spec.residual_multiplier
            _update_writer(module, spec, target, delta, stable)

    with _observed(model, blocks, update):
        yield


def _record(activations: list[Activations], layer: int, name: str, x: Tensor) -> None:
    block = activations[layer]
    # the residual stream is a sum of several parts in some blocks
    block[name] = block[name] + x if name == "" and name in block else x.clone()


@contextmanager
def _observed(
    model: Any, blocks: Sequence[Block], observe: Callable[[int, str, Tensor], None]
) -> Iterator[None]:
    """Call ``observe(layer, name, x)`` with every part of the blocks' :data:`Activations`."""
    with ExitStack() as hooks:
        for layer, block in enumerate(blocks):
            root = model.get_submodule(block.path)
            parts = [(f"input of {name}", name) for name in block.spec.patched]
            for place, name in (*parts, *((place, "") for place in block.spec.residual)):
                side, _, path = place.partition(" of ")
                module = root.get_submodule(path)
                call = functools.partial(observe, layer, name)
                if side == "input":
                    hook = module.register_forward_pre_hook(
                        lambda _module, args, kwargs, call=call: call(_rows(args or kwargs)),
                        with_kwargs=True,
                    )
                else:
                    hook = module.register_forward_hook(
                        lambda _module, _args, output, call=call: call(_rows(output))
                    )
                hooks.callback(hook.remove)
        yield


def _rows(value: Any) -> Tensor:
    """The first tensor of a module's inputs or outputs, (T, K)."""
    while not isinstance(value, Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value.flatten(0, -2)


def _add_outer(module: Any, spec: BlockSpec, name: str, u: Tensor, z: Tensor) -> None:
    """``W + u zᵀ / ‖z‖²``."""
    parameter, v = module.get_submodule(name).weight, z / z.square().sum()
    factors = (v, u) if name in spec.transposed else (u, v)
    parameter.data = torch.addr(parameter.data, *(x.to(parameter.dtype) for x in factors))


def _update_writer(
    module: Any, spec: BlockSpec, target: Activations, delta: Tensor, stable: bool
) -> None:
    assert spec.down is not None
    down = module.get_submodule(spec.down)
    if spec.writer.value == "bias":
        down.bias.data = down.bias.data + delta
    elif spec.writer.value == "weight":
        _add_outer(module, spec, spec.down, delta, target[spec.down])
    else:
        assert spec.post_norm is not None
        norm = module.get_submodule(spec.post_norm)
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        h_down, scale = target[spec.post_norm], norm.weight + spec.scale_offset
        if stable:
            update = stable_scale(delta[None], scale, h_down[None], eps)
            _add_outer(module, spec, spec.down, update.u[0], target[spec.down])
            change = update.new_scale[0] - scale
        else:
            change = delta / rms_normalize(h_down, eps)
        norm.weight.data = norm.weight.data + change.to(scale.dtype)
