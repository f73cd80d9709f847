"""What is measured on a pretrained model, and how much of it. Each result is a file as soon as it
is measured, so that a stopped run goes on.
"""

import hashlib
import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import real_statistics as statistics
import torch
from real_changes import growth, sensitivity, spans
from real_fidelity import KEPT, Arrays, attached, measure
from real_prompts import KINDS, TEXTS, Prompt, excerpts, prompts, read
from rich.console import Console
from rich.progress import track

from icl_patch import ContextPatcher
from icl_patch.atomic_file import write_atomically
from icl_patch.bench.results import code_fingerprint
from icl_patch.evaluation.loading import load_model


@dataclass(frozen=True)
class Sizes:
    """How large the measurement is.

    Attributes:
        dtypes: of the replays.
        prompts: by kind, how many contexts, prompts of each, and tokens of an answer.
        lengths: the lengths of contexts and how many of each, but in fp16, for which CPUs have no
            products.
        excerpt: kept tokens behind a context of the long text, see real_prompts.excerpts.
        shots: pairs of a growing few-shot context, and questions; tasks: how many of them.
        disturbed: one prompt of so many is disturbed; stepwise: and one runs token by token;
            first_kept: and one runs with the first token kept, too.
        spanned: of one context in so many the space of the changes is measured.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    prompts: dict[str, tuple[int, int, int]] = field(
        default_factory=lambda: {
            "few-shot": (12, 4, 16),
            "chat": (12, 4, 40),
            "passage": (12, 3, 32),
            "code": (16, 1, 48),
        }
    )
    lengths: dict[int, int] = field(
        default_factory=lambda: {
            **dict.fromkeys((16, 32, 64, 128, 256, 512), 8),
            1024: 6,
            2048: 3,
            4000: 2,
        }
    )
    excerpt: tuple[int, int] = (12, 5)
    shots: tuple[int, int] = (16, 4)
    tasks: int = 8
    disturbed: int = 8
    stepwise: int = 4
    first_kept: int = 1
    spanned: int = 1


FULL = Sizes()
SHORT = Sizes(
    dtypes=("float32", "bfloat16"),
    prompts={
        "few-shot": (12, 4, 24),
        "chat": (12, 4, 40),
        "passage": (12, 3, 64),
        "code": (16, 1, 80),
    },
    lengths=dict.fromkeys((16, 256, 1024, 1500, 4000), 1),
    excerpt=(24, 5),
    shots=(8, 2),
    tasks=2,
    disturbed=16,
    stepwise=8,
    first_kept=8,
    spanned=12,
)
QUICK = Sizes(
    dtypes=("bfloat16",),
    prompts=dict.fromkeys(KINDS, (1, 1, 2)),
    lengths={16: 2, 32: 1},
    excerpt=(4, 1),
    shots=(3, 2),
    tasks=1,
    disturbed=4,
    stepwise=2,
)


def _ids(ids: Any) -> torch.Tensor:
    return torch.tensor([list(ids)], dtype=torch.int64)


class Results:
    """The files of a model's results, in a folder that depends on everything they depend on."""

    def __init__(self, folder: Path, sizes: Any) -> None:
        # the numbers depend on the model, the texts, the sizes and the code
        digest = hashlib.sha256(f"{sizes}{code_fingerprint()}".encode())
        here = Path(__file__).parent
        for path in sorted([*here.glob("*.py"), *TEXTS.glob("*"), *folder.glob("*.safetensors")]):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        self.store = Path("build/papers") / f"{folder.resolve().name}-{digest.hexdigest()[:12]}"

    def stage(
        self,
        stage: str,
        cases: Mapping[str, Any],
        load: Callable[[], AbstractContextManager[Any]],
        result: Callable[[Any, Any], Arrays],
    ) -> dict[str, Arrays]:
        """The result of each case, by name. Those without a file are made of what is loaded."""
        paths = {name: self.store / stage / f"{name}.npz" for name in cases}
        if missing := [name for name, path in paths.items() if not path.exists()]:
            (self.store / stage).mkdir(parents=True, exist_ok=True)
            with load() as loaded:
                for name in track(missing, stage, console=Console(stderr=True)):
                    buffer = io.BytesIO()
                    np.savez_compressed(buffer, **result(loaded, cases[name]))
                    write_atomically(paths[name], [buffer.getvalue()])
        return {name: dict(np.load(path)) for name, path in paths.items()}


