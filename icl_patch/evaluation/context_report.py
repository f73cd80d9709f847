"""A report on one context, as a self-contained HTML file.

It shows the answers with the context, without it and patched, the size of the changes, the error
next to the noise, and the context's tokens that the changes come from.
"""

import base64
import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch._version import __version__
from icl_patch.analysis.attribution import attribution
from icl_patch.evaluation import report
from icl_patch.evaluation.demo import three_continuations
from icl_patch.evaluation.verify import VerifyReport, verify
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.prompts import Prompt, split_ids
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patcher import ContextPatcher

LEVELS = 10
"""The shades of a colour; a cell may also have none."""
_TEMPLATE = Path(__file__).with_name("context_report.html.jinja")
# These bound the file's size for every prompt.
_HEAT_MAP_BYTES = 400_000
_MOST_COLUMNS = 96
_MOST_STEPS = 200
_MOST_CHARACTERS = 40_000  # of the context; another text has an eighth
_MOST_GROUPS = 256


@dataclass(frozen=True)
class Group:
    """Neighbouring tokens of the context that are left out together.

    Attributes:
        text: what they are. start, stop: their columns in the context.
        change: how much the patch changes without them, relative to its size: the mean of
            :func:`icl_patch.analysis.attribution.attribution` over the blocks; None for special
            tokens and the first ones, which always stay.
        block, largest: the block that changes most, and its change.
    """

    text: str
    start: int
    stop: int
    change: float | None = None
    block: int | None = None
    largest: float | None = None


@dataclass(frozen=True)
class Sizes:
    """The size of the change by block and column; a column is a kept token or several neighbours.

    Attributes:
        columns: the columns' texts. tokens: how many kept tokens a column has at most.
        of_block: (blocks, columns), the norm of all changes of a block together, its root mean
            square over the column's tokens.
        of_parameter: the same for each changed parameter, by its module's name.
    """

    columns: list[str]
    tokens: int
    of_block: list[list[float]]
    of_parameter: dict[str, list[list[float]]]


