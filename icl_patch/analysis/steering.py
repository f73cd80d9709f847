"""Patches, steering vectors and rank-1 model edits (ROME): one thing in three forms.

Let v and v_C be the residual stream before a block's MLP, without and with the context, and z and
z_C the inputs of its matrix W. The patch has the effect of the steering vector ``s = v_C - v``,
added at this place::

    W z_C = (W + ΔW) z,   ΔW = u kᵀ,   u = W (z_C - z),   kᵀz = 1,

and the output matrix adds s itself, because the residual stream carries it on. Any k with ``kᵀz =
1`` has this effect on the token; k decides what ΔW does to other inputs z', namely ``(kᵀz') u``::

    k = z / ‖z‖²               the papers'; ΔW has the least norm
    k = C⁻¹z / (zᵀC⁻¹z)        ROME's, C = E[z'z'ᵀ]; ΔW z' is least on average over z'

Source: Dherin et al. (2025), Theorem 2.2 and Section 5; Meng et al. (2022), Equation 2.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.block_spec import Block, Writer
from icl_patch.models.model_checks import check_eval
from icl_patch.models.trace import first_tensor
from icl_patch.patch.context_patch import ContextPatch


def steering_vectors(patch: ContextPatch) -> Tensor:
    """``s_l = v_C - v`` of every block and kept token, from the output factors: (L, B, T, d).

    An exact patch's also have its corrections of rounding.

    Raises:
        UnsupportedModelError: a block's output is taken up by a norm's scale or by experts, whose
            factors do not tell s alone; or it has no MLP, or weighs its residual stream element by
            element.
    """
    found = []
    for place, layer in zip(patch.layer_indices, patch.layers, strict=True):
        block = patch.blocks[place]
        spec = block.spec
        kind = spec.writer
        if kind not in (Writer.WEIGHT, Writer.BIAS) or spec.mixer or spec.residual_weight:
            raise UnsupportedModelError(
                "expected blocks with an MLP that ends in a matrix or a bias, and a plain residual"
                f" stream, got {block.path} with {spec}"
            )
        name = "u" if kind is Writer.WEIGHT else "bias_change"
        added = layer[f"{spec.down}.{name}"]
        found.append(added * (spec.residual_multiplier / spec.residual_factor))
    return torch.stack(found)


@contextmanager
def steered(
    model: PreTrainedModel, blocks: Sequence[Block], vectors: Tensor
) -> Iterator[PreTrainedModel]:
    """Within this context ``vectors[l]`` is added to the residual stream before block l's MLP::

        with steered(model, patch.blocks, steering_vectors(patch)):
            model(patch.kept_ids, position_ids=patch.position_ids)   # as with the context

    The weights stay as they are. Each call must have as many rows and tokens as ``vectors``. A
    model with chunked attention cuts its chunks elsewhere than behind the context.

    Args:
        model: without a patcher. blocks: of a patch. vectors: (L, B, T, d).

    Raises:
        ValueError: there are not as many vectors as blocks; the model is training; or a call has
            other rows or tokens.
    """
    if len(vectors) != len(blocks):
        raise ValueError(
            f"expected a vector for each of {len(blocks)} blocks, got {len(vectors)} vectors"
        )
    check_eval(model.modules())

    def check(_module: Any, args: Any, kwargs: Any) -> None:
        stream = first_tensor((*args, kwargs))
        assert stream is not None
        rows, expected = tuple(stream.shape[-3:-1]), tuple(vectors.shape[1:3])
        if rows != expected:
            raise ValueError(
                f"expected a call of (rows, tokens) {expected}, as the vectors have, got {rows}"
            )

    with ExitStack() as hooks:
        for block, vector in zip(blocks, vectors, strict=True):
            layer = model.get_submodule(block.path)  # inside it the rows may be flat
            hooks.callback(layer.register_forward_pre_hook(check, with_kwargs=True).remove)
            kind, _, path = block.spec.residual[-1].partition(" of ")
            module = model.get_submodule(block.path_of(path))

            def add(_module: Any, args: Any, out: Any = None, vector: Tensor = vector) -> None:
                stream = first_tensor(args if out is None else out)
                assert stream is not None
                # in place: the block adds this tensor to its MLP's output too
                stream.add_(vector.to(stream).reshape(stream.shape))

            install = (
                module.register_forward_pre_hook
                if kind == "input"
                else module.register_forward_hook
            )
            hooks.callback(install(add).remove)
        yield model


@torch.no_grad()
def input_covariances(
    model: PreTrainedModel, blocks: Sequence[Block], ids: Tensor, ridge: float = 1e-4
) -> list[dict[str, Tensor]]:
    """``C = E[z zᵀ] + ridge · mean(diag) · 1`` of the inputs that each ``v`` of a patch reads, over
    the tokens of a text: for every block (K, K) fp64 by the factor's name. Experts are left out.

    Args:
        model: without a patcher. blocks: of a patch. ids: (B, T) int64, without padding.
        ridge: makes C invertible when there are fewer tokens than K.

    Raises:
        ValueError: the model is training.
    """
    check_eval(model.modules())
    found: list[dict[str, Tensor]] = [{} for _ in blocks]

    def keep(place: int, name: str) -> Any:
        def hook(_module: Any, args: Any) -> None:
            z = first_tensor(args)
            assert z is not None
            z = z.detach().double().flatten(0, -2)
            second = z.mT @ z / len(z)
            second.diagonal().add_(ridge * second.diagonal().mean())
            found[place][name] = second

        return hook

    with ExitStack() as hooks:
        for place, block in enumerate(blocks):
            for name, path in _read_by(block).items():
                module = model.get_submodule(block.path_of(path))
                hooks.callback(module.register_forward_pre_hook(keep(place, name)).remove)
        model(ids, use_cache=False)
    return found


def _read_by(block: Block) -> dict[str, str]:
    """The factors ``v`` of a block that one matrix's input gives, and that matrix."""
    spec = block.spec
    shared = [reader for reader in spec.readers if reader not in spec.separately_normed]
    paths = {f"{reader}.v": reader for reader in spec.readers if reader in spec.separately_normed}
    if spec.reads and shared:
        paths["readers.v"] = shared[0]
    if spec.down is not None:
        paths[f"{spec.down}.v"] = spec.down
    return paths


