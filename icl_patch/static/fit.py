"""Fitting a static patch: the call, its checks, and the choice of a rank."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.recording.attached_model import check_training
from icl_patch.static.block_parts import check_parts, matrix_shapes, read_blocks
from icl_patch.static.block_runner import BlockRunner, make_batches
from icl_patch.static.distill import Distillation, distill
from icl_patch.static.examples import (
    Example,
    Row,
    answered,
    check_rows,
    preserved_rows,
    question_numbers,
    rows_of,
)
from icl_patch.static.fit_state import FitState, RidgeOptions, digest
from icl_patch.static.plan import AUTO_RANKS, Plan, Size, plan_distillation, plan_ridge
from icl_patch.static.processes import Processes
from icl_patch.static.report import Quality, StaticReport, ends_with_context, measure, spread
from icl_patch.static.ridge import LAMBDAS, LowRank
from icl_patch.static.sequential import Progress, fit_blocks
from icl_patch.static.static_patch import StaticInfo, StaticPatch

METHODS = ("auto", "ridge", "distill")
_AUTO_GAIN = 0.95  # the smallest rank with this share of the best rank's gain in KL
_NO_FOLDS_LAMBDA = 1e-2
_COMPARED = 16  # the fewest questions of which distillation holds out enough to compare


def fit(
    model: PreTrainedModel,
    examples: Sequence[Example],
    method: str = "auto",
    *,
    parts: Iterable[str] = ("readers", "writer"),
    rank: int | str | None = 8,
    preserve: Sequence[Sequence[int]] = (),
    kappa: float = 1.0,
    preserve_first: float = 10.0,
    folds: int = 4,
    lambdas: Sequence[float] = LAMBDAS,
    distillation: Distillation | None = None,
    start: StaticPatch | None = None,
    held_out: Sequence[Example] = (),
    state: str | os.PathLike[str] | None = None,
    max_new_tokens: int = 64,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
    hidden_folder: str | os.PathLike[str] | None = None,
) -> StaticPatch:
    """One change of weights with which the model, without the contexts of the examples, answers as
    it does with them.

    Args:
        model: a causal language model without experts, parallel blocks and recurrent layers.
        examples: contexts and questions; where they have no answers, the model answers greedily
            with the context, with at most ``max_new_tokens``.
        method: ``"distill"``, gradient descent on the KL divergence to the model with its context;
            ``"ridge"``, a sequence of ridge regressions, forward passes only; ``"auto"``, both,
            and of the two patches the one with the smaller held-out KL + κ KL on the preserved
            texts. With fewer than 16 questions and no ``held_out``, ridge alone: distillation would
            be measured on one or two.
        parts: the matrices that may change: ``"readers"`` of the MLP, its ``"writer"``, attention's
            output ``"o_proj"``, and ``"qk"``, its queries and keys.
        rank: of each change; with ``method="ridge"`` also None, no limit, or ``"auto"``, the
            smallest of 1, 2, 4, … 32 with 95 % of the gain in held-out KL of the best.
        preserve: ids of texts on which the patched model is to stay as it is. Without any, prompts
            that have nothing to do with the examples may suffer.
        kappa: the weight of all preserved tokens beside that of all other tokens.
        preserve_first: ridge multiplies κ by it in the first block and divides by it in the last,
            geometrically between them; 1: the same weight in all blocks.
        folds: a ridge fit splits the questions into as many; λ and the report come from the
            questions that a fit has not seen. 1 fits without them, with λ = 0.01; ``"auto"`` then
            needs ``held_out``. It takes fewer folds if there are fewer questions.
        lambdas: the values of λ to choose from, relative to the mean square of the input.
        distillation: steps, learning rate and the like, for ``"distill"``.
        start: a patch from which ``"distill"`` starts, such as a ridge fit or a sum of patches;
            its changes are cut to ``rank``. Only with this method.
        held_out: examples on which the patch is measured, and ``"distill"`` stops early, instead of
            a part of ``examples``.
        state: a folder; finished blocks (ridge) or checkpoints (distill) are written to it, and a
            stopped fit continues from them.
        max_new_tokens: of an answer that the model gives.
        tokenizer: its fingerprint goes into the patch.
        on_plan: called with the :class:`Plan` before the fit starts.
        progress: called with (done, total).
        group: the processes of ``torch.distributed`` that make one ridge fit together: each gives
            examples and preserved texts of its own, and a ``state`` folder of its own, which serves
            only with the same examples in all of them; all other arguments are the same. S and C of
            a matrix are summed over the processes before it is solved, so all get the patch and the
            report of all rows. Equal questions of several processes are in the same fold. All give
            ``held_out``, or none. If one process raises an error, the others raise a
            ``ProcessError``.
        hidden_folder: a folder on a disk, to which a ridge fit writes the hidden states of all
            tokens between the blocks, its targets and the masks; by default they are in memory. The
            plan tells their size.

    Returns:
        The patch, with a :class:`icl_patch.static.report.StaticReport`.

    Raises:
        UnsupportedModelError: the model has a block that cannot hold a static patch.
        ValueError: an option is not known; there are fewer questions than folds; the rank is above
            that of a matrix; contexts share nothing that one patch can hold; activations are NaN;
            the model is training with dropout; ``start`` changes other matrices than those of
            ``parts``; a held-out question is among the examples;
            ``group`` or ``hidden_folder`` is given for another method than ``"ridge"``, or
            ``start`` for another than ``"distill"``; ``hidden_folder`` does not exist; or ``state``
            is no folder, or of another model or fit.
        FingerprintMismatch: ``start`` is of another model.
        ProcessError: another process of ``group`` has failed; its own error tells the reason.
    """
    processes = Processes(group, model.device)
    with processes.failing_together(), torch.inference_mode(False):
        if method != "ridge" and (group is not None or hidden_folder is not None):
            raise ValueError(
                f'expected method="ridge" with several processes or a hidden_folder, got {method!r}'
            )
        if method != "distill" and start is not None:
            raise ValueError(f'expected method="distill" with a start, got {method!r}')
        if hidden_folder is not None and not Path(hidden_folder).is_dir():
            raise ValueError(
                "expected hidden_folder to be a folder that exists, got"
                f" {os.fspath(hidden_folder)!r}"
            )
        if state is not None and Path(state).exists() and not Path(state).is_dir():
            raise ValueError(f"expected state to be a folder, got the file {os.fspath(state)!r}")
        if not lambdas or not all(0 < ridge < math.inf for ridge in lambdas):
            raise ValueError(f"expected positive lambdas, got {tuple(lambdas)}")
        check_training(model, any(module.training for module in model.modules()))
        if not 0 < preserve_first < math.inf:
            raise ValueError(f"expected a positive preserve_first, got {preserve_first}")
        job = _Job(model, examples, method, parts, rank, preserve, kappa, folds, held_out)
        job.runner.processes, job.runner.folder = processes, hidden_folder
        described = job.parts, rank, kappa, folds, preserve_first, lambdas, bool(held_out)
        info = StaticInfo.of(model, tokenizer, method)
        processes.check_same(f"weights {info.fingerprint!s:.12}… with {described}")
        job.prepare(max_new_tokens)
        settings = distillation or Distillation()
        if on_plan is not None:
            on_plan(job.plan(settings))
        began = time.perf_counter()
        found = {}
        for each in job.methods:
            folder = state if state is None or method != "auto" else Path(state) / each
            if each == "ridge":
                found[each] = job.ridge(lambdas, preserve_first, folder, progress)
            else:
                found[each] = job.distill(settings, start, folder, progress)
        losses = {each: report.loss(kappa) for each, (_, report) in found.items()}
        chosen = min(losses, key=losses.__getitem__)
        changes, report = found[chosen]
        job.check_shared(report)
    patch = StaticPatch(replace(info, method=chosen), changes)
    seconds, compared = time.perf_counter() - began, losses if len(losses) > 1 else {}
    report = replace(report, seconds=seconds, nbytes=patch.nbytes, losses=compared)
    return replace(patch, report=report)


class _Job:
    """One fit: its rows and its checks."""

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        method: str,
        parts: Iterable[str],
        rank: int | str | None,
        preserve: Sequence[Sequence[int]],
        kappa: float,
        folds: int,
        held_out: Sequence[Example],
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"expected method {', '.join(METHODS)}, got {method!r}")
        if rank == "auto" and (method != "ridge" or folds < 2):
            raise ValueError('expected method="ridge" and at least 2 folds with rank="auto"')
        if not 0 <= kappa < math.inf or folds < 1:
            raise ValueError(f"expected kappa ≥ 0 and folds ≥ 1, got {kappa} and {folds}")
        questions = {(example.prefix, ids) for example in examples for ids in example.questions}
        if not questions:
            raise ValueError("expected at least one example, got none")
        if method == "ridge" and len(questions) < folds:
            raise ValueError(
                f"expected at least {folds} different questions, one a fold, got {len(questions)}:"
                " give more, or folds=1, which chooses no λ and measures nothing held out"
            )
        self.methods: tuple[str, ...] = (method,)
        if method == "auto":
            has_held_out = held_out or len(questions) >= _COMPARED
            self.methods = ("ridge", "distill") if has_held_out else ("ridge",)
            if folds == 1 and len(self.methods) > 1 and not held_out:
                raise ValueError(
                    'expected at least 2 folds or held_out with method="auto", got folds=1, which'
                    " measures no ridge fit: choose a method, or give held_out"
                )
            folds = min(folds, len(questions))
        self.model, self.examples = model, examples
        self.parts, self.rank, self.kappa, self.folds = check_parts(parts), rank, kappa, folds
        self.preserve, self.held_out = preserved_rows(preserve), held_out
        self.blocks = read_blocks(model)
        self.largest_rank = min(
            min(shape) for shape in matrix_shapes(model, self.blocks, self.parts).values()
        )
        self._check_rank(method)
        self.runner = BlockRunner(model, self.blocks)

    def _check_rank(self, method: str) -> None:
        rank, most = self.rank, self.largest_rank
        if rank == "auto" or (rank is None and method == "ridge"):
            return
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= most:
            raise ValueError(
                f"expected a rank from 1 to {most}, the largest that every matrix has, got {rank!r}"
                + (': no limit needs method="ridge"' if rank is None else "")
            )

    def prepare(self, max_new_tokens: int) -> None:
        """Let the model answer; the rows of the examples and of those held out."""
        self.rows = rows_of(answered(self.model, self.examples, max_new_tokens))
        self.test_rows = rows_of(answered(self.model, self.held_out, max_new_tokens))
        check_rows(self.model, [*self.rows, *self.preserve, *self.test_rows])
        fitted = {row.without for row in self.rows}
        if known := sum(row.without in fitted for row in self.test_rows):
            raise ValueError(
                f"expected held-out questions that are not among the examples, got {known} that are"
            )

    def plan(self, options: Distillation) -> Plan:
        """The plan of the fit; of two the sum of their seconds, and the larger memory."""
        rows, rank = [*self.rows, *self.preserve], self.rank
        size = Size(
            model=self.model,
            shapes=matrix_shapes(self.model, self.blocks, self.parts),
            blocks=len(self.blocks),
            rank=None if isinstance(rank, str) else rank,
            folds=self.folds,
            rows=rows,
            masks=self._masks(rows) if "ridge" in self.methods else 0,
            on_disk=self.runner.folder is not None,
        )
        plans = []
        if "ridge" in self.methods:
            fits = sum(r <= self.largest_rank for r in AUTO_RANKS) if rank == "auto" else 1
            plans.append(plan_ridge(size, len(self.parts), fits))
        if "distill" in self.methods:
            texts = options.preserve_batch_size if self.preserve else 0
            plans.append(plan_distillation(size, options.steps, options.batch_size + texts))
        nbytes, seconds = max(plan.nbytes for plan in plans), sum(plan.seconds for plan in plans)
        return replace(plans[0], nbytes=nbytes, seconds=seconds)

    @torch.no_grad()
    def _masks(self, rows: Sequence[Row]) -> int:
        """Bytes of the masks and position embeddings of all rows, from those of a mean row."""
        nbytes = 0
        for lengths in zip(*((len(x.with_context), len(x.without)) for x in rows), strict=True):
            ids = torch.zeros(1, sum(lengths) // len(rows), dtype=torch.int64)
            leaves = tree_leaves(self.runner.entered(ids.to(self.model.device))[1])
            tensors = {id(x): x.nbytes for x in leaves if isinstance(x, Tensor)}
            nbytes += len(rows) * sum(tensors.values())
        return nbytes

    # -- ridge

    @torch.no_grad()
    def ridge(
        self,
        lambdas: Sequence[float],
        preserve_first: float,
        state: Any,
        progress: Progress | None,
    ) -> tuple[dict[str, LowRank], StaticReport]:
        """The sequential fit; for ``rank="auto"`` one of each rank, with a folder of its own."""
        lambdas = tuple(lambdas) if self.folds > 1 else (_NO_FOLDS_LAMBDA,)
        if self.rank != "auto":
            assert not isinstance(self.rank, str)
            options = RidgeOptions(self.parts, self.rank, self.folds, lambdas, preserve_first)
            return self._ridge(options, state, progress)
        fits = []
        for rank in (rank for rank in AUTO_RANKS if rank <= self.largest_rank):
            folder = None if state is None else Path(state) / f"rank-{rank}"
            options = RidgeOptions(self.parts, rank, self.folds, lambdas, preserve_first)
            fits.append(self._ridge(options, folder, progress))
        kl = [_held_out(report).kl for _, report in fits]
        plain = fits[0][1].without
        assert plain is not None
        wanted = plain.kl - _AUTO_GAIN * (plain.kl - min(kl))
        return fits[next(i for i in range(len(fits)) if kl[i] <= max(wanted, min(kl)))]

    def _ridge(
        self, options: RidgeOptions, state: Any, progress: Progress | None
    ) -> tuple[dict[str, LowRank], StaticReport]:
        rows = [*self.rows, *self.preserve]
        batches = make_batches(self.runner, rows, self._folds_of(rows), self.kappa)
        digests = self.runner.processes.gathered(digest(rows))
        known = None
        if state is not None:
            fingerprint = StaticInfo.of(self.model, None, "ridge").fingerprint
            known = FitState.of(state, str(fingerprint), digests, options, self.kappa)
        fits = fit_blocks(self.runner, batches, options, known, progress)
        changes = {
            f"{block.path}.{path}": change
            for block, fitted in zip(self.blocks, fits, strict=True)
            for path, change in fitted.changes.items()
        }
        runner, own = self.runner, [batch.student.hidden for batch in batches]
        ends = [runner.kept(spread(batch, batch.teacher.hidden)) for batch in batches]
        tally = measure(runner, batches, ends, own)
        report = StaticReport(
            held_out=tally.quality() if self.folds > 1 else None,
            without=measure(runner, batches, ends).quality(),
            cross_fitted=self.folds > 1,
            preserve_kl=tally.preserved_kl(),
            residual=tuple(fitted.residual for fitted in fits),
            ridges=tuple(fitted.ridges for fitted in fits),
            explained=tuple(fitted.explained for fitted in fits),
            steps=0,
            seconds=0.0,
            nbytes=0,
        )
        return changes, self._on_held_out(changes, report)

    def _folds_of(self, rows: Sequence[Row]) -> list[int]:
        """The fold of each row: equal questions share one, wherever they are.

        The preserved texts of all processes follow the questions of all, as in one process.
        """
        everywhere = self.runner.processes.gathered([row.question for row in rows])
        numbers = question_numbers(sorted(chain.from_iterable(everywhere), key=itemgetter(0)))
        return [numbers[row.question] % self.folds for row in rows]

    def _on_held_out(self, changes: dict[str, LowRank], report: StaticReport) -> StaticReport:
        """The report with the patch measured on the examples given for that, if there are any."""
        if not self.test_rows:
            return report
        batches = make_batches(self.runner, self.test_rows, [0] * len(self.test_rows), 0.0)
        ends = ends_with_context(self.runner, batches)
        without = measure(self.runner, batches, ends)
        patch = StaticPatch(StaticInfo("", None, None, "", ""), changes)
        with patch.applied(self.model):
            tally = measure(self.runner, batches, ends)
        return replace(
            report, held_out=tally.quality(), without=without.quality(), cross_fitted=False
        )

    # -- distill

    def distill(
        self,
        options: Distillation,
        start: StaticPatch | None,
        state: Any,
        progress: Progress | None,
    ) -> tuple[dict[str, LowRank], StaticReport]:
        """Gradient descent, see :mod:`icl_patch.static.distill`."""
        if start is not None:
            start.check_model(self.model)
        paths = list(matrix_shapes(self.model, self.blocks, self.parts))
        others = sorted(set(start.changes if start else ()) - set(paths))
        if others:
            raise ValueError(
                f"expected a start that changes matrices of the parts {', '.join(self.parts)}, got"
                f" one that changes {others[0]} too: give its parts"
            )
        assert isinstance(self.rank, int)
        return distill(
            self.runner,
            paths,
            self.rank,
            self.rows,
            self.test_rows,
            self.preserve,
            self.kappa,
            options,
            None if start is None else start.changes,
            state,
            progress,
        )

    # -- examples that no patch can serve

    def check_shared(self, report: StaticReport) -> None:
        """Raises ValueError if there are several contexts and their patch does not help on
        questions that it has not seen.
        """
        held_out, without = report.held_out, report.without
        if len(self.examples) < 2 or held_out is None or without is None:
            return
        if held_out.kl >= without.kl:
            raise ValueError(
                f"expected {len(self.examples)} contexts that share one instruction, got contexts"
                " that share nothing a patch can hold: on questions that it has not seen the KL"
                f" divergence is {held_out.kl:.3f} with the patch and {without.kl:.3f} without."
                " Fit a patch for each context, or give more questions"
            )


def _held_out(report: StaticReport) -> Quality:
    assert report.held_out is not None
    return report.held_out