@dataclass(frozen=True)
class ContextReport:
    """The measurements of :func:`context_report`, plain types but ``verified``.

    Attributes:
        context, question: the two parts of the prompt, with what a chat template writes.
        front: the text of the context's first tokens, which stay; empty without any.
        answers: ``with_context``, ``without``, ``patched``. verified: the papers' protocol along
            the answer, see :func:`icl_patch.verify`.
        tokens: the texts of its tokens. sizes: of the patch of the question and the answer.
        groups: the context, in order.
    """

    context: str
    question: str
    front: str
    answers: dict[str, str]
    verified: VerifyReport
    tokens: list[str]
    sizes: Sizes
    groups: list[Group]

    @property
    def passed(self) -> bool:
        """Whether the update keeps its promise, and an exact patch gives the context's answer."""
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The reason why :attr:`passed` is False, in words; None if it is True."""
        same = self.answers["patched"] == self.answers["with_context"]
        if not (same or self.verified.update != "exact"):
            return "the patched answer is not the one with the context"
        return self.verified.failure

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        verdict = {"passed": self.passed, "failure": self.failure}
        return {**asdict(self), "verified": self.verified.to_dict(), **verdict}


def context_report(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    update: str = "exact",
    max_new_tokens: int = 24,
    keep_first: int = 0,
    groups: int = 64,
    name: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_answers: Callable[[dict[str, str], str], None] = lambda answers, front: None,
) -> ContextReport:
    """Measure what a context does to a model's weights.

    Args:
        prompt: with its context and without it, see :func:`icl_patch.models.prompts.make_prompt`.
        update: ``"direct"``, ``"stable"`` or ``"exact"``.
        max_new_tokens: the longest answer; greedy.
        keep_first: as in :meth:`icl_patch.ContextPatcher.compute`.
        groups: into about how many groups of neighbouring tokens the context is cut, at most 256;
            each is left out in turn. A short context has a group for each token.
        name: of the model; by default the path or id it was loaded from.
        progress: called with (done, total), once for all groups and then for all tokens.
        on_answers: called with the answers and the text of the tokens that stay, before all else is
            measured.

    Raises:
        UnsupportedModelError, ControllabilityError, NonFiniteError: as
            :class:`icl_patch.ContextPatcher`.
        ValueError: ``groups`` is out of range; or as :func:`icl_patch.verify` and
            :func:`icl_patch.models.prompts.split_ids`.
    """
    if not 1 <= groups <= _MOST_GROUPS:
        raise ValueError(f"expected groups from 1 to {_MOST_GROUPS}, got {groups}")
    device = input_device(model)
    context_ids, question_ids = (ids.to(device) for ids in split_ids(tokenizer, prompt))
    ids = torch.cat([context_ids, question_ids], 1)
    keep: Any = {"keep_first": keep_first}
    with ContextPatcher(model, update, tokenizer=tokenizer) as patcher:
        found = three_continuations(
            patcher, context_ids, question_ids, max_new_tokens, chat=prompt.chat, **keep
        )
        decode: Any = tokenizer.decode
        front = decode(context_ids[0, :keep_first])
        answers = {key: decode(x[0], skip_special_tokens=True) for key, x in found.items()}
        on_answers(answers, front)
        answer = found["with_context"]
        patch = patcher.compute(context_ids, torch.cat([question_ids, answer[:, :-1]], 1), **keep)
        specials = set(tokenizer.all_special_ids)
        context = context_ids[0].tolist()
        stays = [at < keep_first or token in specials for at, token in enumerate(context)]
        spans, left_out = _cut(stays, groups)
        changes = attribution(
            patcher, context_ids, question_ids, left_out, progress=progress, **keep
        )
    verified = verify(
        model,
        tokenizer,
        context={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        max_new_tokens=answer.shape[1],
        update=update,
        progress=progress,
        name=name,
        **keep,
    )
    measured = dict(zip(left_out, changes, strict=True))
    return ContextReport(
        context=decode(context_ids[0]),
        question=decode(question_ids[0]),
        front=front,
        answers=answers,
        verified=verified,
        tokens=[decode([step.token_id]) for step in verified.steps],
        sizes=_sizes(patch, [decode([token]) for token in patch.kept_ids[0].tolist()]),
        groups=[
            _group(decode(context_ids[0, slice(*span)]), span, measured.get(span)) for span in spans
        ],
    )


def _cut(stays: list[bool], most: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The context in about ``most`` spans (start, stop); tokens that stay are spans of their own.
    And the spans without those.

    stays: of each token of the context.
    """
    size = max(1, math.ceil(stays.count(False) / most))
    cuts = [0]
    for place in range(1, len(stays)):
        edge = stays[place] != stays[place - 1]
        # a span that is cut off by a token that stays is full
        if edge or (not stays[place] and place - cuts[-1] == size):
            cuts.append(place)
    spans = list(zip(cuts, [*cuts[1:], len(stays)], strict=True))
    return spans, [span for span in spans if not stays[span[0]]]


def _group(text: str, span: tuple[int, int], changes: Tensor | None) -> Group:
    """A group with its changes of the blocks, if there are any."""
    if changes is None:
        return Group(text, *span)
    block = int(changes.argmax())
    return Group(text, *span, float(changes.mean()), block, float(changes[block]))


