"""AttachedBlock: a block with patched readers and writer; its factors, and hooks on its passes."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass, tree_map, tree_map_only
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.attachment import Attachment, PassForward, PassHook, WaitingForward
from icl_patch.layers.device_hooks import device_of
from icl_patch.layers.experts import PatchedExperts, patched_experts
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.layers.router import PatchedRouter
from icl_patch.layers.swap import restore, swap
from icl_patch.models.block_spec import Block
from icl_patch.models.ranks import Ranks
from icl_patch.models.tensor_parallel import check_styles, group_of, part_of, style_of
from icl_patch.models.trace import first_tensor
from icl_patch.ops import NormPair
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import block_math
from icl_patch.recording.residual_sum import ResidualSum, Unrounded
from icl_patch.recording.sequences import Sequences

# the factors of one block by name, see icl_patch.models.block_spec.BlockSpec.factor_names
Factors = dict[str, Tensor]
Hook = Callable[[Tensor], Tensor | None]


@dataclass
class BlockActivations:
    """The tensors of one block in a pass over B x T tokens, (B, T, ...) each.

    Attributes:
        hidden: the residual stream before the MLP, in fp32 or wider.
        readers: the readers' outputs by name.
        experts: the experts' input and the chosen experts, (B, T, k).
        written: the output of the output matrix ``down``.
        output: the block's output; of a post-LN block the input of its last norm.
    """

    hidden: Tensor | None = None
    readers: dict[str, Tensor] = field(default_factory=dict)
    experts: tuple[Tensor, Tensor] | None = None
    written: Tensor | None = None
    output: Tensor | None = None

    def part(self, columns: list[int] | slice) -> "BlockActivations":
        """The activations of some of the tokens."""
        part: BlockActivations = tree_map_only(Tensor, lambda x: x[:, columns], self)
        return part


register_dataclass(BlockActivations)  # so that tree_map reaches its tensors


def joined(calls: Sequence[Any]) -> Any:
    """The outputs of several calls of the model, trees of tensors (B, T, ...), joined along the
    tokens. A tensor without tokens is that of the first call.
    """

    def join(*parts: Any) -> Any:
        of_tokens = isinstance(parts[0], Tensor) and parts[0].dim() > 1
        return torch.cat(parts, 1) if of_tokens else parts[0]

    return calls[0] if len(calls) == 1 else tree_map(join, *calls)


class AttachedBlock:
    """A block with patched modules in place of its readers and writer."""

    def __init__(self, model: PreTrainedModel, block: Block, attachment: Attachment) -> None:
        spec = block.spec
        self.block, self.spec, self.attachment = block, spec, attachment
        self.module = model.get_submodule(block.path)
        self.device = device_of(self.module)
        # the recorder's, where the norm before the MLP reports both streams in one launch, with
        # its input
        self.on_norm_pair: Callable[[NormPair, Tensor], None] | None = None
        # an exact step's recorder's, where the block's forward returns the context stream alone
        self.on_sum: Callable[[Tensor], None] | None = None
        self._swapped: list[
            tuple[str, nn.Module, PatchedModule]
        ] = []  # path, parent then, patched module
        wrap_norm = partial(
            PatchedRMSNorm,
            scale_offset=spec.scale_offset,
            cast_first=spec.cast_first,
            tried=True,
        )
        try:
            self.readers: dict[str, PatchedLinear] = {
                name: self._swap(name, PatchedRouter if name in spec.routers else PatchedLinear)
                for name in spec.readers
            }
            self.experts: PatchedExperts | None = self._swap(spec.experts, patched_experts)
            self.down: PatchedLinear | None = self._swap(spec.down, PatchedLinear)
            self.inner_norm: PatchedRMSNorm | None = self._swap(spec.inner_norm, wrap_norm)
            self.post_norm: PatchedRMSNorm | None = self._swap(spec.post_norm, wrap_norm)
            self.factor_places = tuple(self._factor_places())
            self.group = group_of(model)
            self.parted = frozenset(self._parted(model))  # factors with a part on each rank
        except BaseException:
            self.detach()
            raise

    def _parted(self, model: PreTrainedModel) -> Iterator[str]:
        if self.group is None:
            return
        check_styles(model, self.block)
        for name in self.readers:
            if style_of(model, self.block.path_of(name)) is not None:
                yield f"{name}.u"
        if self.down is not None and style_of(model, self.block.path_of(str(self.spec.down))):
            self.down.group = self.group
            yield f"{self.spec.down}.v"

    @property
    def mixture(self) -> nn.Module | None:
        """The module that shows the block's experts their tokens, unless it is the block."""
        parent = str(self.spec.experts).rpartition(".")[0]
        return self.module.get_submodule(parent) if self.experts is not None and parent else None

    def _swap(self, name: str | None, wrap: Any) -> Any:
        """The patched module that takes the place of the module ``name``; None without a name."""
        if name is None:
            return None
        holder = self.module.get_submodule(name.rpartition(".")[0])
        patched = swap(self.module, name, wrap)
        patched.attachment = self.attachment
        self._swapped.append((name, holder, patched))
        return patched

    def detach(self) -> None:
        """Put the base modules back. If another module has replaced a patched one, it stays, with a
        warning.
        """
        replaced = []
        while self._swapped:
            name, holder, patched = self._swapped.pop()
            if not restore((self.module, holder), patched):
                replaced.append(self.block.path_of(name))
        for path in replaced:
            warnings.warn(
                f"{path} has been replaced while it was patched: the new module stays",
                stacklevel=5,
            )

    @property
    def path(self) -> str:
        """The block's path in the model."""
        return self.block.path

    @property
    def patched(self) -> dict[str, PatchedModule]:
        """All patched modules of the block, by their paths in the model."""
        return {self.block.path_of(name): module for name, _, module in self._swapped}

    @property
    def norms(self) -> dict[str, PatchedRMSNorm]:
        """The patched norms by name, also after a detach."""
        named = {self.spec.inner_norm: self.inner_norm, self.spec.post_norm: self.post_norm}
        return {str(name): norm for name, norm in named.items() if norm is not None}

    @property
    def writer(self) -> PatchedModule:
        """The module that adds delta."""
        writer = self.post_norm or self.down or self.experts
        assert writer is not None
        return writer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the block's sum."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def off(self) -> None:
        """Be the base modules again."""
        self.on_norm_pair = self.on_sum = None
        for *_, module in self._swapped:
            module.off()

    # -- factors

    def _factor_places(self) -> Iterator[tuple[str, PatchedModule, str]]:
        """The name of every factor, with the module and the attribute that hold it."""
        spec = self.spec
        for name, reader in self.readers.items():
            yield f"{name}.u", reader, "u"
        for name, reader in self.readers.items():
            yield self._direction_name(name), reader, "v"
        if spec.experts is not None and self.experts is not None:
            written = "bias_change" if spec.expert_bias else "u"
            yield self._direction_name(spec.experts), self.experts, "read_v"
            yield f"{spec.experts}.gate_up_proj.u", self.experts, "read_u"
            yield f"{spec.experts}.index", self.experts, "index"
            yield f"{spec.experts}.down_proj.{written}", self.experts, "write_u"
            yield f"{spec.experts}.down_proj.v", self.experts, "write_v"
        if self.down is not None:
            for attribute in ("u", "v", "bias_change"):
                yield f"{spec.down}.{attribute}", self.down, attribute
        for name, norm in self.norms.items():
            yield f"{name}.new_scale", norm, "new_scale"

    def _direction_name(self, reader: str) -> str:
        """The name of a reader's ``v``, which the readers of one input share."""
        return f"{reader}.v" if reader in self.spec.separately_normed else "readers.v"

    def replay(self, factors: Factors) -> None:
        """Set every module to apply its factors: of every token, (B, T, ...), or one token's,
        (width,), to all tokens.

        Raises:
            UnsupportedModelError: one token's, for a block with experts: a token's patch changes
                only the experts that it chose.
        """
        shared = all(x.dim() < 3 for x in factors.values())
        if shared and self.experts is not None:
            raise UnsupportedModelError(
                f"{self.path} has experts: a token's patch changes the experts it chose, and"
                " no others"
            )
        self.off()
        last = self.down if self.post_norm is None else None  # the module before the block's sum
        options: dict[str, Any]
        for name, module, attribute in self.factor_places:
            if name in factors:
                factor, options = factors[name], {}
                if module is last and factor.dtype == torch.float64:  # exact: the sum is rounded
                    options["out_dtype"] = torch.float64
                if shared and attribute in ("u", "v"):
                    factor, options["shared"] = factor[None, None], True
                elif factor.dim() > 2:
                    factor = factor.flatten(0, 1)
                if self.group is not None and name in self.parted:
                    factor = part_of(factor, self.group)
                module.replay(**{attribute: factor.to(self.device)}, **options)
        if self.experts is not None:
            self.experts.tokens = next(iter(factors.values())).shape[1]

    # -- hooks

    def hook_input(self, hooks: ExitStack, module: nn.Module, hook: Hook, **options: Any) -> None:
        """Call ``hook(x)`` with a module's input until ``hooks`` is closed, as :class:`PassHook`. A
        tensor that it returns replaces the input.
        """

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            x = first_tensor((*args, kwargs))
            assert x is not None
            changed = hook(x.to(self.device))  # a block's own hooks bring it there later
            return None if changed is None else ((changed, *args[1:]), kwargs)

        own = PassHook(before, self.attachment.thread)
        hooks.callback(module.register_forward_pre_hook(own, with_kwargs=True, **options).remove)

    def hook_output(self, hooks: ExitStack, module: nn.Module, hook: Hook, **options: Any) -> None:
        """:meth:`hook_input` for a module's output."""

        def after(_module: nn.Module, _args: Any, out: Any) -> Any:
            x = first_tensor(out)
            assert x is not None
            changed = hook(x)
            whole = changed is None or not isinstance(out, tuple)
            return changed if whole else (changed, *out[1:])

        own = PassHook(after, self.attachment.thread)
        hooks.callback(module.register_forward_hook(own, **options).remove)

    def hook_residual(self, hooks: ExitStack, hook: Hook) -> None:
        """Call ``hook(x)`` with every term of the residual stream before the MLP, a sum."""
        for name in self.spec.residual:
            side, _, path = name.partition(" of ")
            hook_side = self.hook_input if side == "input" else self.hook_output
            hook_side(hooks, self.module.get_submodule(path), hook)

    def keep_unrounded(self, hooks: ExitStack) -> None:
        """Keep an exact writer's output in fp64 up to the block's sum, also through casts."""

        def on_writer(out: Tensor) -> Tensor | None:
            return out.as_subclass(Unrounded) if out.dtype == torch.float64 else None

        # a model in fp64 rounds as it does without a patch
        if not self.spec.continues_after_sum and self.dtype != torch.float64:
            self.hook_output(hooks, self.writer, on_writer)

    def hook_end(self, hooks: ExitStack, hook: Hook, *, first: bool = False) -> None:
        """Call ``hook(total)`` with the block's sum. A tensor that it returns replaces the sum."""
        if self.spec.continues_after_sum:
            self.hook_output(hooks, self.writer, partial(ResidualSum.of, on_sum=hook, first=first))
        elif self.spec.final_norm is None:
            self.hook_output(hooks, self.module, hook, prepend=first)
        else:
            norm = self.module.get_submodule(self.spec.final_norm)
            self.hook_input(hooks, norm, hook, prepend=first)


