"""Reading the form of every block of a model from its module tree and from one small forward."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.dtypes import FLOATS
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
from icl_patch.models.language_model import layers_of
from icl_patch.models.model_checks import (
    above_range,
    check_block_devices,
    check_distinct,
    check_eval,
    check_language_model,
    check_not_shared,
)
from icl_patch.models.module_search import inside
from icl_patch.models.residual_sums import is_sum, times
from icl_patch.models.trace import BlockTrace, Call, Value, outermost_calls, trace, traced
from icl_patch.models.trial_tokens import trial_tokens

# The names of the MLP in known blocks. In a block without such a child, everything but the context
# layers counts as its MLP.
_MLPS = ("mlp", "feed_forward", "mlp_block", "block_sparse_moe", "shared_mlp", "moe", "ffn")
# The endings of attribute names with which a block, or its MLP, scales its addition to the residual
# stream.
_FACTORS = ("multiplier", "scale", "factor")


@torch.no_grad()
def blocks_of(model: PreTrainedModel, forward: Callable[[], object] | None = None) -> list[Block]:
    """The blocks of a model in order, each with its form.

    forward: runs the model once on a few tokens without a cache; by default on three trial tokens.

    Raises:
        UnsupportedModelError: a block has no form that is known to be covered; the message names it
            and the reason.
        ValueError: the model is training.
    """
    check_language_model(model)
    check_eval([model])
    layers = layers_of(model)
    check_not_shared(layers)
    check_block_devices(layers)
    if forward is None:
        traces = trace(model, layers, trial_tokens(model, 3, seed=1))
    else:
        traces = traced(layers, forward)
    for path, found in traces.items():
        if reason := above_range(model, path, found.block.made.now):
            raise UnsupportedModelError(reason)
    blocks = []
    # a block without a context layer, between others that have one, needs no patch: its input is
    # the same in both runs
    unseen = {path for path, found in traces.items() if not found.mixers}
    for path in layers:
        if path not in traces:
            raise UnsupportedModelError(
                f"{path} does not run once in a pass over text, with tensors as input and output;"
                " a block that attends to images alone (Mllama) is skipped there"
            )
        if path in unseen and len(unseen) < len(traces):
            continue
        blocks.append(Block(path, _Reading(traces[path]).spec()))
        check_distinct(model, blocks[-1])
    return blocks


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is one linear map: it has a matrix of its own, or attributes ``in_features``
    and ``out_features``.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        return True
    packed = any(x.dim() == 2 and min(x.shape) > 1 for _, x in _own_tensors(module))
    says = hasattr(module, "in_features") and hasattr(module, "out_features")
    return (packed or says) and not module._modules


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: no matrix, a vector at most."""
    return (
        "norm" in type(module).__name__.lower()
        and not module._modules
        and all(tensor.dim() <= 2 for tensor in module.parameters())
    )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself, by name."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _is_inside(call: Call, others: list[Call]) -> bool:
    """Whether a call is one of the others, or of a module below theirs."""
    return any(inside(call.path, other.path) for other in others)


def _makers(calls: list[Call], value: Value) -> list[Call]:
    """The calls that gave a value: those with its storage, else those with its numbers."""
    same = [call for call in calls if call.made.same_as(value)]
    return [call for call in same if call.made.address == value.address] or same


def _is_transposed(call: Call) -> bool:
    """Whether a module stores its weight, or those of its experts, as (in, out)."""
    if (layout := experts_class(call.module)) is not None:
        return layout.is_transposed(call.module)
    return type(call.module).__name__ == "Conv1D" and hasattr(call.module, "nf")


def _paths(calls: Iterable[Call]) -> tuple[str, ...]:
    return tuple(call.path for call in calls)


