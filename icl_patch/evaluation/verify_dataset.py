"""The papers' protocol over a data set of contexts and questions, by task.

Each row's prompt goes through :func:`icl_patch.evaluation.verify.verify`; four numbers of it are
kept. A row's error is the largest one of its steps, because the errors of steps range over orders
of magnitude; a task's is the median of its rows'.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import ControllabilityError, NonFiniteError
from icl_patch.evaluation.loading import load_model
from icl_patch.evaluation.verify import VerifyReport, verify
from icl_patch.models.language_model import check_length
from icl_patch.models.positions import switch_lengths
from icl_patch.models.prompts import padded
from icl_patch.patcher import ContextPatcher
from icl_patch.scale import Columns
from icl_patch.scale.rows import EncodedRow, Reject, encode_row, read_rows

_Z = 1.959964  # 95 % of a normal distribution lie within ± so many standard deviations
_REASONS = 10  # of rejected rows, in the report
_SAME = ("model", "family", "update", "dtype", "device", "keep_last", "keep_first", "promises")

Interval = tuple[float, float]


def wilson_interval(share: float, count: int) -> Interval:
    """The 95 % interval of a share of ``count`` independent cases.

    Source: Wilson (1927).
    """
    spread = _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt((share * (1 - share) + spread / 4) / count) / (1 + spread)
    return min(share, middle - half), max(share, middle + half)  # of 0 and 1, without rounding


def median_interval(values: Tensor) -> Interval | None:
    """The 95 % interval of the median of independent values (n,), of any distribution: two of them,
    by their ranks.

    The number of values below the median is binomial, n/2 ± √n/2. None for less than six values, of
    which even the smallest and the largest are too close.
    """
    count = len(values)
    if count < 6:
        return None
    half = _Z * math.sqrt(count) / 2
    ordered = values.sort().values
    low = max(math.floor(count / 2 - half), 1)
    return float(ordered[low - 1]), float(ordered[count - low])


@dataclass(frozen=True)
class TaskReport:
    """The rows of one task.

    Attributes:
        rows: how many.
        match: the share of steps at which the replay chooses the baseline's token. Its 95 %
            interval assumes that the steps of a row all match or all differ, so it is never too
            narrow.
        bit_identical: the share of steps with logits that are equal to the last bit.
        linf, tvd: medians of the rows' largest errors, with 95 % intervals (None for less than six
            rows); linf_max, tvd_max: the largest of all.
    """

    task: str
    rows: int
    match: float
    match_interval: Interval
    bit_identical: float
    linf: float
    linf_interval: Interval | None
    linf_max: float
    tvd: float
    tvd_interval: Interval | None
    tvd_max: float


@dataclass(frozen=True)
class DatasetReport:
    """The measurements of :func:`verify_dataset`.

    Attributes:
        max_new_tokens: the largest number of steps of a row.
        noise_floor: the largest of all batches, see :class:`icl_patch.VerifyReport`.
        failure: what the first batch misses that does not keep the update's promise, see there;
            None if all keep it. promises: whether there is one in this dtype.
        rejected: rows that could not be verified; reasons: of the first ten.
        tasks: in the order of their names; none without a column of tasks. total: of all rows.
    """

    model: str
    family: str
    update: str
    dtype: str
    device: str
    max_new_tokens: int
    keep_last: int
    keep_first: int
    noise_floor: dict[str, float]
    failure: str | None
    promises: bool
    rejected: int
    reasons: list[str]
    tasks: list[TaskReport]
    total: TaskReport

    @property
    def passed(self) -> bool:
        """Whether every batch keeps the update's promise."""
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return {**asdict(self), "passed": self.passed}