class HasBlocks(Protocol):
    """The parts of :class:`icl_patch.recording.attached_model.AttachedModel` that a pass needs."""

    model: PreTrainedModel
    update: str
    blocks: list[AttachedBlock]
    block_specs: tuple[Block, ...]
    places: range
    recurrent: bool
    ranks: Ranks

    def empty_patch(
        self, sequences: Sequences, passes: int, arithmetic: str | None = None
    ) -> ContextPatch:
        """A patch of the kept tokens of ``sequences``, without factors."""


_attaching = threading.Lock()


def attach(model: PreTrainedModel) -> Attachment:
    """Claim a model: its forward takes a lock from now on. The caller swaps the blocks.

    Raises:
        ValueError: another patcher is attached, or the model has patched modules.
    """
    if isinstance(vars(model).get("forward"), PassForward):
        raise ValueError(
            f"expected {type(model).__name__} outside of batch_invariant, got it inside: attach"
            " first"
        )
    with _attaching:
        if _attachments(model) or any(
            isinstance(module, PatchedModule) for module in model.modules()
        ):
            raise ValueError(
                f"expected a model without patched modules, {type(model).__name__} has some: "
                "detach the other patcher first, or call icl_patch.detach(model)"
            )
        return Attachment(model)


def detach(model: nn.Module) -> None:
    """Put back all base modules of a model, also those that another patcher has swapped.

    The patcher of the model is detached too. If another thread runs a pass, this waits for it. A
    model without patched modules is left as it is.

    Raises:
        TypeError: it is no model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, got {type(model).__name__}")
    for attachment in _attachments(model):
        with attachment.lock:
            attachment.undo()
    for module in list(model.modules()):
        if isinstance(module, PatchedModule):
            restore([model], module)


def _attachments(model: nn.Module) -> list[Attachment]:
    """The attachments of the model's modules: one, unless a module holds several models."""
    attachments: dict[int, Attachment] = {}
    for module in model.modules():
        for part in (module, vars(module).get("forward")):
            if isinstance(part, PatchedModule | WaitingForward) and part.attachment is not None:
                attachments[id(part.attachment)] = part.attachment
    return list(attachments.values())


def _round_block(block: AttachedBlock, hooks: ExitStack) -> None:
    """Round the block's sum to its dtype where an exact writer left it in fp64."""
    written: list[Tensor] = []

    def on_writer(out: Tensor) -> None:
        written[:] = [out.abs().as_subclass(Tensor)]  # a copy: Falcon adds to the tensor itself

    def on_end(total: Tensor) -> Tensor | None:
        total = total.as_subclass(Tensor)
        if total.dtype == block.dtype or not written:
            return None
        return block_math.round_sum(total, written.pop().reshape(total.shape), block.dtype)

    block.keep_unrounded(hooks)
    block.hook_output(hooks, block.writer, on_writer)
    block.hook_end(hooks, on_end, first=True)


@contextmanager
def replaying(blocks: Sequence[AttachedBlock], layers: Sequence[Factors]) -> Iterator[None]:
    """Within this context the blocks apply the given factors, as :meth:`AttachedBlock.replay`."""
    with ExitStack() as stack:
        for block, factors in zip(blocks, layers, strict=True):
            stack.callback(block.off)
            block.replay(factors)
            if any(factor.dtype == torch.float64 for factor in factors.values()):
                _round_block(block, stack)
        yield
