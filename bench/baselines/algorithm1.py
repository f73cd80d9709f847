"""Algorithm 1 of Goldwaser et al. (2025) with every ``W + ΔW`` built, to compare lazy patches with.

It takes one sequence and one token at a time, since a changed weight serves one token only. It
supports sequential blocks that end in ``W h`` (Lemma 9) or ``m ⊙ Norm(W h)`` (Lemma 10, the direct
update).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, PreTrainedModel

from icl_patch import ContextPatch
from icl_patch.models.block_spec import Block, Writer
from icl_patch.models.detect import blocks_of
from icl_patch.patch.parameter_changes import parameter_changes

Activations = dict[str, Tensor]  # inputs of modules by path: (T, width)


class Algorithm1:
    """Computes and applies patches of one sequence by building the changed weights.

    Args:
        model: a causal language model that no patcher is attached to.

    Raises:
        ValueError: a block is of another form.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.blocks = model, blocks_of(model)
        for block in self.blocks:
            spec = block.spec
            simple = (
                spec.writer in (Writer.WEIGHT, Writer.SCALE)
                and spec.reads
                and spec.experts is None
                and spec.inner_norm is None
            )
            if not simple or spec.parallel or not spec.residual[0].startswith("input of "):
                raise ValueError(
                    f"expected sequential blocks that end in W h or m ⊙ Norm(W h), {block.path} is"
                    " another"
                )

    @torch.no_grad()
    def compute(self, context_ids: Tensor, kept_ids: Tensor) -> Tensor:
        """The logits (1, T, V) of kept_ids (1, T) without context_ids (1, C), every weight changed
        for every token.
        """
        width = context_ids.shape[1]
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=context_ids, past_key_values=cache, logits_to_keep=1)
        with self._recording() as activations:
            self.model(input_ids=kept_ids, past_key_values=cache, logits_to_keep=1)
        return self._by_token(
            kept_ids,
            width,
            lambda token: self._patching({path: x[token] for path, x in activations.items()}),
        )

    @torch.no_grad()
    def apply(self, patch: ContextPatch) -> Tensor:
        """The logits (1, T, V) of the first row of a recorded patch without a prefix."""

        def changed(token: int) -> dict[str, Tensor]:
            found = {}
            for block, layer in zip(self.blocks, patch.layers, strict=True):
                for change in parameter_changes(block.spec, layer):
                    name = f"{block.path}.{change.name}.{change.parameter}"
                    base, u = self.model.get_parameter(name), change.u[0, token]
                    found[name] = (
                        (base + u).to(base.dtype)
                        if change.v is None
                        else torch.addr(base, u.to(base.dtype), change.v[0, token].to(base.dtype))
                    )
            return found

        first = int(patch.position_ids[0, 0])
        return self._by_token(patch.kept_ids[:1], first, lambda _: ExitStack(), changed)

    def _by_token(
        self,
        ids: Tensor,
        first: int,
        around: Callable[[int], Any],
        parameters: Callable[[int], dict[str, Tensor]] | None = None,
    ) -> Tensor:
        cache, logits = DynamicCache(config=self.model.config), []
        for token in range(ids.shape[1]):
            place = torch.tensor([[first + token]], device=ids.device)
            inputs = {
                "input_ids": ids[:, token : token + 1],
                "position_ids": place,
                "past_key_values": cache,
            }
            with around(token):
                changed = {} if parameters is None else parameters(token)
                logits.append(functional_call(self.model, changed, kwargs=inputs).logits)
        return torch.cat(logits, 1)

    def _residual(self, block: Block) -> str:
        return block.path_of(block.spec.residual[0].removeprefix("input of "))

    @contextmanager
    def _recording(self) -> Iterator[Activations]:
        """Record the inputs of the readers and of the norm before them."""
        activations: Activations = {}
        with ExitStack() as stack:
            for block in self.blocks:
                for path in (
                    self._residual(block),
                    *(block.path_of(reader) for reader in block.spec.readers),
                ):
                    stack.enter_context(
                        _pre_hook(
                            self.model.get_submodule(path),
                            lambda x, path=path: activations.__setitem__(path, x[0]),
                        )
                    )
            yield activations

    @contextmanager
    def _patching(self, context: Activations) -> Iterator[None]:
        """Change every reader's and writer's weights for one token, given its activations with the
        context.
        """
        with ExitStack() as stack:
            for block in self.blocks:
                spec, path, seen = block.spec, self._residual(block), {}
                stack.enter_context(
                    _pre_hook(
                        self.model.get_submodule(path),
                        lambda x, seen=seen: seen.__setitem__("hidden", x[0, 0]),
                    )
                )
                for reader in spec.readers:
                    module, z_ctx = (
                        self.model.get_submodule(block.path_of(reader)),
                        context[block.path_of(reader)],
                    )
                    stack.enter_context(
                        _hook(
                            module,
                            lambda m, z, y, z_ctx=z_ctx: _rank_one(
                                m, z, F.linear(z_ctx, m.weight, m.bias) - y
                            ),
                        )
                    )

                def delta(seen: Activations = seen, path: str = path) -> Tensor:
                    return context[path] - seen["hidden"]

                if spec.writer is Writer.WEIGHT:
                    down = self.model.get_submodule(block.path_of(str(spec.down)))
                    stack.enter_context(
                        _hook(down, lambda m, h, _, delta=delta: _rank_one(m, h, delta()))
                    )
                else:
                    norm = self.model.get_submodule(block.path_of(str(spec.post_norm)))
                    offset = spec.scale_offset
                    stack.enter_context(
                        _hook(
                            norm,
                            lambda m, x, y, delta=delta, offset=offset: _scaled(
                                m, x, y, delta(), offset
                            ),
                        )
                    )
            yield


def _rank_one(module: nn.Module, z: Tensor, u: Tensor) -> Tensor:
    """``(W + u vᵀ) z + b`` for z (K,), v = z / ‖z‖²."""
    weight = module.weight + torch.outer(u, z / z.float().square().sum().to(z.dtype))
    return F.linear(z, weight, module.bias)


def _scaled(module: nn.Module, x: Tensor, y: Tensor, delta: Tensor, offset: float) -> Tensor:
    """``(m + delta ⊘ Norm(x)) ⊙ Norm(x)``."""
    scale = offset + module.weight.float()
    normalized = y.float() / scale
    return ((scale + delta.float() / normalized) * normalized).to(x.dtype)


@contextmanager
def _pre_hook(module: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, args: see(args[0]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _hook(module: nn.Module, output: Callable[[Any, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Replace a module's output (1, 1, N) by ``output(module, input (K,), output (N,))``."""
    handle = module.register_forward_hook(
        lambda m, args, y: output(m, args[0][0, 0], y[0, 0])[None, None]
    )
    try:
        yield
    finally:
        handle.remove()