def in_rome_form(patch: ContextPatch, covariances: Sequence[Mapping[str, Tensor]]) -> ContextPatch:
    """The patch with ``C⁻¹z / (zᵀC⁻¹z)`` in place of ``z / ‖z‖²``.

    On its own tokens it has the same effect up to rounding, on others a smaller one on average.

    Args:
        covariances: of :func:`input_covariances`; factors without one stay as they are.

    Raises:
        ValueError: there are not as many as layers; or the patch is exact: it holds for its own v
            to the last bit.
    """
    if len(covariances) != len(patch.layers):
        raise ValueError(
            f"expected covariances for each of {len(patch.layers)} layers, got {len(covariances)}"
        )
    if patch.info.update == "exact":
        raise ValueError(
            "expected a direct or stable patch, got an exact one, which holds for its own v alone:"
            " compute it with update='stable'"
        )
    layers = []
    for layer, of_layer in zip(patch.layers, covariances, strict=True):
        changed = dict(layer)
        for name in of_layer.keys() & layer.keys():
            v = layer[name].double()
            solved = torch.linalg.solve(of_layer[name], v.unsqueeze(-1)).squeeze(-1)
            # v = z / ‖z‖², so that C⁻¹z / (zᵀC⁻¹z) = ‖v‖² C⁻¹v / (vᵀC⁻¹v)
            along = (v * solved).sum(-1, keepdim=True)
            size = v.square().sum(-1, keepdim=True)
            scale = torch.where(along > 0, size / along, 0.0)
            changed[name] = (scale * solved).to(layer[name].dtype)
        layers.append(changed)
    return replace(patch, layers=tuple(layers), logits=None, digest=None, report=None)
