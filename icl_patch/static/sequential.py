"""The sequential ridge fit: block after block, each on the model that is patched up to it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.swap import restore, swap
from icl_patch.ops.reference import InversionStatus
from icl_patch.static.block_parts import BlockParts, OutputMatrix, norm_scale, weight_of
from icl_patch.static.block_runner import Batch, BlockRunner
from icl_patch.static.fit_state import BlockFit, FitState, RidgeOptions
from icl_patch.static.ridge import Moments, Solution, choose_ridge, moments, summed, sums
from icl_patch.static.static_linear import StaticLinear

Progress = Callable[[int, int], None]
# The values that the fit of a part reads from the run with the context, and from the run without
# it.
_TARGETS = {"qk": {"qk"}, "o_proj": {"hidden"}, "readers": {"z"}, "writer": {"sum"}}
_READ = {"qk": {"qk"}, "o_proj": {"x", "o"}, "readers": {"z"}, "writer": {"hidden", "h"}}


def fit_blocks(
    runner: BlockRunner,
    batches: list[Batch],
    options: RidgeOptions,
    state: FitState | None = None,
    progress: Progress | None = None,
) -> list[BlockFit]:
    """Fit every block in order, and move the batches' streams through them.

    The students of a fold continue with the changes that were fitted without this fold, so their
    final hidden states are held out. With ``state`` every finished block is written; a block that
    is there already is read instead of fitted.

    Raises:
        ValueError: an activation is NaN or infinite; the message names the block.
    """
    fits = []
    for index, block in enumerate(runner.blocks):
        with _patched(runner, block, options.parts) as modules:
            step = _BlockStep(runner, index, batches, modules, options)
            known = None if state is None else state.read(index)
            missing = torch.tensor(float(known is None), device=runner.model.device)
            if runner.processes.summed(missing):  # in one of the processes
                known = None
            fits.append(step.fit() if known is None else step.advance(known))
        if state is not None and known is None:
            state.write(index, fits[-1])
        if progress is not None:
            progress(index + 1, len(runner.blocks))
    return fits


def preserve_factor(first: float, index: int, blocks: int) -> float:
    """By which κ is multiplied in a block: from ``first`` in the first one to its inverse in the
    last, geometrically, so that κ is the geometric mean.
    """
    share = index / (blocks - 1) if blocks > 1 else 0.5
    return float(first ** (1 - 2 * share))


@contextmanager
def _patched(
    runner: BlockRunner, block: BlockParts, parts: Sequence[str]
) -> Iterator[dict[str, StaticLinear]]:
    """Within this context the matrices of a block's parts are :class:`StaticLinear`, by path."""
    modules: dict[str, StaticLinear] = {}
    with ExitStack() as stack:
        for path in [path for part in parts for path in block.matrices(part)]:
            module = swap(runner.model, f"{block.path}.{path}", StaticLinear)
            stack.callback(restore, (runner.model,), module)
            modules[path] = module
        yield modules


