"""Reading the form of every block of a model from its module tree and from one small forward."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.device_hooks import weight_of
from icl_patch.layers.experts import (
    PatchedExperts,
    PatchedParallelExperts,
    PatchedScaledExperts,
    experts_class,
)
from icl_patch.layers.rms_norm import rms_norm_form
from icl_patch.models.block_spec import Block, BlockSpec, Writer
from icl_patch.models.language_model import layers_of, random_tokens
from icl_patch.models.model_checks import (
    above_range,
    check_block_devices,
    check_language_model,
    check_not_shared,
)
from icl_patch.models.residual_sums import is_sum, times
from icl_patch.models.trace import BlockTrace, Call, Value, inside, outermost, trace, tracing

# The names of the MLP in known blocks. In a block without such a child, everything but the context
# layers counts as its MLP.
_MLPS = ("mlp", "feed_forward", "mlp_block", "block_sparse_moe", "shared_mlp", "moe", "ffn")
# The endings of attribute names with which a block, or its MLP, scales its addition to the residual
# stream.
_FACTORS = ("multiplier", "scale", "factor")
# Of experts' matrices that are not quantised.
_EXPERT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def blocks_of(model: PreTrainedModel, forward: Callable[[], object] | None = None) -> list[Block]:
    """The blocks of a model in order, each with its form.

    forward: runs the model once on a few tokens without a cache; by default on three random ones.

    Raises:
        UnsupportedModelError: a block has no form that is known to be covered; the message names it
            and the reason.
    """
    check_language_model(model)
    layers = layers_of(model)
    check_not_shared(layers)
    check_block_devices(layers)
    if forward is None:
        traces = trace(model, layers, random_tokens(model, 3, seed=1))
    else:
        with tracing(layers) as traces:
            forward()
    _check_range(traces, layers)
    blocks = []
    # a block without a context layer, between others that have one, needs no patch: its input is
    # the same in both runs
    unseen = {path for path, found in traces.items() if not found.mixers}
    for path in layers:
        if path not in traces:
            raise UnsupportedModelError(
                f"{path} does not run once in a pass over text, with tensors in and out; a block"
                " that attends to an image alone (Mllama) has nothing to do there"
            )
        if path in unseen and len(unseen) < len(traces):
            continue
        blocks.append(Block(path, _Reading(traces[path]).spec()))
    return blocks


def _check_range(traces: Mapping[str, BlockTrace], layers: Iterable[str]) -> None:
    """Raises UnsupportedModelError if a block computes numbers that its dtype cannot hold; names
    the first module that does.
    """
    for path in layers:
        for call in traces[path].calls if path in traces else ():
            module = call.module
            known = is_matrix(module) or _is_norm(module) or experts_class(module) is not None
            if known or call.path == "":  # other modules may mask with infinities
                place = f"{path}.{call.path}".rstrip(".")
                if reason := above_range(place, call.made.now, call.made.now.dtype):
                    raise UnsupportedModelError(reason)


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is one linear map: it has a matrix of its own, or attributes ``in_features``
    and ``out_features``.
    """
    if isinstance(module, nn.Embedding):
        return False
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        return True
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    packed = any(tensor.dim() == 2 and min(tensor.shape) > 1 for tensor in own)
    says = hasattr(module, "in_features") and hasattr(module, "out_features")
    return (packed or says) and not any(True for _ in module.children())


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: no matrix, a vector at most."""
    own = list(module.parameters(recurse=False))
    named = "norm" in type(module).__name__.lower()
    return (
        not any(True for _ in module.children())
        and named
        and all(tensor.dim() <= 2 for tensor in own)
    )


@dataclass(frozen=True, eq=False)
class _Ending:
    """The last modules of an MLP: output matrix, none if the experts end it, and the norm of a
    scale writer.
    """

    down: Call | None = None
    norm: Call | None = None
    # the experts' norm, if `norm` reads the sum of two norms' outputs
    inner: Call | None = None
    addend: Call | None = None  # the other term of a sum that the norm reads

    @property
    def writer(self) -> Writer:
        """The kind of parameters that take up ``delta``."""
        if self.norm is not None:
            return Writer.SCALE
        if self.down is None:
            return Writer.EXPERTS
        biased = isinstance(getattr(self.down.module, "bias", None), Tensor)
        return Writer.BIAS if biased else Writer.WEIGHT


def _path(call: Call | None) -> str | None:
    return None if call is None else call.path


class _Reading:
    """One block's form, read from its trace."""

    def __init__(self, trace: BlockTrace) -> None:
        self.path, self.block, self.mixers = trace.path, trace.block, trace.mixers
        self.module = trace.module
        calls = [
            call
            for call in trace.calls[:-1]
            if not any(inside(call.path, mixer.path) for mixer in self.mixers)
        ]
        self.calls = calls
        self.norms = [call for call in calls if _is_norm(call.module)]
        self.experts = [call for call in calls if experts_class(call.module) is not None]
        matrices = [call for call in calls if is_matrix(call.module) and not _is_norm(call.module)]
        matrices = [
            call
            for call in matrices
            if not any(
                inside(call.path, experts.path)
                for experts in self.experts
                if not PatchedParallelExperts.fits(experts.module)  # whose router is inside
            )
        ]
        matrices = outermost(matrices)  # an adapter and the matrix in it are one linear map
        self.matrices = [call for call in matrices if call.path.split(".")[0] in _MLPS] or matrices
        self.trace = trace

    def _refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path} ({type(self.module).__name__}): {reason}")

    def spec(self) -> BlockSpec:
        """The block's form; raises UnsupportedModelError if no known form fits."""
        if (
            self.block.given.now.dim() < 3
            or self.block.made.now.shape != self.block.given.now.shape
        ):
            shapes = tuple(self.block.given.now.shape), tuple(self.block.made.now.shape)
            raise self._refuse(
                f"expected a residual stream (B, T, d) in and out, got {shapes[0]} and {shapes[1]}"
            )
        if not self.mixers:
            raise self._refuse("no module in it takes an attention mask or a cache")
        if (streams := self._streams()) > 1:
            raise self._refuse(
                f"it carries {streams} residual streams, into which attention and the MLP write in"
                " different proportions: what attention changes is not in the direction that the"
                " MLP writes in"
            )
        self._check_plain_experts()
        if not self.matrices and not self.experts:
            return self._mixer_form()
        return self._mlp_form()

    def _check_plain_experts(self) -> None:
        """Raises UnsupportedModelError for experts whose matrices are quantised."""
        plain = (nn.Parameter, Tensor)
        for call in self.trace.calls[:-1]:
            named = call in self.experts or "experts" in type(call.module).__name__.lower()
            own: dict[str, Tensor] = {}
            if named:
                own |= call.module.named_parameters(recurse=False)
                own |= call.module.named_buffers(recurse=False)
            for name, tensor in own.items():
                if tensor.dim() >= 3 and not (
                    type(tensor) in plain and tensor.dtype in _EXPERT_DTYPES
                ):
                    raise self._refuse(
                        f"{call.path}.{name} is quantised ({type(tensor).__name__},"
                        f" {tensor.dtype}), and experts are patched in floating point only: load"
                        " the model without quantisation, as with Mxfp4Config(dequantize=True), or"
                        " keep its experts out of it (modules_to_not_convert)"
                    )

    def _streams(self) -> int:
        """How many residual streams the block carries, as (B, T, n, d) or side by side in (B, T,
        n·d): a context layer reads one of width d.
        """
        given = self.block.given.now
        read = self.mixers[0].given.now.shape
        if given.dim() == 4:
            return given.shape[2] if given.shape[:2] == read[:2] else 1
        several, rest = divmod(given.shape[-1], read[-1])
        return 1 if rest else several

    # -- blocks with an MLP

    def _mlp_form(self) -> BlockSpec:
        self.first = min(self.matrices + self.experts, key=self.calls.index)
        z = self.z = self.first.given
        pre = [call for call in self.norms if call.made.same_as(z)]
        parallel = any(x.same_as(self.block.given) for x in (z, *(call.given for call in pre)))
        place = self.trace.calls.index(self.first)
        behind = [mixer.path for mixer in self.mixers if self.trace.calls.index(mixer) > place]
        if behind and not parallel:
            raise self._refuse(
                f"{behind[-1]} looks at the context behind the MLP: a change of the MLP's weights"
                " cannot have that effect"
            )
        own = self._readers_of_their_own(pre)
        readers = [
            call
            for call in self.matrices + own
            if call not in self.experts and (call in own or call.given.same_as(z))
        ]
        for experts in self.experts:
            scaled = PatchedScaledExperts.fits(experts.module)
            known = scaled or experts in own or experts.given.same_as(z)
            if len(self.experts) > 1 or not known:
                raise self._refuse(f"{experts.path} does not read what the router reads")
        downs = [call for call in self.matrices if call not in readers]
        ending = self._ending(readers, downs)
        found: dict[str, Any] = {"separately_normed": tuple(call.path for call in own)}
        if not parallel:
            found["readers"] = tuple(call.path for call in readers)
            found["routers"] = tuple(call.path for call in readers if call.several)
        for experts in self.experts:
            found["expert_bias"] = bool(getattr(experts.module, "has_bias", False))
            found["experts_scale_input"] = PatchedScaledExperts.fits(experts.module)
            if not parallel or ending.down is None:
                found["experts"] = experts.path
        found["transposed"] = tuple(self._transposed([*readers, *downs]))
        return self._spec(ending, self._residuals(parallel), **found)

    def _spec(self, ending: _Ending, residuals: list[tuple[str, ...]], **found: Any) -> BlockSpec:
        """The form with this ending, and with what is ``found`` of it already."""
        closing = [
            call
            for call in self.norms
            if call is not ending.norm and call.made.same_as(self.block.made)
        ]
        final_norm = closing[-1] if closing else None  # of a post-LN block
        made = self.block.made if final_norm is None else final_norm.given
        return BlockSpec(
            writer=ending.writer,
            down=_path(ending.down),
            post_norm=_path(ending.norm),
            inner_norm=_path(ending.inner),
            addend=_path(ending.addend),
            final_norm=_path(final_norm),
            dtype=str(made.now.dtype).removeprefix("torch."),
            **self._explain(residuals, ending, made),
            **self._norm_form([norm for norm in (ending.norm, ending.inner) if norm is not None]),
            **found,
        )

    def _ending(self, readers: list[Call], downs: list[Call]) -> _Ending:
        """The last modules of the MLP."""
        last = max(downs + self.experts, key=self.calls.index, default=None)
        if last is None:
            raise self._refuse(
                f"nothing that is known reads what {', '.join(call.path for call in readers)} give:"
                " its MLP is not made of linear maps, or of experts in the layout of transformers"
                " (gate_up_proj and down_proj of three dimensions), JetMoE's or DBRX's"
            )
        after = [call for call in self.norms if self.calls.index(call) > self.calls.index(last)]
        down = None if last in self.experts else last
        for norm in after:
            if norm.given.same_as(last.made):
                return (self._nested_ending(norm) if self.experts else None) or _Ending(down, norm)
            addend = self._other_term(norm.given, last.made)
            if addend is not None:
                return _Ending(down, norm, addend=addend)
        gates = [call for call in readers if call.made.now.shape[-1] == 1]
        if not self.experts or (downs and not gates):
            return _Ending(downs[-1])
        if PatchedScaledExperts.fits(self.experts[0].module):
            raise self._refuse(
                f"{self.experts[0].path} scales what it reads, and nothing beside it can write"
            )
        return _Ending()

    def _nested_ending(self, inner: Call) -> _Ending | None:
        """A norm of the sum of the experts' norm and of another module's output."""
        for norm in self.norms[self.norms.index(inner) + 1 :]:
            if (addend := self._other_term(norm.given, inner.made)) is not None:
                return _Ending(norm=norm, inner=inner, addend=addend)
        return None

    def _other_term(self, total: Value, term: Value) -> Call | None:
        """The module of the MLP for which ``term`` plus the module's output is ``total``."""
        calls = self.calls[self.calls.index(self.first) :]
        found = (call for call in calls if is_sum(total.now, [term.now, call.made.now]))
        return next(found, None)

    def _readers_of_their_own(self, pre: list[Call]) -> list[Call]:
        """Experts that read the residual stream through another norm than the first reader does,
        and the matrices before them.
        """
        others = [
            call
            for call in self.experts
            if PatchedExperts.fits(call.module) and not call.given.same_as(self.z)
        ]
        through = [norm for norm in self.norms if pre and norm.given.same_as(pre[0].given)]
        if not others or not any(others[0].given.same_as(norm.made) for norm in through):
            return []
        start, end = self.calls.index(self.first), self.calls.index(others[0])
        before = [
            call
            for call in self.calls[start:end]
            if is_matrix(call.module) and call not in self.matrices and not _is_norm(call.module)
        ]
        return [*before, others[0]]

    def _residuals(self, parallel: bool) -> list[tuple[str, ...]]:
        """Candidates for the residual stream before the MLP."""
        if parallel:
            return [("input of ", *(f"output of {mixer.path}" for mixer in self.mixers))]
        # a norm may have modules of its own, such as a gate
        z = self.z
        pre = [call for call in self.calls if call.made.same_as(z) and not call.given.same_as(z)]
        return [
            *((f"input of {call.path}",) for call in pre),
            (f"input of {self.first.path}",),
            *((f"output of {mixer.path}",) for mixer in self.mixers),  # with the sum inside (DBRX)
        ]

    def _factors(self, holders: list[Call]) -> list[float]:
        """The candidates for the numbers by which the block multiplies its residual stream and its
        writer's output: attributes of the modules around the writer, and 1.
        """
        modules = [self.module, *(call.module for call in holders)]
        found = [
            value
            for module in modules
            for name, value in vars(module).items()
            if name.endswith(_FACTORS) and isinstance(value, float)
        ]
        return list(dict.fromkeys([*found, 1.0]))

    def _explain(
        self, residuals: list[tuple[str, ...]], ending: _Ending, made: Value
    ) -> dict[str, Any]:
        """The residual stream and the factors for which ``factor · hidden + multiplier · MLP`` is
        the block's output, or the sum that it computes further with.

        A candidate that gives the output to the last bit is taken: that proves it.
        """
        writer = (ending.norm or ending.down or self.experts[0]).path
        holders = [call for call in self.calls if inside(writer, call.path)]
        for residual, mlp in product(residuals, holders):
            for found, total, terms, scale in self._sums(residual, mlp, holders, made):
                if is_sum(total, terms, scale):
                    return found
        raise self._refuse(
            "its output is not its residual stream plus what its MLP ends in, each times 1 or an"
            " attribute that ends in multiplier, scale or factor: what attention changes cannot be"
            " written to the MLP"
        )

    def _sums(
        self, residual: tuple[str, ...], mlp: Call, holders: list[Call], made: Value
    ) -> Iterator[tuple[dict[str, Any], Tensor, list[Tensor], Tensor | float]]:
        """The sums that the block's output may be: the form, the tensor to explain, its terms, and
        the factor of their sum.
        """
        hidden, output = [self._tap(name) for name in residual], made.now
        written = next(index for index, call in enumerate(self.calls) if call is holders[0])
        later = [call.given.now for call in self.calls[written + 1 :] if call not in holders]
        factors = self._factors(holders)
        for branch, factor in product(factors, reversed(factors)):
            stream = [times(x, factor) for x in hidden]
            added = times(mlp.made.now, branch)
            found = {"residual": residual, "residual_multiplier": branch}
            if factor != 1:
                found["residual_factor"] = factor
            yield found, output, [*stream, added], 1.0
            for beside in self._beside(mlp, holders):
                yield found, output, [*stream, added, times(beside, branch)], 1.0
            if factor != 1:
                continue
            for x in later:
                yield found | {"continues_after_sum": True}, x, [*stream, added], 1.0
            for name, weight in self._own_weights():
                if weight.numel() == 1:
                    yield found | {"continues_after_sum": True}, output, [*stream, added], weight
                elif len(hidden) == 1 and weight.shape == hidden[0].shape[-1:]:
                    terms = [weight * hidden[0], added]
                    yield found | {"residual_weight": name}, output, terms, 1.0

    def _beside(self, mlp: Call, holders: list[Call]) -> Iterator[Tensor]:
        """Outputs that other modules of the MLP may add, beside the one that holds the writer."""
        given = mlp.made.now
        for call in self.calls if mlp is holders[-1] else []:
            if call.made.now.numel() == given.numel() and call not in holders:
                yield call.made.now

    def _own_weights(self) -> list[tuple[str, Tensor]]:
        """The block's own parameters and buffers: candidates for a factor of the residual stream if
        they are as wide, for one of the sum if they have one element.
        """
        own: list[tuple[str, Tensor]] = [*self.module.named_parameters(recurse=False)]
        own += self.module.named_buffers(recurse=False)
        return [(name, weight_of(self.module, name)) for name, _ in own]

    def _tap(self, name: str) -> Tensor:
        side, _, path = name.partition(" of ")
        call = (
            self.block
            if not path
            else next(call for call in self.calls + self.mixers if call.path == path)
        )
        value = (call.given if side == "input" else call.made).now
        return (
            value.reshape(self.block.given.now.shape[-3:])
            if self.block.given.now.dim() == 3
            else value
        )

    def _transposed(self, matrices: list[Call]) -> Iterator[str]:
        for call in matrices:
            if type(call.module).__name__ == "Conv1D" and hasattr(call.module, "nf"):
                yield call.path
        for call in self.experts:
            layout = experts_class(call.module)
            if layout is not None and layout.is_transposed(call.module):
                yield call.path

    def _norm_form(self, norms: list[Call]) -> dict[str, Any]:
        """How norms apply their weights: each way is tried, and compared bit for bit."""
        forms = []
        for call in norms:
            try:
                form = rms_norm_form(call.module, call.given.now, call.made.now)
            except TypeError as error:
                raise self._refuse(f"{call.path} is no RMSNorm: {error}") from error
            if form is None:
                raise self._refuse(f"{call.path} is no RMSNorm with a scale of w or 1 + w")
            forms.append({"scale_offset": form[0], "cast_first": form[1]})
        if any(form != forms[0] for form in forms):
            raise self._refuse(f"{norms[0].path} and {norms[1].path} are norms of different kinds")
        return forms[0] if forms else {}

    # -- blocks without one

    def _mixer_form(self) -> BlockSpec:
        """A block that consists of its context layer: the layer's output matrix writes, and only
        this matrix's input may change.
        """
        if len(self.mixers) != 1:
            raise self._refuse("expected one context layer in a block without an MLP")
        mixer = self.mixers[0]
        own = [
            call
            for call in self.trace.calls
            if inside(call.path, mixer.path) and is_matrix(call.module)
        ]
        down = next((call for call in own[::-1] if call.made.same_as(mixer.made)), None)
        if down is None:
            raise self._refuse(f"{mixer.path} does not end in a matrix")
        self.calls = self.trace.calls[:-1]
        return self._spec(_Ending(down), [("input of ",)], mixer=True)
