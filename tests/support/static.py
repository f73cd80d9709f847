"""What the tests of static patches share: small examples, and a fit written out again."""

import copy
from typing import Any

import torch
from support.models import tokens
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch.ops import reference
from icl_patch.static import Example, LowRank, StaticInfo, StaticPatch

IDS = tokens(11, 3, 6)
# fp32: the low-rank term is rounded where the merged weights are not, over some ten modules
CLOSE = 100 * torch.finfo(torch.float32).eps


def random_patch(model: Any, seed: int, rank: int = 3) -> StaticPatch:
    """Random changes of every matrix of the MLPs, a third of the weights' size."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for path, module in model.named_modules():
        if ".mlp." in path and type(module) in (nn.Linear, Conv1D):
            shape = module.weight.shape
            n, k = shape if type(module) is nn.Linear else shape[::-1]
            u, v = (torch.randn(rank, size, generator=generator) for size in (n, k))
            changes[path] = LowRank(u, v * 0.3 / (rank * k) ** 0.5 * n**-0.5)
    return StaticPatch(StaticInfo.of(model, None, "random"), changes)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


def random_example(seed: int = 0, count: int = 8, answer: int = 3) -> Example:
    """Random ids of one length each, with given answers."""
    ids = tokens(seed, 3 * count + 1, 5).tolist()
    questions = tuple(tuple(row[:4]) for row in ids[:count])
    answers = tuple(tuple(row[:answer]) for row in ids[count : 2 * count])
    return Example(tuple(ids[-1]), questions, answers, prefix=(1,))


class ReferenceFit:
    """The sequential fit, without folds and ranks, on whole forward passes of copies of a model
    with changed weights; regressions by lstsq.
    """

    def __init__(self, model: nn.Module, example: Example, ridge: float) -> None:
        self.model, self.patched, self.ridge = model, copy.deepcopy(model), ridge
        rows = list(zip(example.questions, example.answers, strict=True))
        prefix, context = list(example.prefix), list(example.context)
        self.full = torch.tensor([[*prefix, *context, *q, *a[:-1]] for q, a in rows])
        self.kept = torch.tensor([[*prefix, *q, *a[:-1]] for q, a in rows])
        places = range(len(prefix) + len(context), self.full.shape[1])
        self.places = [*range(len(prefix)), *places]

    @torch.no_grad()
    def inputs(self, path: str, with_context: bool) -> Tensor:
        """What a module reads at the kept tokens, (n, K) fp64; "output of PATH": what it gives."""
        model = self.model if with_context else self.patched
        found: list[Tensor] = []
        wants_output, name = path.startswith("output of "), path.removeprefix("output of ")
        module = model.get_submodule(name)

        def note(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            value = out if wants_output else next(iter((*args, *kwargs.values())))
            found.append(value[0] if isinstance(value, tuple) else value)

        handle = module.register_forward_hook(note, with_kwargs=True)
        model(self.full if with_context else self.kept)
        handle.remove()
        (value,) = found
        value = value[:, self.places] if with_context else value
        return value.reshape(-1, value.shape[-1]).double()

    def solve(self, a: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
        """Δ (N, K)."""
        root = torch.ones(len(a), 1).double() if w is None else w.sqrt().unsqueeze(1)
        rho = self.ridge * (root * a).square().sum(0).mean()
        below = rho.sqrt() * torch.eye(a.shape[1]).double()
        rows = torch.cat([root * a, below])
        targets = torch.cat([root * t, torch.zeros(a.shape[1], t.shape[1]).double()])
        return torch.linalg.lstsq(rows, targets).solution.T

    @torch.no_grad()
    def change(self, path: str, change: Tensor) -> None:
        """Write a change (N, K) into the patched copy."""
        module = self.patched.get_submodule(path)
        module.weight += (change.T if isinstance(module, Conv1D) else change).to(module.weight)

    def weight(self, path: str) -> Tensor:
        """W (N, K) of the model."""
        module = self.model.get_submodule(path)
        weight = module.weight.detach().double()
        return weight.T if isinstance(module, Conv1D) else weight

    def fit_inputs(self, paths: list[str]) -> None:
        """Matrices that read one input."""
        z = self.inputs(paths[0], False)
        d = self.solve(z, self.inputs(paths[0], True) - z)
        for path in paths:
            self.change(path, self.weight(path) @ d)

    def fit_output(self, path: str, before: str, after: str, norm: str | None = None) -> None:
        """A matrix that writes: ``after`` with the context less ``before`` without it."""
        h = self.inputs(path, False)
        given = self.inputs(f"output of {path}", False)
        wanted = self.inputs(after, True) - self.inputs(before, False)
        if norm is None:
            self.change(path, self.solve(h, wanted - given))
            return
        module = self.model.get_submodule(norm)
        rms = given.square().mean(-1).sqrt()
        scale = 1 + module.weight.detach().double()
        target = reference.invert_rmsnorm(wanted, scale, rms, module.eps, given).hidden
        self.change(path, self.solve(h, target - given, 1 / rms.square()))
