"""A block whose readers and writer have been swapped, and what is seen of it during a pass."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.attachment import Attachment, WaitingForward
from icl_patch.layers.experts import PatchedExperts, PatchedScaledExperts
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.layers.router import PatchedRouter
from icl_patch.layers.swap import restore, swap
from icl_patch.models.block_spec import Block
from icl_patch.models.trace import first_tensor
from icl_patch.ops import NormPair
from icl_patch.recording import updates
from icl_patch.recording.residual_sum import ResidualSum, Unrounded

# of one block by name, see icl_patch.models.block_spec.Form.factor_names
Factors = dict[str, Tensor]


@dataclass
class BlockActivations:
    """What one block did to B x T tokens.

    hidden: the residual stream before the MLP (fp32 or wider); readers: their outputs; experts:
    what the experts read and which were chosen, (B, T, k); written: the output matrix's output;
    output: the block's, or of a post-LN block the input of its last norm.
    """

    hidden: Tensor | None = None
    readers: dict[str, Tensor] = field(default_factory=dict)
    experts: tuple[Tensor, Tensor] | None = None
    written: Tensor | None = None
    output: Tensor | None = None

    def part(self, columns: Tensor | slice) -> "BlockActivations":
        """The tape of some of the tokens."""

        def cut(x: Tensor | None) -> Any:
            return None if x is None else x[:, columns]

        return BlockActivations(
            hidden=cut(self.hidden),
            readers={name: cut(out) for name, out in self.readers.items()},
            experts=None if self.experts is None else (cut(self.experts[0]), cut(self.experts[1])),
            written=cut(self.written),
            output=cut(self.output),
        )

    @classmethod
    def joined(cls, all_activations: Sequence["BlockActivations"]) -> "BlockActivations":
        """One tape of several, token after token."""
        if len(all_activations) == 1:
            return all_activations[0]

        def cat(parts: Sequence[Any]) -> Any:
            return None if parts[0] is None else torch.cat(list(parts), 1)

        experts = [
            activations.experts
            for activations in all_activations
            if activations.experts is not None
        ]
        return cls(
            hidden=cat([activations.hidden for activations in all_activations]),
            readers={
                name: cat([activations.readers[name] for activations in all_activations])
                for name in all_activations[0].readers
            },
            experts=(
                (cat([z for z, _ in experts]), cat([index for _, index in experts]))
                if experts
                else None
            ),
            written=cat([activations.written for activations in all_activations]),
            output=cat([activations.output for activations in all_activations]),
        )


class AttachedBlock:
    """A block whose readers and writer have been swapped for patched modules."""

    def __init__(self, model: nn.Module, block: Block, attachment: Attachment) -> None:
        spec = block.spec
        self.block, self.spec, self.attachment = block, spec, attachment
        self.module = model.get_submodule(block.path)
        # the recorder's, where the norm before the MLP reports both streams in one launch
        self.on_norm_pair: Callable[[NormPair], None] | None = None
        self._swapped: list[tuple[str, nn.Module, PatchedModule]] = []  # with what held them then
        try:
            self.readers: dict[str, PatchedLinear] = {
                name: self._swap(name, PatchedRouter if name in spec.routers else PatchedLinear)
                for name in spec.readers
            }
            kind = PatchedScaledExperts if spec.experts_scale_input else PatchedExperts
            self.experts: PatchedExperts | None = (
                None if spec.experts is None else self._swap(spec.experts, kind)
            )
            self.down: PatchedLinear | None = (
                None if spec.down is None else self._swap(spec.down, PatchedLinear)
            )
            self.inner_norm: PatchedRMSNorm | None = (
                None if spec.inner_norm is None else self._swap(spec.inner_norm, self._wrap_norm)
            )
            self.post_norm: PatchedRMSNorm | None = (
                None if spec.post_norm is None else self._swap(spec.post_norm, self._wrap_norm)
            )
        except BaseException:
            self.detach()
            raise

    def _wrap_norm(self, base: nn.Module) -> PatchedRMSNorm:
        return PatchedRMSNorm(
            base, scale_offset=self.spec.scale_offset, cast_first=self.spec.cast_first
        )

    def _swap(self, name: str, wrap: Any) -> Any:
        holder = self.module.get_submodule(name.rpartition(".")[0])
        patched = swap(self.module, name, wrap)
        patched.attachment = self.attachment
        self._swapped.append((name, holder, patched))
        return patched

    def detach(self) -> None:
        """Put the base modules back. What somebody has put in a patched module's place since stays
        there, with a warning.
        """
        replaced = []
        while self._swapped:
            name, holder, patched = self._swapped.pop()
            if not restore((self.module, holder), patched):
                replaced.append(self.block.path_of(name))
        for path in replaced:
            warnings.warn(
                f"{path} has been replaced while it was patched: what stands there now is left as"
                " it is",
                stacklevel=5,
            )

    @property
    def patched(self) -> list[PatchedModule]:
        """All patched modules of the block."""
        others = (self.experts, self.down, self.inner_norm, self.post_norm)
        return [*self.readers.values(), *(module for module in others if module is not None)]

    @property
    def norms(self) -> dict[str, PatchedRMSNorm]:
        """The patched norms by name."""
        named = {self.spec.inner_norm: self.inner_norm, self.spec.post_norm: self.post_norm}
        return {str(name): norm for name, norm in named.items() if norm is not None}

    @property
    def writer(self) -> PatchedModule:
        """The module whose output takes up delta."""
        writer = self.post_norm or self.down or self.experts
        assert writer is not None
        return writer

    @property
    def dtype(self) -> torch.dtype:
        """Of the block's sum."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def off(self) -> None:
        """Be the base modules again."""
        self.on_norm_pair = None
        for module in self.patched:
            module.off()

    # -- factors

    def factors(self) -> Factors:
        """The factors the modules hold, by name, as (rows, columns, ...)."""
        found: Factors = {
            f"{name}.u": reader.u for name, reader in self.readers.items() if reader.u is not None
        }
        vs = {name: reader.v for name, reader in self.readers.items()}
        vs |= {} if self.experts is None else {str(self.spec.experts): self.experts.read_v}
        for name, v in vs.items():
            if v is not None:
                found[f"{name}.v" if name in self.spec.separately_normed else "readers.v"] = v
        if self.experts is not None:
            found |= self._of_experts(self.experts)
        if self.down is not None:
            held = {"u": self.down.u, "v": self.down.v, "bias_change": self.down.bias_change}
            found |= {
                f"{self.spec.down}.{name}": factor
                for name, factor in held.items()
                if factor is not None
            }
        for name, norm in self.norms.items():
            if norm.new_scale is not None:
                found[f"{name}.new_scale"] = norm.new_scale
        return found

    def _of_experts(self, experts: PatchedExperts) -> Factors:
        path = self.spec.experts
        written = "bias_change" if self.spec.expert_bias else "u"
        held = {
            "gate_up_proj.u": experts.read_u,
            "index": experts.index,
            f"down_proj.{written}": experts.write_u,
            "down_proj.v": experts.write_v,
        }
        return {f"{path}.{name}": factor for name, factor in held.items() if factor is not None}

    def replay(self, factors: Factors) -> None:
        """Set every module to apply its factors, (B, T, ...)."""
        # flat: one row a token, also in a batch of one, where (1, T, N) would be a shared patch of
        # rank T
        flat = {
            name: factor.flatten(0, 1) if factor.dim() >= 3 else factor
            for name, factor in factors.items()
        }
        norms = {
            f"{name}.new_scale": factors[f"{name}.new_scale"]
            for name in self.norms
            if f"{name}.new_scale" in factors
        }
        self._set(flat | norms, tokens=next(iter(factors.values())).shape[1])

    def _set(self, flat: Factors, tokens: int = 1) -> None:
        """Set every module to apply its factors in the form that it takes them, of rows of so many
        tokens each.
        """
        for name, reader in self.readers.items():
            reader.set_patch(
                flat[f"{name}.u"],
                flat[f"{name}.v" if name in self.spec.separately_normed else "readers.v"],
            )
        if self.experts is not None:
            self._replay_experts(self.experts, flat, tokens)
        if self.down is not None:
            self._replay_down(self.down, flat)
        for name, norm in self.norms.items():
            if f"{name}.new_scale" in flat:
                norm.set_patch(flat[f"{name}.new_scale"])

    def apply(self, factors: Factors) -> None:
        """Set every module to apply one token's factors, (width,) each, to all tokens.

        Raises:
            UnsupportedModelError: the block has experts: what a token's experts got is no change of
                the others.
        """
        if self.experts is not None:
            raise UnsupportedModelError(
                f"{self.block.path} has experts: a token's patch changes the experts it chose, and"
                " no others"
            )
        shared = {
            name: factor if name.endswith((".new_scale", ".bias_change")) else factor[None, None]
            for name, factor in factors.items()
        }
        self._set(shared)

    def _replay_experts(self, experts: PatchedExperts, flat: Factors, tokens: int) -> None:
        path, written = self.spec.experts, "bias_change" if self.spec.expert_bias else "u"
        experts.off()
        own = path in self.spec.separately_normed
        experts.read_u, experts.read_v = (
            flat.get(f"{path}.gate_up_proj.u"),
            flat.get(f"{path}.v" if own else "readers.v"),
        )
        experts.index = flat[f"{path}.index"]
        experts.write_u, experts.write_v = (
            flat.get(f"{path}.down_proj.{written}"),
            flat.get(f"{path}.down_proj.v"),
        )
        experts.replay(tokens)

    def _replay_down(self, down: PatchedLinear, flat: Factors) -> None:
        path = self.spec.down
        written = flat.get(f"{path}.u", flat.get(f"{path}.bias_change"))
        if written is None:
            return
        out_dtype = (
            torch.float64 if self.post_norm is None and written.dtype == torch.float64 else None
        )
        if f"{path}.bias_change" in flat:
            down.set_bias_change(written, out_dtype=out_dtype)
        else:
            down.set_patch(written, flat[f"{path}.v"], out_dtype=out_dtype)

    # -- hooks

    def hook(
        self,
        hooks: ExitStack,
        register: Callable[..., Any],
        hook: Callable[..., Any],
        **options: Any,
    ) -> None:
        """``register(hook, **options)`` until ``hooks`` is closed.

        In a pass the hook runs in the thread of the pass only; outside of one, in all threads.
        """
        thread = self.attachment.thread

        def in_its_thread(*given: Any) -> Any:
            return hook(*given) if thread == threading.get_ident() else None

        hooks.callback(register(hook if thread is None else in_its_thread, **options).remove)

    def on_start(self, hooks: ExitStack, hook: Any) -> None:
        """Call ``hook((rows, T))`` when the block begins."""

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            x = first_tensor((*args, kwargs))
            assert x is not None
            hook(x.shape[-3:-1])

        self.hook(hooks, self.module.register_forward_pre_hook, before, with_kwargs=True)

    def on_residual(self, hooks: ExitStack, hook: Any) -> None:
        """Call ``hook(x)`` with every tensor that the residual stream before the MLP is the sum
        of.
        """

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            hook(first_tensor((*args, kwargs)))

        def after(_module: nn.Module, _args: Any, out: Any) -> None:
            hook(first_tensor(out))

        for name in self.spec.residual:
            side, _, path = name.partition(" of ")
            module = self.module.get_submodule(path)
            if side == "input":
                self.hook(hooks, module.register_forward_pre_hook, before, with_kwargs=True)
            else:
                self.hook(hooks, module.register_forward_hook, after)

    def keep_unrounded(self, hooks: ExitStack) -> None:
        """Let an exact writer's output reach the block's sum in fp64, whatever the block casts it
        to on the way.
        """

        def on_writer(_module: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
            return out.as_subclass(Unrounded) if out.dtype == torch.float64 else None

        if not self.spec.continues_after_sum:
            self.hook(hooks, self.writer.register_forward_hook, on_writer)

    def on_end(self, hooks: ExitStack, hook: Any, *, first: bool = False) -> None:
        """Call ``hook(total)`` with the block's sum; a tensor that it returns takes the sum's
        place.
        """

        def before(_module: nn.Module, args: Any) -> Any:
            changed = hook(args[0])
            return None if changed is None else (changed, *args[1:])

        def after(_module: nn.Module, _args: Any, out: Any) -> Any:
            changed = hook(out[0] if isinstance(out, tuple) else out)
            if changed is None:
                return None
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        def on_writer(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
            return ResidualSum.of(out, hook, first=first)

        if self.spec.continues_after_sum:
            self.hook(hooks, self.writer.register_forward_hook, on_writer)
        elif self.spec.final_norm is None:
            self.hook(hooks, self.module.register_forward_hook, after, prepend=first)
        else:
            norm = self.module.get_submodule(self.spec.final_norm)
            self.hook(hooks, norm.register_forward_pre_hook, before, prepend=first)


_attaching = threading.Lock()


def attach(model: PreTrainedModel) -> Attachment:
    """Claim a model: its forward takes a lock from now on. The caller swaps the blocks.

    Raises:
        ValueError: another patcher is attached, or the model has patched modules.
    """
    with _attaching:
        if _attachments(model) or any(
            isinstance(module, PatchedModule) for module in model.modules()
        ):
            raise ValueError(
                f"expected a model without patched modules, {type(model).__name__} has some: "
                "detach the other patcher first, or call icl_patch.detach(model)"
            )
        attachment = Attachment()
        attachment.hold_forwards(model)
    return attachment


def detach(model: nn.Module) -> None:
    """Put back all base modules of a model, whoever attached it or swapped a module.

    The patcher of the model is detached too. If another thread runs a pass, this waits for it. A
    model without patched modules is left as it is.
    """
    for attachment in _attachments(model):
        with attachment.lock:
            attachment.undo()
    for module in list(model.modules()):
        if isinstance(module, PatchedModule):
            restore([model], module)


def _attachments(model: nn.Module) -> list[Attachment]:
    """The attachments of the model's modules: one, unless a module holds several models."""
    found: dict[int, Attachment] = {}
    for module in model.modules():
        for part in (module, vars(module).get("forward")):
            if isinstance(part, PatchedModule | WaitingForward) and part.attachment is not None:
                found[id(part.attachment)] = part.attachment
    return list(found.values())


def _round_block(block: AttachedBlock, hooks: ExitStack) -> None:
    """Round the block's sum to its dtype where an exact writer left it in fp64."""
    written: list[Tensor] = []

    def on_writer(_module: nn.Module, _args: Any, out: Tensor) -> None:
        written[:] = [out.abs().as_subclass(Tensor)]  # a copy: Falcon adds to the tensor itself

    def on_end(total: Tensor) -> Tensor | None:
        total = total.as_subclass(Tensor)
        if total.dtype == block.dtype or not written:
            return None
        return updates.round_sum(total, written.pop().reshape(total.shape), block.dtype)

    block.keep_unrounded(hooks)
    block.hook(hooks, block.writer.register_forward_hook, on_writer)
    block.on_end(hooks, on_end, first=True)


@contextmanager
def replaying(
    blocks: Sequence[AttachedBlock], layers: Sequence[Factors], *, shared: bool = False
) -> Iterator[None]:
    """Within this context the blocks apply the given factors: of every token (B, T, ...), or
    ``shared`` by all tokens (width,).
    """
    with ExitStack() as stack:
        for block, factors in zip(blocks, layers, strict=True):
            stack.callback(block.off)
            (block.apply if shared else block.replay)(factors)
            if any(factor.dtype == torch.float64 for factor in factors.values()):
                _round_block(block, stack)
        yield
