"""The processes that run one model together, and how they go on together or not at all.

transformers' ``DistributedConfig`` splits a model over processes, the ranks of ``torchrun``. Each
call of the model is a part of each rank's program, so they must make the same calls. If one rank
alone refused a call, the others would wait for it. So the public calls run through
:meth:`Ranks.call`: an error on one rank is raised on all, a rank that has ended or hangs is an
error on the others after a timeout, and different arguments are an error before anything runs.

The ranks' messages go through a process group of their own. It waits longer than the model's own
groups, because it carries the errors of these.
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from icl_patch import errors
from icl_patch._version import __version__
from icl_patch.errors import RankError, UnsupportedModelError

DEFAULT_TIMEOUT = 300.0
_Result = TypeVar("_Result")
# besides those of icl_patch.errors; any other one is told in words
_KNOWN = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}
_known: "weakref.WeakKeyDictionary[nn.Module, Ranks]" = weakref.WeakKeyDictionary()


def mesh_of(model: nn.Module) -> Any:
    """transformers' device mesh of a model that is split over processes; None for another."""
    mesh = getattr(model, "_device_mesh", None)
    return None if mesh is None or mesh.size() == 1 else mesh


def ranks_of(model: nn.Module, timeout: float | None = None) -> "Ranks":
    """The ranks of a model; one if the model is not split.

    timeout: seconds, from now on.
    """
    if (known := _known.get(model)) is None:
        mesh = mesh_of(model)
        ranks = (0,) if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
        known = _known[model] = Ranks(ranks, DEFAULT_TIMEOUT if timeout is None else timeout)
        if mesh is not None:
            known.groups += mesh.get_all_groups()
            known.set_timeout(known.timeout)
    if timeout is not None:
        known.set_timeout(timeout)
    return known


def check_one_process(model: nn.Module) -> None:
    """Raises UnsupportedModelError for a model that is split over processes."""
    if (size := ranks_of(model).size) > 1:
        raise UnsupportedModelError(
            f"expected {type(model).__name__} in one process, got it split over {size}: spread it"
            " over devices with device_map"
        )


