"""Algorithm 1 of Goldwaser et al. (2025), written out: block by block, with every matrix built.

Begin here to see what a patch does. The formulas are in :mod:`icl_patch.recording.block_math`.
:meth:`icl_patch.ContextPatcher.compute` finds the same changes as vectors, and for many tokens at
once; as a matrix, a change serves a single token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.layers.linear import matrix_of
from icl_patch.layers.patched_module import untouched
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.models.block_spec import Block, Writer
from icl_patch.models.model_checks import check_eval
from icl_patch.models.trace import first_tensor
from icl_patch.recording import block_math

Run = Callable[[Any], Any]
Activations = dict[str, Tensor]
"""One block's, for one token, (1, K), by place: ``"input of PATH"`` or ``"output of PATH"``."""


@contextmanager
def algorithm_1(
    model: Any, blocks: Sequence[Block], with_context: Run, alone: Run, update: str = "direct"
) -> Iterator[Any]:
    """Within this context the model has the weights ``θ + Δθ``, with which a token alone gets the
    output that it has with its context.

    ``with_context(model)`` runs the unmodified model. Its activations are the targets. Then
    ``alone(model)`` runs the token without the context. In this run each weight is changed, and
    rounded to its dtype, just before its module runs: a block's update sees the rounded blocks
    before it. At the end the model has its own weights again, bit for bit. For example::

        position = torch.tensor([[ids.shape[1] - 1]])  # ids (1, n + 1) int64, context and token
        with algorithm_1(
            model,
            blocks_of(model),
            lambda model: model(ids, use_cache=False),
            lambda model: model(ids[:, -1:], position_ids=position, use_cache=False),
        ) as output:
            output.logits  # (1, 1, V), of the changed weights, which the model has in this block

    Args:
        model: a causal language model that is not attached to a patcher, with weights in memory.
        blocks: of :func:`icl_patch.models.block_detection.blocks_of`.
        with_context: a run of one row that ends in the token; a cache may hold earlier tokens.
        alone: a run of the token alone; a cache may hold the part of the context that stays.
        update: of blocks that end in a norm, ``"direct"`` (Theorem 1) or ``"stable"`` (Appendix
            B). Others have one update.

    Yields:
        What ``alone(model)`` returned.

    Raises:
        ValueError: the update is another, the model is training, or a run has other than one row or
            token.
        UnsupportedModelError: a block has experts, no MLP, or a norm that reads a sum; a matrix is
            not an ``nn.Linear`` or Conv1D with a plain weight, or a class derived from them
            computes something else; a module that changes has hooks; or two places share a
            parameter that changes.
        ControllabilityError: no change of a weight, in its dtype, can have the context's effect.

    Source: Goldwaser et al. (2025), Algorithm 1 with Theorem 1, Appendix B.1 and Lemmas 6 to 10
        and 12.
    """
    if update not in ("direct", "stable"):
        raise ValueError(f"expected update 'direct' or 'stable', got {update!r}")
    check_eval(model.modules())
    for block in blocks:
        _check(model, block)
    own: dict[nn.Parameter, tuple[str, Tensor]] = {}
    merges = [_Merge(model.get_submodule(block.path), block, update, own) for block in blocks]
    try:
        with torch.no_grad():
            with _observed(merges, _Merge.record):
                with_context(model)
            with _observed(merges, _Merge.change):
                output = alone(model)
        yield output
    finally:
        for parameter, (_, data) in own.items():
            parameter.data = data