class _Reading:
    """One block's form, read from its trace."""

    def __init__(self, trace: BlockTrace) -> None:
        self.trace, self.block, self.mixers = trace, trace.block, trace.mixers
        self.calls = [call for call in trace.calls if not _is_inside(call, self.mixers)]
        self.norms = [call for call in self.calls if _is_norm(call.module)]
        self.experts = [call for call in self.calls if experts_class(call.module) is not None]
        # of PatchedParallelExperts the router is inside
        closed = [call for call in self.experts if not PatchedParallelExperts.fits(call.module)]
        matrices = outermost_calls(  # an adapter and the matrix in it are one linear map
            call
            for call in self.calls
            if is_matrix(call.module) and call not in self.norms and not _is_inside(call, closed)
        )
        self.matrices = [call for call in matrices if call.path.split(".")[0] in _MLPS] or matrices

    def _refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.trace.path} ({type(self.block.module).__name__}): {reason}"
        )

    def spec(self) -> BlockSpec:
        """The block's form; raises UnsupportedModelError if no known form fits."""
        given, made = self.block.given.now, self.block.made.now
        if given.dim() < 3 or made.shape != given.shape:
            raise self._refuse(
                "expected a residual stream (B, T, d) in and out, got"
                f" {tuple(given.shape)} and {tuple(made.shape)}"
            )
        if not self.mixers:
            raise self._refuse("no module in it takes an attention mask or a cache")
        read = self.mixers[0].given.now
        streams, rest = divmod(given.numel(), read.numel())
        if streams > 1 and not rest and given.shape[:2] == read.shape[:2]:
            raise self._refuse(
                f"it carries {streams} residual streams, and attention and the MLP write to them in"
                " different proportions: a change of the MLP cannot replace what attention adds"
            )
        self._check_plain_experts()
        if not self.matrices and not self.experts:
            return self._mixer_form()
        return self._mlp_form()

    def _check_plain_experts(self) -> None:
        """Raises UnsupportedModelError for experts with quantised matrices."""
        for call in self.trace.calls:
            module = call.module
            if not (call in self.experts or "experts" in type(module).__name__.lower()):
                continue
            for name, tensor in _own_tensors(module):
                plain = type(tensor) in (nn.Parameter, Tensor) and tensor.dtype in FLOATS
                if tensor.dim() >= 3 and not plain:
                    raise self._refuse(
                        f"{call.path}.{name} is quantised ({type(tensor).__name__},"
                        f" {tensor.dtype}), and experts are patched in floating point only: load"
                        " the model without quantisation, as with Mxfp4Config(dequantize=True), or"
                        " keep its experts out of it (modules_to_not_convert)"
                    )

    def _after(self, call: Call) -> list[Call]:
        """The calls that return after one, those inside the context layers included."""
        calls = self.trace.calls
        return calls[calls.index(call) + 1 :]

    # -- blocks with an MLP

    def _mlp_form(self) -> BlockSpec:
        self.first = min(self.matrices + self.experts, key=self.calls.index)
        z = self.z = self.first.given
        pre, given = _makers(self.norms, z), self.block.given
        read = [x for x in (z, *(call.given for call in pre)) if x.same_as(given)]
        # other storage with the input's numbers is a copy, or a sum to which attention adds 0
        if read and all(x.address != given.address for x in read):
            try:
                return self._form(pre, parallel=False)
            except UnsupportedModelError:
                pass
        return self._form(pre, parallel=len(read) > 0)

    def _form(self, pre: list[Call], *, parallel: bool) -> BlockSpec:
        """The form of a block with an MLP. The norms ``pre`` give z."""
        z = self.z
        behind = [call.path for call in self._after(self.first) if call in self.mixers]
        if behind and not parallel:
            raise self._refuse(
                f"{behind[-1]} reads the context after the MLP: a change of the MLP's weights"
                " cannot replace that"
            )
        own = self._readers_of_their_own(pre)
        readers = [
            call
            for call in self.matrices + own
            if call not in self.experts and (call in own or call.given.same_as(z))
        ]
        downs = [call for call in self.matrices if call not in readers]
        ending = self._ending(readers, downs)
        found: dict[str, Any] = {"separately_normed": _paths(own)}
        if not parallel:
            found["readers"] = _paths(readers)
            found["routers"] = _paths(call for call in readers if call.several)
        for experts in self.experts:
            scaled = PatchedScaledExperts.fits(experts.module)
            known = scaled or experts in own or experts.given.same_as(z)
            if len(self.experts) > 1 or not known:
                raise self._refuse(f"{experts.path} does not read what the router reads")
            found["expert_bias"] = bool(getattr(experts.module, "has_bias", False))
            found["experts_scale_input"] = scaled
            if not parallel or "down" not in ending:
                found["experts"] = experts.path
        found["transposed"] = _paths(filter(_is_transposed, [*readers, *downs, *self.experts]))
        return self._spec(ending, self._residuals(parallel), **found)

    def _spec(
        self, ending: dict[str, Call], residuals: list[tuple[str, ...]], **found: Any
    ) -> BlockSpec:
        """The form with this ending, and with the fields that are ``found`` already."""
        down, post_norm = ending.get("down"), ending.get("post_norm")
        if post_norm is not None:
            writer = Writer.SCALE
        elif down is None:
            writer = Writer.EXPERTS
        else:
            biased = isinstance(getattr(down.module, "bias", None), Tensor)
            writer = Writer.BIAS if biased else Writer.WEIGHT
        last, made = post_norm or down or self.experts[0], self.block.made
        closing = [
            call for call in self._after(last) if call in self.norms and call.made.same_as(made)
        ]
        found |= {name: call.path for name, call in ending.items()}
        if closing:  # a post-LN block
            found["final_norm"], made = closing[-1].path, closing[-1].given
        return BlockSpec(
            writer=writer,
            dtype=str(made.now.dtype).removeprefix("torch."),
            **self._explain(residuals, last, made),
            **self._norm_form([ending[x] for x in ("post_norm", "inner_norm") if x in ending]),
            **found,
        )

    def _ending(self, readers: list[Call], downs: list[Call]) -> dict[str, Call]:
        """The last modules of the MLP, by their names in the form: its output matrix, if the
        experts do not end it, the norm of a scale writer, and that norm's other input.
        """
        last = max(downs + self.experts, key=self.calls.index, default=None)
        if last is None:
            raise self._refuse(
                f"nothing that is known reads what {', '.join(_paths(readers))} give:"
                " its MLP is not made of linear maps, or of experts in the layout of transformers"
                " (gate_up_proj and down_proj of three dimensions), JetMoE's or DBRX's"
            )
        after = [call for call in self._after(last) if call in self.norms]
        down = {} if last in self.experts else {"down": last}
        for place, norm in enumerate(after, 1):
            if norm.given.same_as(last.made):
                for outer in after[place:] if self.experts else []:
                    if addend := self._other_term(outer.given, norm.made):
                        return {"post_norm": outer, "inner_norm": norm, "addend": addend}
                return {"post_norm": norm, **down}
            if addend := self._other_term(norm.given, last.made):
                return {"post_norm": norm, "addend": addend, **down}
        gates = [call for call in readers if call.made.now.shape[-1] == 1]
        if not self.experts or (downs and not gates):
            return {"down": downs[-1]}
        if PatchedScaledExperts.fits(self.experts[0].module):
            raise self._refuse(
                f"{self.experts[0].path} scales what it reads, and nothing beside it can write"
            )
        return {}

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
        known = (*self.matrices, *self.norms)
        before = [
            call for call in self.calls[start:end] if is_matrix(call.module) and call not in known
        ]
        return [*before, others[0]]

    def _residuals(self, parallel: bool) -> list[tuple[str, ...]]:
        """Candidates for the residual stream before the MLP."""
        if parallel:
            return [("input of ", *(f"output of {mixer.path}" for mixer in self.mixers))]
        # a norm may have modules of its own, such as a gate
        z = self.z
        pre = _makers([call for call in self.calls if not call.given.same_as(z)], z)
        return [
            *((f"input of {call.path}",) for call in pre),
            (f"input of {self.first.path}",),
            *((f"output of {mixer.path}",) for mixer in self.mixers),  # with the sum inside (DBRX)
        ]

    def _explain(
        self, residuals: list[tuple[str, ...]], writer: Call, made: Value
    ) -> dict[str, Any]:
        """The residual stream and the factors for which ``factor · hidden + multiplier · MLP`` is
        the block's output, or the sum that it computes further with. Candidates for the numbers are
        attributes of the modules around the writer, and 1.

        A candidate that gives the output to the last bit is taken: that proves it.
        """
        holders = [call for call in self.calls if inside(writer.path, call.path)]
        factors = [
            value
            for module in (self.block.module, *(call.module for call in holders))
            for name, value in vars(module).items()
            if name.endswith(_FACTORS) and isinstance(value, float)
        ]
        factors = list(dict.fromkeys([*factors, 1.0]))
        for residual, mlp, branch, factor in product(residuals, holders, factors, factors[::-1]):
            found = {
                "residual": residual,
                "residual_multiplier": branch,
                "residual_factor": factor,
            }
            stream = [times(self._tap(name), factor) for name in residual]
            terms = [*stream, times(mlp.made.now, branch)]
            for form, total, parts, scale in self._sums(terms, mlp, branch, holders, made):
                if (factor == 1 or not form) and is_sum(total, parts, scale):
                    return found | form
        raise self._refuse(
            "its output is not its residual stream plus its MLP's output, each times 1 or an"
            " attribute with a name that ends in multiplier, scale or factor: a change of the MLP"
            " cannot replace what attention adds"
        )

    def _sums(
        self, terms: list[Tensor], mlp: Call, branch: float, holders: list[Call], made: Value
    ) -> Iterator[tuple[dict[str, Any], Tensor, list[Tensor], Tensor | float]]:
        """The sums that the block's output may be. Each has the fields of its form, the tensor to
        explain, its terms, and the factor of their sum.
        """
        output, others = made.now, [call for call in self.calls if call not in holders]
        yield {}, output, terms, 1.0
        for call in others if mlp is holders[-1] else []:  # the MLP may add it to its writer
            yield {}, output, [*terms, times(call.made.now, branch)], 1.0
        for call in self._after(holders[0]):
            if call in others:
                yield {"continues_after_sum": True}, call.given.now, terms, 1.0
        block = self.block.module
        for name, _ in _own_tensors(block):
            weight = weight_of(block, name)
            if weight.numel() == 1:
                yield {"continues_after_sum": True}, output, terms, weight
            elif len(terms) == 2 and weight.shape == terms[0].shape[-1:]:
                yield {"residual_weight": name}, output, [weight * terms[0], terms[1]], 1.0

    def _tap(self, name: str) -> Tensor:
        side, _, path = name.partition(" of ")
        calls = self.calls + self.mixers
        call = next((call for call in calls if call.path == path), self.block)
        return (call.given if side == "input" else call.made).now

    def _norm_form(self, norms: list[Call]) -> dict[str, Any]:
        """How norms apply their weights: each way is tried, and compared bit for bit."""
        forms = []
        for call in norms:
            x, output = call.given.now, call.made.now
            if not x.any():  # every form gives 0 for it
                x = torch.linspace(-1, 1, x.numel()).to(x).reshape(x.shape)
                output = call.module(x)
            try:
                form = rms_norm_form(call.module, x, output)
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
        self.calls = self.trace.calls
        return self._spec({"down": down}, [("input of ",)], mixer=True)