def verify_dataset(
    model: PreTrainedModel | str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: str | Path,
    columns: Columns | None = None,
    *,
    max_new_tokens: int = 50,
    update: str = "exact",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_last: int = 0,
    keep_first: int = 0,
    batch_rows: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
    name: str | None = None,
) -> DatasetReport:
    """Verify the prompt of every row, its context and its question, and summarise by task.

    In memory are one batch, four numbers a row, and two a batch.

    Args:
        model, tokenizer, max_new_tokens, update, dtype, device, keep_last, keep_first, name: see
            :func:`icl_patch.evaluation.verify.verify`.
        dataset: a file or folder, see :func:`icl_patch.scale.rows.read_rows`.
        columns: of the context, the question (``kept``) and, if there are several, the task.
        batch_rows: rows at once; one if the model does not take padding.
        progress: is called with the number of rows done, and of all.

    Raises:
        ValueError: the data set is missing or lacks a column, none of its rows can be verified, or
            another argument does not fit.
        UnsupportedModelError: as :class:`icl_patch.ContextPatcher`.
    """
    if batch_rows < 1:
        raise ValueError(f"expected batch_rows ≥ 1, got {batch_rows}")
    dataset, columns = Path(dataset), columns or Columns()
    total = sum(1 for _ in read_rows(dataset, columns))
    loaded, tokenizer = load_model(model, tokenizer, dtype, device)
    with ContextPatcher(loaded, update) as patcher:
        batch_rows = batch_rows if patcher.attached_model.takes_padding else 1
    numbers: dict[str | None, list[Tensor]] = defaultdict(list)  # of each row, by its task
    floors: list[dict[str, float]] = []
    failures: list[str | None] = []
    reasons: list[str] = []
    same: dict[str, Any] = {}  # in all batches

    def encoded() -> Iterator[EncodedRow]:
        for row in read_rows(dataset, columns):
            try:
                if isinstance(row, Reject):
                    raise ValueError(row.reason)
                one = encode_row(loaded, tokenizer, row, columns)
                length = sum(one.lengths)
                check_length(loaded, length, max_new_tokens - 1)
                if length <= (stay := keep_first + keep_last + 1):
                    raise ValueError(f"expected more than {stay} tokens, got {length}")
            except ValueError as error:
                reasons.append(f"row {row.number}: {error}")
            else:
                yield one

    def verify_batch(batch: Sequence[EncodedRow]) -> None:
        """All rows; if some row has no patch, each by itself."""
        prompts = [torch.cat([row.context_ids[0], row.kept_ids[0]]) for row in batch]
        ids, mask = padded(prompts, "left")
        try:
            report = verify(
                loaded,
                tokenizer,
                context={"input_ids": ids, "attention_mask": mask},
                max_new_tokens=max_new_tokens,
                update=update,
                keep_last=keep_last,
                keep_first=keep_first,
                name=name,
            )
        except (ControllabilityError, NonFiniteError) as error:
            if len(batch) == 1:
                reasons.append(f"row {batch[0].row.number}: {error}")
                return
            for row in batch:
                verify_batch([row])
            return
        for row, own in zip(batch, _numbers(report), strict=True):
            numbers[row.row.task].append(own)
        floors.append(report.noise_floor)
        failures.append(report.failure)
        same.update({field: getattr(report, field) for field in _SAME})

    progress(0, total)
    rows = encoded()
    if switch_lengths(loaded):  # in a batch of several lengths LongRoPE would go by the longest row
        batch_rows = 1
    while batch := list(itertools.islice(rows, batch_rows)):
        verify_batch(batch)
        progress(len(reasons) + sum(map(len, numbers.values())), total)
    if not same:
        reason = reasons[0] if reasons else "it is empty"
        raise ValueError(f"expected a data set with rows that can be verified, got none: {reason}")
    return DatasetReport(
        **same,
        max_new_tokens=max_new_tokens,
        noise_floor={measure: max(floor[measure] for floor in floors) for measure in floors[0]},
        failure=next(filter(None, failures), None),
        rejected=len(reasons),
        reasons=reasons[:_REASONS],
        tasks=[_task(task, numbers[task]) for task in sorted(filter(None, numbers))],
        total=_task("all", list(itertools.chain(*numbers.values()))),
    )


def _numbers(report: VerifyReport) -> Tensor:
    """The share of steps that match and that are bit-identical, and the largest errors of each of
    the rows: (rows, 4).
    """
    values = torch.tensor(
        [[step.match, step.bit_identical, step.linf, step.tvd] for step in report.steps],
        dtype=torch.float64,
    ).split(report.lengths)
    return torch.stack([torch.cat([x[:, :2].mean(0), x[:, 2:].amax(0)]) for x in values])


def _task(name: str, rows: list[Tensor]) -> TaskReport:
    match, identical, linf, tvd = torch.stack(rows).unbind(1)
    share = float(match.mean())
    return TaskReport(
        task=name,
        rows=len(rows),
        match=share,
        match_interval=wilson_interval(share, len(rows)),
        bit_identical=float(identical.mean()),
        linf=float(linf.quantile(0.5)),
        linf_interval=median_interval(linf),
        linf_max=float(linf.max()),
        tvd=float(tvd.quantile(0.5)),
        tvd_interval=median_interval(tvd),
        tvd_max=float(tvd.max()),
    )
