"""A static patch: one change of weights for every token, with a report on its quality."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from icl_patch.atomic_file import write_atomically
from icl_patch.errors import FingerprintMismatch, StaticPatchWarning
from icl_patch.layers.device_hooks import device_of
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.layers.swap import restore, swap
from icl_patch.models.forward import by_name, cache_in
from icl_patch.models.kv_cache import is_empty
from icl_patch.models.language_model import family_of
from icl_patch.models.prompts import Tokens
from icl_patch.models.ranks import check_one_process
from icl_patch.patch.fingerprints import (
    check_same_model,
    tokenizer_fingerprint,
    weight_fingerprint,
)
from icl_patch.patch.low_rank import LowRank
from icl_patch.patch.parameter_changes import ParameterChange
from icl_patch.patch.peft_export import write_peft
from icl_patch.patch.serialization import (
    check_change,
    check_finite,
    check_kind,
    file_parts,
    read_fields,
    read_file,
    reading,
)
from icl_patch.static.targets import StaticReport
from icl_patch.texts import check_path

KIND = "static"
_FRONT = """\
Every prompt must begin with the token of id {}, as those that it was fitted on. Most chat templates
and some tokenizers put it there; elsewhere put it in front of the ids.
"""
_UNKNOWN_FRONT = "With which token prompts are to begin is not known.\n"


@dataclass(frozen=True)
class StaticInfo:
    """The model and the fit that a static patch comes from.

    Attributes:
        model: the name or path that the model was loaded from.
        fingerprint: SHA-256 of its weights; None if unknown.
        tokenizer: SHA-256 of the tokenizer; None if there was none.
        family: the model's type.
        method: how the patch was made, such as "distill".
        front: a tuple with the id at the start of every prompt of the fit. Later prompts should
            start with it too. () if unknown.
        dtype: the model's, such as "torch.float32"; None if unknown.
    """

    model: str
    fingerprint: str | None
    tokenizer: str | None
    family: str
    method: str
    front: Tokens = ()
    dtype: str | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        method: str,
        front: Tokens = (),
    ) -> "StaticInfo":
        """The info of a model in its present state."""
        return cls(
            model=model.config.name_or_path or type(model).__name__,
            fingerprint=weight_fingerprint(model),
            tokenizer=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            family=family_of(model),
            method=method,
            front=front,
            dtype=str(model.dtype),
        )


@dataclass(frozen=True, eq=False)
class StaticPatch:
    """A change ``ΔW = Σ_r u_r v_rᵀ`` of some matrices of a model, the same for every token.

    Attributes:
        info: the model and the fit that the patch comes from.
        changes: path of the module in the model -> its change, u (R, N) and v (R, K) fp32.
        report: the measurements of the fit; None for a combination of patches.
    """

    info: StaticInfo
    changes: dict[str, LowRank]
    report: StaticReport | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        """The largest rank of a change."""
        return max((change.rank for change in self.changes.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(change.u.nbytes + change.v.nbytes for change in self.changes.values())

    def __repr__(self) -> str:
        return (
            f"StaticPatch({self.info.method}, {len(self.changes)} matrices, rank {self.rank},"
            f" {self.nbytes:,} bytes)"
        )

    # -- combining

    def __add__(self, other: "StaticPatch") -> "StaticPatch":
        """The sum of two patches of one model: ``ΔW + ΔW'``, of the sum of the ranks."""
        if self.info.fingerprint != other.info.fingerprint:
            raise FingerprintMismatch(
                f"expected two patches of one model, got one of {self.info.model} (weights"
                f" {self.info.fingerprint!s:.12}…) and one of {other.info.model} (weights"
                f" {other.info.fingerprint!s:.12}…)"
            )
        changes = dict(self.changes)
        for path, change in other.changes.items():
            own = changes.get(path)
            if own is not None:
                change = LowRank(torch.cat([own.u, change.u]), torch.cat([own.v, change.v]))
            changes[path] = change
        fronts = {patch.info.front for patch in (self, other)} - {()}
        front = fronts.pop() if len(fronts) == 1 else ()
        return StaticPatch(replace(self.info, method="combination", front=front), changes)

    def __mul__(self, factor: float) -> "StaticPatch":
        """The patch scaled: ``factor ΔW``."""
        changes = {path: LowRank(factor * c.u, c.v) for path, c in self.changes.items()}
        return StaticPatch(replace(self.info, method="combination"), changes)

    __rmul__ = __mul__

    def __sub__(self, other: "StaticPatch") -> "StaticPatch":
        return self + -1.0 * other

    def truncated(self, rank: int) -> "StaticPatch":
        """The nearest changes of at most a rank, by the singular values of each ΔW.

        Raises:
            ValueError: the rank is not positive.
        """
        if rank < 1:
            raise ValueError(f"expected a rank of at least 1, got {rank}")
        changes = {path: change.truncated(rank) for path, change in self.changes.items()}
        return replace(self, changes=changes, report=None)

    # -- using it

    @contextmanager
    def applied(
        self, model: PreTrainedModel, *, check_front: bool = True
    ) -> Iterator[PreTrainedModel]:
        """Within this context the model computes with the changed weights, by fused products. Its
        parameters do not change: ``state_dict`` and ``save_pretrained`` return them without the
        change, and warn. A copy of the model keeps the change until :func:`icl_patch.detach`.

        Args:
            model: the patch's model.
            check_front: warn once if the first token of a row is not ``info.front``.

        Raises:
            FingerprintMismatch: the patch belongs to another model.
            PatchFormatError: a change fits no matrix of the model.
            TypeError: a module is patched already.
        """
        self.check_model(model)
        with ExitStack() as stack:
            for path, change in self.changes.items():
                module = swap(model, path, PatchedLinear)
                stack.callback(restore, (model,), module)
                _set(module, change)
            if check_front and self.info.front:
                check = _FrontCheck(self.info.front[0])
                stack.enter_context(model.register_forward_pre_hook(check, with_kwargs=True))
            yield model

    @torch.no_grad()
    def merge(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add the changes permanently to the model's own weights, in fp64 and rounded once. The
        model then has another fingerprint. Returns the model.

        Raises:
            FingerprintMismatch, PatchFormatError: as :meth:`applied`; no weight is changed then.
            TypeError: a module is not a linear map with a plain weight, which the fit needs too; it
                shares its weight with another module, like a head tied to the embeddings; or the
                weight was created in inference mode, and this is called outside.
        """
        self.check_model(model)
        self._check_own_weights(model)
        changed = []
        for path, change in self.changes.items():
            linear = PatchedLinear(model.get_submodule(path))
            _set(linear, change)
            changed.append((linear.base_layer, linear.merge()))
        for module, merged in changed:
            module.load_state_dict(merged.state_dict())
        return model

    def _check_own_weights(self, model: PreTrainedModel) -> None:
        for path in self.changes:
            module = model.get_submodule(path)
            weight = getattr(module, "weight", None)
            holders = [
                name
                for name, part in model.named_modules()
                if any(own is weight for own in part._parameters.values())
            ]
            if isinstance(weight, Tensor) and weight.is_meta:
                raise TypeError(
                    f"expected weights in memory to merge into, got those of {path} offloaded: use"
                    " applied, or load the model without offloading"
                )
            fixed = any(own.is_inference() for own in module.parameters())
            if fixed and not torch.is_inference_mode_enabled():
                raise TypeError(
                    f"expected weights that can be written, got those of {path}, created in"
                    " inference mode: merge within torch.inference_mode(), or load the model"
                    " outside"
                )
            if len(holders) > 1:
                raise TypeError(
                    f"expected a weight of {path} alone to merge into, got one that"
                    f" {' and '.join(holders)} share: use applied, or untie them"
                )

    # -- check against a model

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises FingerprintMismatch unless the model has the weights that the patch was fitted on,
        PatchFormatError unless every change fits one of its matrices, and TypeError if a module is
        already patched.
        """
        check_one_process(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, change in self.changes.items():
            module = modules.get(path)
            if isinstance(module, PatchedModule):
                raise TypeError(
                    f"expected a model without patched modules, got {path} patched already: leave"
                    " that context first, or add the patches"
                )
            transposed = isinstance(module, Conv1D)
            as_factors = ParameterChange(path, "weight", change.u, change.v, transposed=transposed)
            check_change(path, as_factors, model)
        info = self.info
        if info.fingerprint is not None:
            check_same_model(model, info.model, info.dtype, info.fingerprint)

    # -- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patch to a safetensors file of format 3 and kind "static"; the file appears
        whole or not at all.

        Raises:
            OSError: the file cannot be written.
            PatchFormatError: a factor is not finite.
            ValueError: the path is not UTF-8.
        """
        check_path(path)
        tensors = {
            f"{name}.{side}": getattr(change, side).contiguous().cpu()
            for name, change in self.changes.items()
            for side in ("u", "v")
        }
        check_finite(tensors)
        header: dict[str, Any] = {"kind": KIND, **asdict(self.info)}
        header["report"] = None if self.report is None else self.report.to_json()
        write_atomically(path, file_parts(header, tensors))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "StaticPatch":
        """Read a file that :meth:`save` wrote, and check all of it before returning the patch.

        Raises:
            PatchFormatError: the file is damaged or not a static patch, or a change does not fit
                the model.
            FingerprintMismatch: the patch was fitted with other weights or another tokenizer than
                the given ones.
            OSError: the file cannot be read.
            ValueError: the path is not UTF-8.
        """
        header, tensors = read_file(path)
        check_kind(
            header, KIND, "ContextPatch.load and icl-patch replay read patches for each token"
        )
        own = read_fields(header, StaticInfo, "front")
        with reading("front, report and factors"):
            info = StaticInfo(**own, front=tuple(header["front"]))
            report = header["report"] and StaticReport.from_json(header["report"])
            paths = sorted({name[:-2] for name in tensors}, key=_numbers_as_numbers)
            changes = {path: LowRank(tensors[f"{path}.u"], tensors[f"{path}.v"]) for path in paths}
        patch = cls(info, changes, report)
        if model is not None:
            patch.check_model(model)  # another model has another tokenizer too: name the model
        if tokenizer is not None and patch.info.tokenizer not in (
            None,
            tokenizer_fingerprint(tokenizer),
        ):
            raise FingerprintMismatch(
                "expected a patch fitted with the given tokenizer, got one of another tokenizer"
            )
        return patch

    def to_peft(self, folder: str | os.PathLike[str], model: PreTrainedModel) -> int:
        """Write the patch as a LoRA in the layout of PEFT, which vLLM loads too.

        All matrices get the same rank, padded with zeros to one that vLLM allows. ``lora_alpha`` is
        that rank, so that PEFT multiplies by 1. A README.md in the folder names the token that
        prompts should start with.

        Args:
            folder: created if it does not exist; its files are replaced.
            model: the patch's model.

        Returns:
            The rank in the files.

        Raises:
            FingerprintMismatch, PatchFormatError: as :meth:`applied`.
            ValueError: the rank is above all that vLLM allows, or some matrices are stored
                transposed and others are not.
        """
        self.check_model(model)
        transposed = {isinstance(model.get_submodule(path), Conv1D) for path in self.changes}
        rank = write_peft(folder, self.changes, self.info.model, transposed)
        front = _FRONT.format(*self.info.front) if self.info.front else _UNKNOWN_FRONT
        card = f"A static patch of icl-patch as a LoRA for {self.info.model}.\n\n{front}"
        write_atomically(Path(folder) / "README.md", [card.encode()])
        return rank


class _FrontCheck:
    """A hook of a patched model: the first call on rows that do not begin with ``front`` gives a
    warning.
    """

    def __init__(self, front: int) -> None:
        self._front, self._has_warned = front, False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the rows of a call."""
        if self._has_warned or torch.compiler.is_compiling():
            return
        given = by_name(model.forward, args, kwargs)
        front, cache, ids = self._front, cache_in(given), given.get("input_ids")
        if ids is None or (cache is not None and not is_empty(cache)):
            return
        mask = given.get("attention_mask")
        first = ids[:, 0]
        if isinstance(mask, Tensor) and mask.dim() == 2:
            first = ids.gather(1, mask.to(ids.device).long().argmax(1, keepdim=True))[:, 0]
        # a copy of the model keeps this hook, also when it is detached
        patched = any(isinstance(module, PatchedModule) for module in model.modules())
        if patched and not bool((first == front).all()):
            self._has_warned = True
            warnings.warn(
                f"expected prompts that begin with the token {front}, as those that the static"
                f" patch was fitted on, got one that begins with {int(first[first != front][0])}:"
                " put it in front",
                StaticPatchWarning,
                stacklevel=6,
            )


def mean(patches: Sequence[StaticPatch]) -> StaticPatch:
    """The mean of patches of one model: ``Σ ΔW / n``.

    Raises:
        ValueError: there are no patches.
        FingerprintMismatch: they belong to different models.
    """
    if not patches:
        raise ValueError("expected at least one patch, got none")
    total = patches[0]
    for patch in patches[1:]:
        total = total + patch
    return (1 / len(patches)) * total


def _set(module: PatchedLinear, change: LowRank) -> None:
    """Let a module compute with a change, which goes to its device."""
    device = device_of(module.base_layer)
    u, v = (factor.to(device).unsqueeze(0) for factor in (change.u, change.v))
    module.set_patch(u, v, shared=True)


def _numbers_as_numbers(path: str) -> list[tuple[int, str]]:
    """A key that sorts block 10 behind block 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