class Ranks:
    """The processes that run one model together.

    Args:
        ranks: their numbers.
        timeout: seconds that a rank waits for another.

    Attributes:
        groups: the process groups in which the model's own calls communicate.

    Raises:
        RankError: the ranks do not find each other.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float) -> None:
        self.size, self.ranks, self.timeout = len(ranks), ranks, timeout
        self.groups: list[dist.ProcessGroup] = []
        self._lost = ""
        if self.size == 1:
            return
        self._group: dist.ProcessGroup = self._answered(
            lambda: dist.new_group(
                list(ranks), self._patience, backend="gloo", use_local_synchronization=True
            )
        )

    @property
    def _patience(self) -> timedelta:
        """How long a rank waits for another's word, which may itself have waited in a call."""
        return timedelta(seconds=2 * self.timeout + 1)

    def set_timeout(self, timeout: float) -> None:
        """Wait for other ranks this many seconds, in the model's own calls too."""
        self.timeout = timeout
        if self.size > 1:
            for group in self.groups:
                group.set_timeout(timedelta(seconds=timeout))
            self._group.set_timeout(self._patience)

    # -- together or not at all

    def call(self, name: str, work: Callable[[], _Result]) -> _Result:
        """``work()`` of a public call ``name``, which all ranks make."""
        self.agree({"the call": name})
        return self.shared(work)

    def shared(self, work: Callable[[], _Result]) -> _Result:
        """``work()``; if it fails on some rank, the same error is raised on all.

        Raises:
            RankError: a rank has ended or does not answer.
        """
        try:
            result = work()
        except BaseException as error:
            if self.size > 1 and not getattr(error, "on_all_ranks", False):
                self._meet("shared", error=error)  # which raises
            raise
        self._meet("shared")
        return result

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all ranks have the same facts, by name.

        Raises:
            RankError: they differ, or a rank does not answer.
        """
        first, *others = self.exchange({name: str(fact) for name, fact in facts.items()})
        for rank, other in zip(self.ranks[1:], others, strict=True):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    got = f"{first.get(name)} on rank {self.ranks[0]}"
                    raise on_all_ranks(
                        RankError(
                            f"expected {name} to be the same on all ranks, got {got} and"
                            f" {other.get(name)} on rank {rank}"
                        )
                    )

    def any(self, flag: bool) -> bool:
        """Whether the flag is True on some rank."""
        return any(self._meet("any", flag))

    def exchange(self, word: Any) -> list[Any]:
        """The words of all ranks, objects that can be pickled, in the order of the ranks."""
        return self._meet("exchange", word)

    def _meet(self, place: str, word: Any = None, error: BaseException | None = None) -> list[Any]:
        """The words of all ranks at this place; raises if one of them has an error, is at another
        place, or does not come.
        """
        if self.size == 1:
            return [word]
        failure = None if error is None else (_is_lost(error), type(error).__name__, str(error))
        found: list[Any] = [None] * self.size
        self._answered(lambda: dist.all_gather_object(found, (place, word, failure), self._group))
        failures = [
            (*said[2], rank) for said, rank in zip(found, self.ranks, strict=True) if said[2]
        ]
        if failures:
            self._raise_first(failures, error)
        places = [said[0] for said in found]
        if len({*places}) > 1:
            self._lost = f"the ranks are at different places: {', '.join(places)}"
            raise on_all_ranks(RankError(self._lost))
        return [said[1] for said in found]

    def _raise_first(
        self, failures: list[tuple[bool, str, str, int]], error: BaseException | None
    ) -> NoReturn:
        """Raise the error of the first rank that has one of its own, on every rank."""
        lost, kind, message, rank = min(failures, key=lambda each: each[0])
        message = f"{message} (on rank {rank})"
        if any(each[0] for each in failures):  # a message has not come: the groups are of no use
            self._lost = message
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt
        known = _KNOWN.get(kind) or getattr(errors, kind, None)
        if known is not None and not lost:
            raise on_all_ranks(known(message)) from error
        raise on_all_ranks(RankError(f"{kind}: {message}")) from error

    def _answered(self, communicate: Callable[[], _Result]) -> _Result:
        """``communicate()``; raises RankError if a rank is lost, now or before."""
        if self._lost:
            raise on_all_ranks(
                RankError(f"the ranks have lost each other before ({self._lost}): start them again")
            )
        try:
            return communicate()
        except RuntimeError as error:
            self._lost = (
                "a rank does not answer: it has ended, or it did something else for"
                f" {self._patience.total_seconds():g} seconds"
            )
            raise on_all_ranks(RankError(self._lost)) from error

    def joined(
        self, parts: list[dict[str, Tensor]], device: torch.device
    ) -> list[dict[str, Tensor]]:
        """The parts of all ranks, those of the first rank first, on ``device``."""
        if self.size == 1:
            return parts
        own = [{name: x.detach().cpu() for name, x in part.items()} for part in parts]
        return [
            {name: x.to(device) for name, x in part.items()}
            for sent in self.exchange(own)
            for part in sent
        ]

    def same(self, x: Tensor) -> Tensor:
        """The first rank's tensor."""
        return x if self.size == 1 else self.exchange(x.cpu())[0].to(x.device)


def versions() -> dict[str, str]:
    """The versions that must be the same on all ranks for the same bits."""
    return {
        "the version of icl-patch": __version__,
        "the version of torch": torch.__version__,
        "the version of transformers": transformers.__version__,
        "ICL_PATCH_OPS": os.environ.get("ICL_PATCH_OPS", ""),
    }


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A hash of small tensors' shapes and contents."""
    contents = [x if x is None else (x.shape, x.tolist()) for x in tensors]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def _is_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank did not answer."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and ("gloo" in str(error) or "NCCL" in str(error))
    )


def on_all_ranks(error: Exception) -> Exception:
    """Mark an error that every rank raises at the same place."""
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error