@dataclass(eq=False)
class _Merge:
    """The changes of one block's weights.

    Attributes:
        module, block: the block.
        update: of a scale writer.
        own: the path and own data of every parameter that has been changed, of all blocks.
        target, current: the block's activations with the context, and alone.
        new_scale: m' of the stable update, (1, d).
    """

    module: nn.Module
    block: Block
    update: str
    own: dict[nn.Parameter, tuple[str, Tensor]]
    target: Activations = field(default_factory=dict)
    current: Activations = field(default_factory=dict)
    new_scale: Tensor | None = None

    @property
    def places(self) -> list[str]:
        """The places of the residual stream, and of the inputs of the modules that change."""
        spec = self.block.spec
        return list(dict.fromkeys((*spec.residual, *(f"input of {x}" for x in spec.patched))))

    @property
    def norm(self) -> PatchedRMSNorm:
        """The norm that a scale writer ends in."""
        spec = self.block.spec
        module = self.module.get_submodule(str(spec.post_norm))
        offset, cast_first = spec.scale_offset, spec.cast_first
        return PatchedRMSNorm(module, scale_offset=offset, cast_first=cast_first, tried=True)

    def record(self, place: str, x: Tensor) -> None:
        """Keep the target at a place: the last token of x (T, K)."""
        self.target[place] = x[-1:].clone()

    def change(self, place: str, x: Tensor) -> None:
        """Change the weights of the module that reads x (1, K) now, if any."""
        if len(x) != 1:
            raise ValueError(f"expected one token in the run alone, got {len(x)}")
        self.current[place] = x.clone()  # some models add to the tensor itself
        spec, name = self.block.spec, place.removeprefix("input of ")
        if name in spec.readers:
            y_ctx, y = (_wide(z) @ self.matrix(name).T for z in (self.target[place], x))
            self.add_rank_one(name, block_math.reader_update(y_ctx, y), x)
        elif name == spec.down and spec.writer is Writer.BIAS:
            bias = _wide(self.module.get_parameter(f"{name}.bias"))
            self.set(f"{name}.bias", bias + block_math.bias_update(self.writer_target())[0])
        elif name == spec.down and spec.writer is Writer.WEIGHT:
            self.add_rank_one(name, self.writer_target(), x)
        elif name == spec.down and self.update == "stable":
            self.add_rank_one(name, self.stable_change(name, x), x)
        elif name == spec.post_norm:
            self.change_scale(x)

    def stable_change(self, name: str, h: Tensor) -> Tensor:
        """The change (1, d) of W_down's output; its norm's m' is kept."""
        down: Any = self.module.get_submodule(name)
        hidden_down = _wide(h) @ self.matrix(name).T
        if down.bias is not None:
            hidden_down = hidden_down + _wide(down.bias)
        scale, eps = self.norm.scale, self.norm.eps
        stable = block_math.stable_scale(self.writer_target(), scale, hidden_down, eps)
        self.new_scale = stable.new_scale
        return stable.u

    def change_scale(self, x: Tensor) -> None:
        """Change the scale of the norm that reads x (1, d)."""
        norm, new_scale = self.norm, self.new_scale
        if new_scale is None:
            normalized = norm.normalize(x)
            new_scale = block_math.direct_scale(self.writer_target(), normalized, norm.scale)
        weight = norm.base_layer.get_parameter("weight").double()
        change = (new_scale.double() - norm.scale.double())[0]
        self.set(f"{self.block.spec.post_norm}.weight", weight + change)

    def writer_target(self) -> Tensor:
        """The change of the writer's output, (1, d)."""
        spec = self.block.spec
        if not self.current.keys() >= {*spec.residual}:
            raise UnsupportedModelError(
                f"{self.block.path}: its MLP ends before its residual stream is known"
            )
        hidden_ctx, hidden = (
            reduce(torch.add, [_wide(activations[place]) for place in spec.residual])
            for activations in (self.target, self.current)
        )
        delta, name = block_math.context_change(hidden_ctx, hidden), spec.residual_weight
        weight = None if name is None else self.module.get_parameter(name)
        factor, multiplier = spec.residual_factor, spec.residual_multiplier
        return block_math.writer_target(delta, factor, multiplier, weight)

    def matrix(self, name: str) -> Tensor:
        """The matrix (N, K) of a linear module."""
        module = self.module.get_submodule(name)
        weight = _wide(module.get_parameter("weight"))
        return weight.T if isinstance(module, Conv1D) else weight

    def add_rank_one(self, name: str, delta: Tensor, x: Tensor) -> None:
        """``W + u vᵀ``, which changes the module's output for x (1, K) by ``delta`` (1, N)."""
        u, (v, inverse, _) = block_math.weight_update(delta, x)
        if inverse.item() == 0 and delta.any():
            raise ControllabilityError(
                f"{self.block.path}: the input of {name} is 0, and no change of its weight can have"
                " the context's effect"
            )
        module, changed = self.module.get_submodule(name), self.matrix(name) + u.T @ v
        self.set(f"{name}.weight", changed.T if isinstance(module, Conv1D) else changed)

    def set(self, name: str, value: Tensor) -> None:
        """Change a parameter to this value, rounded to its dtype."""
        parameter, path = self.module.get_parameter(name), self.block.path_of(name)
        before, _ = self.own.setdefault(parameter, (path, parameter.data))
        if before != path:  # each of its two changes would be made at both places
            raise UnsupportedModelError(
                f"expected a parameter at one place to change it, got one at {before} and {path}:"
                " give each module its own copy"
            )
        rounded = value.to(parameter.dtype)
        if not torch.stack(rounded.aminmax()).isfinite().all():
            raise ControllabilityError(
                f"{self.block.path}: a parameter {tuple(value.shape)} would have to be infinite in"
                f" {parameter.dtype} to have the context's effect"
            )
        parameter.data = rounded.contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(model: nn.Module, block: Block) -> None:
    """Raises UnsupportedModelError for a block that Algorithm 1 does not change here."""
    spec = block.spec
    kinds = ("experts", spec.experts), ("no MLP", spec.mixer), ("a norm of a sum", spec.addend)
    for kind, found in kinds:
        if found:
            raise UnsupportedModelError(
                f"expected blocks of one MLP for Algorithm 1, got {block.path} with {kind}:"
                " ContextPatcher computes its patch"
            )
    for path in (block.path_of(str(name)) for name in (*spec.readers, spec.down)):
        module = model.get_submodule(path)
        try:
            if not matrix_of(module).is_meta:
                continue
            reason = "has its weight on the device meta"
        except TypeError as error:
            reason = str(error)
        raise UnsupportedModelError(
            "expected nn.Linear or Conv1D with a plain weight in memory for Algorithm 1, got"
            f" {path}, {type(module).__name__}: detach the patcher, and load the model without"
            f" quantisation or offloading ({reason})"
        )
    for path in (block.path_of(name) for name in spec.patched):
        if not untouched(model.get_submodule(path)):
            raise UnsupportedModelError(
                f"expected {path} without hooks and with its own forward for Algorithm 1, got hooks"
                " or another forward: remove them first"
            )


@contextmanager
def _observed(
    merges: Sequence[_Merge], observe: Callable[[_Merge, str, Tensor], None]
) -> Iterator[None]:
    """Within this context ``observe`` gets the rows (T, K) at every place of every block."""

    def called(
        merge: _Merge, place: str, _module: Any, args: Any, kwargs: Any, out: Any = None
    ) -> None:
        x = first_tensor((*args, kwargs) if place.startswith("input") else out)
        assert x is not None
        if x.shape[:-2].numel() != 1:
            raise ValueError(f"expected runs of one row, got {x.shape[:-2].numel()}")
        observe(merge, place, x.flatten(0, -2))

    with ExitStack() as hooks:
        for merge in merges:
            for place in merge.places:
                side, _, path = place.partition(" of ")
                module = merge.module.get_submodule(path)
                kind = "forward_pre_hook" if side == "input" else "forward_hook"
                register = getattr(module, f"register_{kind}")
                hook = partial(called, merge, place)
                hooks.callback(register(hook, with_kwargs=True).remove)
        yield