class _BlockStep:
    """The fit of one block."""

    def __init__(
        self,
        runner: BlockRunner,
        index: int,
        batches: list[Batch],
        modules: dict[str, StaticLinear],
        options: RidgeOptions,
    ) -> None:
        self.runner, self.index, self.batches = runner, index, batches
        self.modules, self.options = modules, options
        self.block, self.layer = runner.blocks[index], runner.layers[index]
        self.after: list[Tensor] = []  # the teachers' hidden states behind the block
        self.fitted = BlockFit(by_fold=[{} for _ in range(options.folds)])
        factor = preserve_factor(options.preserve_first, index, len(runner.blocks))
        self.weights = [batch.weights(factor) for batch in batches]
        self.count = sum(int((weight > 0).sum()) for weight in self.weights)

    # -- the block's passes

    def _paths(self) -> dict[str, str]:
        """The modules with the inputs that the fit reads."""
        block = self.block
        paths = {"hidden": block.hidden, "z": block.readers[0], "h": block.writer.path}
        if block.attention_output is not None:
            paths["o"] = block.attention_output.path
        if block.qk:
            paths["qk"] = block.qk[0]
        return paths | ({} if block.final_norm is None else {"sum": block.final_norm})

    def _pass(self, teacher: bool, names: set[str]) -> Iterator[dict[str, Tensor]]:
        """Values of one pass at the tokens of each batch, (n, ·) by name: inputs of modules, the
        block's input ``x`` and its ``sum``.
        """
        paths = {name: path for name, path in self._paths().items() if name in names}
        for batch in self.batches:
            self._set(None if teacher else batch.fold)
            stream = batch.teacher if teacher else batch.student
            with self.runner.taps(self.index, paths) as taps:
                out = self.runner.run(self.index, stream)
            if teacher:
                self.after.append(self.runner.kept(out))
            values = {"x": stream.hidden, "sum": out, **taps}
            at_tokens = batch.aligned if teacher else batch.own
            found = {name: at_tokens(values[name]) for name in names}
            self._check(found, "with" if teacher else "without")
            yield found

    def _check(self, found: dict[str, Tensor], run: str) -> None:
        for name, value in found.items():
            if not value.isfinite().all():
                raise ValueError(
                    f"expected finite activations, got NaN or infinity in {name!r} of"
                    f" {self.block.path} in the run {run} the context"
                )

    def _set(self, fold: int | None) -> None:
        """Apply the changes fitted so far without a fold; None: no changes."""
        changes = {} if fold is None else self.fitted.by_fold[fold]
        for path, module in self.modules.items():
            if path in changes:
                change = changes[path]
                module.set_pool(change.u.unsqueeze(0), change.v.unsqueeze(0))
            else:
                module.off()

    # -- the parts

    def fit(self) -> BlockFit:
        """Fit the parts in order, each on the block with the changes of the parts before it."""
        parts = self.options.parts
        names = {name for part in parts for name in _TARGETS[part]}
        targets = [
            {name: self.runner.kept(value) for name, value in found.items()}
            for found in self._pass(True, names)
        ]
        for part in parts:
            if part in ("readers", "qk"):
                self._fit_inputs(part, targets)
            else:
                self._fit_output(part, targets)
        self._finish()
        return self.fitted

    def advance(self, known: BlockFit) -> BlockFit:
        """Move the streams through the block with changes that were fitted before."""
        self._set(None)
        self.after = [
            self.runner.kept(self.runner.run(self.index, batch.teacher)) for batch in self.batches
        ]
        self.fitted = known.to(self.runner.model.device)
        self._finish()
        return self.fitted

    def _rows(
        self, part: str, targets: Sequence[dict[str, Tensor]]
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]:
        """For each batch its values without the context, those with it, and its weights."""
        device = self.runner.model.device
        passes = self._pass(False, _READ[part])
        for own, target, weight in zip(passes, targets, self.weights, strict=True):
            yield own, {name: x.to(device) for name, x in target.items()}, weight

    def _fit_inputs(self, part: str, targets: Sequence[dict[str, Tensor]]) -> None:
        """Matrices that read one input z: ``ΔW = W D``, D the ridge regression of ``z_ctx − z`` on
        z.
        """
        name = "z" if part == "readers" else "qk"
        paths = self.block.matrices(part)
        weights = {path: weight_of(self.modules[path].base_layer) for path in paths}
        rows = (
            (own[name], target[name].double() - own[name].double(), weight)
            for own, target, weight in self._rows(part, targets)
        )
        solutions = self._solve(part, rows, torch.cat(list(weights.values())))
        self._keep({path: (solutions, weights[path]) for path in paths})

    def _fit_output(self, part: str, targets: Sequence[dict[str, Tensor]]) -> None:
        """A matrix that writes: Δ is the ridge regression of the change that its output needs on
        its input.
        """
        attention = part == "o_proj"
        output = self.block.attention_output if attention else self.block.writer
        assert output is not None
        before, after, inputs = ("x", "hidden", "o") if attention else ("hidden", "sum", "h")
        rows = (
            (
                own[inputs],
                *self._lacking(
                    output,
                    own[inputs],
                    (target[after].double() - own[before].double()) / output.multiplier,
                    weight,
                ),
            )
            for own, target, weight in self._rows(part, targets)
        )
        self._keep({output.path: (self._solve(part, rows), None)})

    def _lacking(
        self, output: OutputMatrix, inputs: Tensor, wanted: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The change of ``W a`` for which the branch gives ``wanted``, or comes closest to it
        through the norm behind it; and the tokens' weights there.
        """
        with torch.no_grad():
            given = self.modules[output.path].base_layer(inputs).double()
        if output.norm is None:
            return wanted - given, weight
        scale, eps = norm_scale(self.layer, output)
        wanted = wanted.where(scale != 0, 0.0)  # no W changes an element that the scale drops
        rms = given.square().mean(-1).sqrt()
        solved = ops.invert_rmsnorm(wanted, scale, rms, eps, given)
        reached = (solved.status == InversionStatus.EASY) | (solved.status == InversionStatus.HARD)
        return solved.hidden.double() - given, weight * reached / rms.square()

    def _solve(
        self,
        part: str,
        rows: Iterable[tuple[Tensor, Tensor, Tensor]],
        left: Tensor | None = None,
    ) -> list[Solution]:
        """The solutions without each fold, and that of all rows at the end; from the inputs,
        targets and weights of each batch.
        """
        processes, found = self.runner.processes, dict[int, Moments]()
        try:
            for batch, (inputs, targets, weight) in zip(self.batches, rows, strict=True):
                dual = processes.group is None and self.count < inputs.shape[1]
                some = moments(inputs, targets, weight, dual)
                if batch.fold in found:
                    found[batch.fold] += some
                else:
                    found[batch.fold] = some
            for k in range(self.options.folds):
                if k not in found:  # its rows are in other processes
                    found[k] = moments(inputs[:0], targets[:0], weight[:0], dual)
            by_fold = summed(
                [found[k] for k in range(self.options.folds)],
                None if processes.group is None else processes.summed,
            )
        except ValueError as error:
            raise ValueError(f"{part} of {self.block.path}: {error}") from error
        entries, ridge = sums(by_fold), self.options.lambdas[0]
        if self.options.folds > 1:
            ridge, self.fitted.explained[part] = choose_ridge(
                by_fold, entries[:-1], self.options.lambdas, left
            )
        self.fitted.ridges[part] = ridge
        return [entry.solve(ridge) for entry in entries]

    def _keep(self, found: dict[str, tuple[list[Solution], Tensor | None]]) -> None:
        for path, (solutions, left) in found.items():
            changes = [
                solution.low_rank(self.options.rank, left).to(torch.float32)
                for solution in solutions
            ]
            self.fitted.changes[path] = changes[-1]
            for k in range(self.options.folds):
                self.fitted.by_fold[k][path] = changes[k]

    # -- on to the next block

    def _finish(self) -> None:
        """Move both streams to the block's end, the students with the changes, and measure the
        remaining difference.
        """
        error = size = 0.0
        for batch, after in zip(self.batches, self.after, strict=True):
            self._set(batch.fold)
            own = self.runner.run(self.index, batch.student)
            batch.student.hidden = self.runner.kept(own)
            batch.teacher.hidden = after
            answers = batch.answer[batch.valid]
            wanted = batch.aligned(after)[answers].double()
            error += float((batch.own(batch.student.hidden)[answers] - wanted).square().sum())
            size += float(wanted.square().sum())
        sizes = torch.tensor([error, size], dtype=torch.float64, device=self.runner.model.device)
        error, size = self.runner.processes.summed(sizes).tolist()
        self.fitted.residual = (error / size) ** 0.5 if size else 0.0
