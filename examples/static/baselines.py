"""The baselines of static patches: steering vectors, Mazzawi's one-shot form, prompt
tuning. Each returns a function from ids (B, T) to logits (B, T, V) without the context.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.static.block_parts import weight_of
from icl_patch.static.block_runner import Batch, BlockRunner
from icl_patch.static.report import plain_logits, spread
from icl_patch.static.ridge import LowRank, choose_ridge, moments_of, sums
from icl_patch.static.static_patch import StaticInfo, StaticPatch

Logits = Callable[[Tensor], Tensor]
_FACTORS = (0.5, 1.0, 1.5, 2.0)


def mean_kl(batches: Sequence[Batch], wanted: Sequence[Tensor], logits: Logits) -> float:
    """Mean KL(with context ‖ logits) over the answers' tokens."""
    total, count = 0.0, 0
    for batch, teacher in zip(batches, wanted, strict=True):
        p, q = (x[batch.answer].log_softmax(-1) for x in (teacher, logits(batch.student.ids)))
        total += float((p.exp() * (p - q)).sum())
        count += len(p)
    return total / count


@contextmanager
def adding(layers: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Within this context vectors (d,) are added to the outputs of blocks, at all tokens but the
    first.
    """

    def hook(vector: Tensor) -> Any:
        def add(_module: nn.Module, _args: Any, out: Any) -> Any:
            hidden = out[0] if isinstance(out, tuple) else out
            changed = torch.cat([hidden[:, :1], hidden[:, 1:] + vector], 1)
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        return add

    with ExitStack() as hooks:
        for layer, vector in layers.items():
            hooks.callback(layer.register_forward_hook(hook(vector)).remove)
        yield


def steering_vector(runner: BlockRunner, batches: Sequence[Batch]) -> tuple[Logits, int]:
    """The mean difference of the residual stream at the answers' tokens, added behind one block;
    block and factor are those with the smallest KL on the sample.
    """
    wanted = [spread(batch, plain_logits(runner, batch.teacher.ids)) for batch in batches]
    best, chosen = float("inf"), (0, torch.zeros(()))
    for index in range(len(runner.layers) - 1):
        differences = []
        for batch in batches:
            batch.teacher.hidden = runner.run(index, batch.teacher)
            batch.student.hidden = runner.run(index, batch.student)
            change = spread(batch, batch.teacher.hidden) - batch.student.hidden
            differences.append(change[batch.answer])
        mean = torch.cat(differences).mean(0)
        for factor in _FACTORS:
            with adding({runner.layers[index]: factor * mean}):
                kl = mean_kl(batches, wanted, lambda ids: plain_logits(runner, ids))
            if kl < best:
                best, chosen = kl, (index, factor * mean)

    def logits(ids: Tensor) -> Tensor:
        with adding({runner.layers[chosen[0]]: chosen[1]}):
            return plain_logits(runner, ids)

    return logits, chosen[1].nbytes


def one_shot(runner: BlockRunner, batches: Sequence[Batch], folds: int) -> tuple[Logits, int]:
    """Mazzawi et al. (2025): in every block a matrix on the MLP's input and a vector, both fitted
    on the stream with the context alone: readers by ridge from z to z_ctx, and the mean δ.
    """
    changes: dict[str, LowRank] = {}
    vectors: dict[nn.Module, Tensor] = {}
    for index, block in enumerate(runner.blocks):
        paths = {"hidden": block.hidden, "z": block.readers[0]}
        found: dict[str, list[Tensor]] = {}
        with runner.taps(index, paths) as taps:
            for batch in batches:
                own = spread(batch, batch.teacher.hidden)
                batch.teacher.hidden = runner.run(index, batch.teacher)
                values = {name: batch.aligned(x) for name, x in taps.items()}
                runner.run(index, batch.student, own)
                for name, x in taps.items():
                    found.setdefault(f"{name}_ctx", []).append(values[name])
                    found.setdefault(name, []).append(batch.own(x))
        rows = {name: torch.cat(values) for name, values in found.items()}
        vectors[runner.layers[index]] = (rows["hidden_ctx"] - rows["hidden"]).mean(0)
        weights = [
            weight_of(runner.model.get_submodule(f"{block.path}.{path}")) for path in block.readers
        ]
        fold = torch.cat([torch.full((int(batch.valid.sum()),), batch.fold) for batch in batches])
        ones = torch.ones(len(fold), dtype=torch.float64)
        by_fold = moments_of(rows["z"], rows["z_ctx"] - rows["z"], ones, fold, folds)
        moments = sums(by_fold)
        ridge, _ = choose_ridge(by_fold, moments[:-1], left=torch.cat(weights))
        solution = moments[-1].solve(ridge)
        for path, weight in zip(block.readers, weights, strict=True):
            changes[f"{block.path}.{path}"] = solution.low_rank(None, weight).to(torch.float32)
    patch = StaticPatch(StaticInfo("", None, None, "", "one-shot"), changes)

    def logits(ids: Tensor) -> Tensor:
        with patch.applied(runner.model), adding(vectors):
            return plain_logits(runner, ids)

    return logits, patch.nbytes + sum(vector.nbytes for vector in vectors.values())


def prompt_tuning(
    runner: BlockRunner,
    batches: Sequence[Batch],
    tokens: int,
    steps: int | None,
    seed: int,
    seconds: float = math.inf,
) -> tuple[Logits, int]:
    """Soft tokens behind the first token, trained by KL on whole batches; they start from
    embeddings of random tokens. Training ends after so many steps, or seconds of the CPU.
    """
    began = time.process_time()
    model: PreTrainedModel = runner.model
    embedding = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
        soft = embedding(ids)[0].clone().requires_grad_()
        wanted = [spread(batch, plain_logits(runner, batch.teacher.ids)) for batch in batches]

    def logits(ids: Tensor) -> Tensor:
        embedded = embedding(ids)
        middle = soft.expand(len(ids), -1, -1)
        given = torch.cat([embedded[:, :1], middle, embedded[:, 1:]], 1)
        out = model(inputs_embeds=given, use_cache=False).logits
        return torch.cat([out[:, :1], out[:, 1 + tokens :]], 1)

    optimizer = torch.optim.Adam([soft], lr=0.05)
    for step in itertools.count() if steps is None else range(steps):
        if time.process_time() - began > seconds:
            break
        at = step % len(batches)
        batch = batches[at]
        with torch.enable_grad():
            p, q = (
                x[batch.answer].log_softmax(-1) for x in (wanted[at], logits(batch.student.ids))
            )
            (gradient,) = torch.autograd.grad((p.exp() * (p - q)).sum() / len(p), [soft])
        soft.grad = gradient
        optimizer.step()
    return logits, soft.nbytes