def _sizes(patch: ContextPatch, tokens: list[str]) -> Sizes:
    """The norms of a patch of one row, in columns of so many tokens that the file stays small."""
    norms = {name: size[:, 0].double().cpu() for name, size in patch.norms().items()}
    blocks, count = len(patch.layers), len(tokens)
    cell = 200 + sum(12 + len(name) for name in norms)  # bytes, with its tooltip
    columns = min(_MOST_COLUMNS, max(1, _HEAT_MAP_BYTES // (cell * blocks)))
    width = math.ceil(count / columns)

    def in_columns(size: Tensor) -> list[list[float]]:
        parts = size.split(width, dim=1)
        return torch.stack([part.square().mean(1).sqrt() for part in parts], 1).tolist()

    whole = torch.stack(list(norms.values())).norm(dim=0)
    return Sizes(
        ["".join(tokens[start : start + width]) for start in range(0, count, width)],
        width,
        in_columns(whole),
        {name: in_columns(size) for name, size in norms.items()},
    )


# the page


def to_html(result: ContextReport) -> str:
    """The report as one HTML file without scripts or styles from elsewhere. All text is escaped,
    and a content security policy runs no script but the one that sorts tables.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": _number, "label": _label, "sha256": _sha256}
    without = report.without_context(result.front)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=result,
        verified=result.verified,
        version=__version__,
        without=without[0].upper() + without[1:],
        lines=report.verdict_lines(result.verified, result.failure)
        .replace("\n  ", " ")
        .splitlines(),
        levels=LEVELS,
        heat=_heat(result.sizes),
        chart=_chart(result.verified),
        groups=_shades(result.groups),
        label_height=lambda texts: 8 + 6 * max(len(_label(text)) for text in texts),
        steps=list(zip(result.tokens, result.verified.steps, strict=True))[:_MOST_STEPS],
        most=_MOST_CHARACTERS // 8,
        most_of_group=_MOST_CHARACTERS // max(1, len(result.groups)),
    )


def _sha256(text: str) -> str:
    """The hash of a script, as a content security policy takes it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _number(value: Any) -> str:
    """As :func:`icl_patch.evaluation.report.format_value`, a float as 0.14 or 1.4e-05."""
    return f"{value:.2g}" if isinstance(value, float) else report.format_value(value)


def _label(text: str, most: int = 12) -> str:
    """A token in a table or a picture."""
    shown = report.visible_text(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _shades(groups: list[Group]) -> dict[str, Any]:
    """The groups with a level of colour each, in proportion to their change."""
    largest = max((group.change for group in groups if group.change is not None), default=0.0)
    levels = [
        round(LEVELS * (group.change or 0.0) / largest) if largest > 0 else 0 for group in groups
    ]
    together = any(group.stop - group.start > 1 for group in groups if group.change is not None)
    rows = list(zip(groups, levels, strict=True))
    return {"rows": rows, "largest": largest, "together": together}


def _heat(sizes: Sizes) -> dict[str, Any]:
    """The cells' levels of colour, equally many cells of each, and the ends of the scale."""
    # by rank: a few small or large cells would leave one shade for all others
    ranked = sorted(size for row in sizes.of_block for size in row if 0 < size < math.inf)

    def level(size: float) -> int:
        if not 0 < size < math.inf:
            return 0
        return 1 + LEVELS * bisect_left(ranked, size) // len(ranked)

    return {
        "rows": [[level(size) for size in row] for row in sizes.of_block],
        "low": ranked[0] if ranked else 1.0,
        "high": ranked[-1] if ranked else 1.0,
    }


def _chart(verified: VerifyReport) -> dict[str, Any]:
    """The steps' errors as heights from 0 to 1 on a logarithmic scale, exact zeros at 0, with the
    noise and the decades.
    """
    noise = verified.noise_floor["linf_max"]
    positive = [x for x in (*(step.linf for step in verified.steps), noise) if 0 < x < math.inf]
    bottom = math.floor(math.log10(min(positive))) if positive else -7
    top = max(bottom + 1, math.ceil(math.log10(max(positive)))) if positive else -6

    def height(error: float) -> float:
        if not error > 0:
            return 0.0
        if error == math.inf:
            return 1.0
        return 0.12 + 0.88 * (math.log10(error) - bottom) / (top - bottom)

    return {
        "steps": [height(step.linf) for step in verified.steps[:_MOST_STEPS]],
        "noise": height(noise),
        "ticks": [(0.0, "0")] + [(height(10.0**n), f"1e{n}") for n in range(bottom, top + 1)],
    }