class Runs(Results):
    """All results of a model in a folder, measured where they are missing."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        super().__init__(folder, sizes)
        self.folder, self.sizes = folder, sizes
        self.model, self.tokenizer = load_model(folder, None, torch.float32)
        self.config = self.model.config.get_text_config()
        self.prompts = [
            x
            for x in prompts(self.tokenizer, sizes.prompts)
            if self.fits(len(x.context) + len(x.question) + x.answer)
        ]

    def fits(self, tokens: int) -> bool:
        """Whether the model has positions for so many tokens."""
        return bool(tokens <= getattr(self.config, "max_position_embeddings", tokens))

    def numbers(self) -> dict[str, Any]:
        """The page's numbers."""
        sizes, named = self.sizes, {prompt.name: prompt for prompt in self.prompts}
        answers = self.stage("answers", named, lambda: nullcontext(self.model), self.answer)
        kept = {
            name: _ids([*named[name].question, *x["answer"].tolist()])
            for name, x in answers.items()
        }
        rows = {name: (_ids(prompt.context), kept[name]) for name, prompt in named.items()}
        by_dtype, by_length = {}, {}
        for dtype in sizes.dtypes:
            by_dtype[dtype] = self.fidelity(dtype, rows)
            if dtype != "float16":
                by_length[dtype] = statistics.by_length(
                    {
                        length: self.fidelity(
                            dtype,
                            {
                                x.name: (_ids(x.context), _ids(x.question))
                                for x in excerpts(self.tokenizer, length, sizes.excerpt, count)
                            },
                        )
                        for length, count in sizes.lengths.items()
                        if self.fits(2 * length)
                    }
                )
        first = next(iter(by_dtype.values()))
        weights = {name: float(x.detach().norm()) for name, x in self.model.named_parameters()}
        return {
            "model": self.folder.resolve().name,
            "sizes_of_run": asdict(sizes),
            "config": {
                name: getattr(self.config, name)
                for name in ("model_type", "num_hidden_layers", "hidden_size")
            },
            "prompts": self.texts(rows),
            "direct_is_stable": all(statistics.same_updates(x) for x in by_dtype.values()),
            "sizes": {run: statistics.sizes(first, weights, run) for run in ("exact", KEPT)},
            "spanned": {str(k): statistics.spanned(self.spans(rows, k)) for k in (0, 1)},
            "grown": {how: statistics.grown(self.growth(how)) for how in ("right", "shuffled")},
            "disturbed": statistics.disturbed(self.sensitivity(rows)),
            "by_length": by_length,
            **{
                name: {dtype: summary(results) for dtype, results in by_dtype.items()}
                for name, summary in (
                    ("agreement", statistics.agreement),
                    ("by_block", statistics.by_block),
                    ("scales", statistics.scales),
                    ("lost", lambda results: {"stable": statistics.lost(results, "stable")}),
                    ("control", statistics.control),
                )
            },
        }

    @torch.no_grad()
    def answer(self, model: Any, prompt: Prompt) -> Arrays:
        """The model's own greedy answer in fp32, without the token that ends it."""
        ids = _ids(prompt.context + prompt.question)
        config = {"max_new_tokens": prompt.answer, "do_sample": False}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **config)
        answer = out[0, ids.shape[1] :]
        ended = torch.isin(answer, torch.tensor(model.generation_config.eos_token_id))
        return {"answer": answer[~ended].numpy()}

    def _load(self, dtype: str) -> Any:
        return load_model(self.folder, self.tokenizer, getattr(torch, dtype))[0]

    def fidelity(self, dtype: str, rows: Mapping[str, Any]) -> dict[str, Arrays]:
        """Every prompt: its context (1, C) and its kept tokens (1, T)."""
        return self.stage(
            dtype,
            {
                name: (*x, not i % self.sizes.stepwise, not i % self.sizes.first_kept)
                for i, (name, x) in enumerate(rows.items())
            },
            lambda: attached(self._load(dtype)),
            lambda models, x: measure(models, *x),
        )

    def spans(self, rows: Mapping[str, Any], prefix: int) -> dict[str, Arrays]:
        """The space that the changes of a context's tokens span, in fp32."""
        groups: dict[str, list[Any]] = {}
        for prompt in self.prompts:
            name = f"{prompt.kind}-{prompt.group}".replace(" ", "-")
            groups.setdefault(name, []).append(rows[prompt.name])
        return self.stage(
            f"spans-{prefix}",
            dict(list(groups.items())[:: self.sizes.spanned]),
            lambda: ContextPatcher(self.model),
            lambda patcher, group: spans(patcher.attached_model, group, prefix),
        )

    def growth(self, how: str) -> dict[str, Arrays]:
        """Few-shot contexts that grow, in fp32."""
        return self.stage(
            f"growth-{how}",
            {task["name"]: task for task in read("few_shot")[: self.sizes.tasks]},
            lambda: ContextPatcher(self.model, "stable"),
            lambda patcher, task: growth(
                patcher, self.tokenizer, task, how == "shuffled", self.sizes.shots
            ),
        )

    def sensitivity(self, rows: Mapping[str, Any]) -> dict[str, Arrays]:
        """A disturbance in fp32."""
        chosen = list(rows.items())[:: self.sizes.disturbed]
        return self.stage(
            "sensitivity",
            {name: (*row, seed) for seed, (name, row) in enumerate(chosen)},
            lambda: ContextPatcher(self.model),
            lambda patcher, case: sensitivity(patcher.attached_model, *case),
        )

    def texts(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Prompts, and their tokens, by kind."""
        found = {}
        for kind in dict.fromkeys(prompt.kind for prompt in self.prompts):
            own = [rows[prompt.name] for prompt in self.prompts if prompt.kind == kind]
            contexts = [context.shape[1] for context, _ in own]
            found[kind] = {
                "prompts": len(own),
                "context_tokens": [min(contexts), max(contexts)],
                "kept_tokens": sum(kept.shape[1] for _, kept in own),
            }
        return found
