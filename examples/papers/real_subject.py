"""What is measured on a pretrained model, how much of it, and where the results lie."""

import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_fidelity import Arrays
from real_prompts import KINDS, LONG_TEXT, TEXTS, Prompt, excerpts, prompts
from transformers import AutoConfig

from icl_patch.bench.results import code_fingerprint
from icl_patch.evaluation.loading import load_model
from icl_patch.patch.atomic_file import write_atomically


@dataclass(frozen=True)
class Sizes:
    """How large the measurement is.

    Attributes:
        dtypes: of the replays.
        prompts: by kind, how many contexts, prompts of each, and tokens of an answer.
        lengths: the lengths of contexts and how many of each; slow_longest, slow_count: the limits
            of both in fp16, for which CPUs have no products.
        excerpt: kept tokens behind a context of the long text, see real_prompts.excerpts.
        instructions, instruction_tokens: generations of the paper's protocol, and their length.
        shots: pairs of a growing few-shot context, and questions; tasks: how many of them.
        disturbed: one prompt of so many is disturbed; stepwise: one of so many runs token by token.
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
    slow_longest: int = 1024
    slow_count: int = 4
    excerpt: tuple[int, int] = (12, 5)
    instructions: int = 4
    instruction_tokens: int = 24
    shots: tuple[int, int] = (16, 4)
    tasks: int = 8
    disturbed: int = 8
    stepwise: int = 4


FULL = Sizes()
QUICK = Sizes(
    dtypes=("bfloat16",),
    prompts=dict.fromkeys(KINDS, (1, 1, 2)),
    lengths={16: 2, 32: 1},
    excerpt=(4, 1),
    instructions=1,
    instruction_tokens=2,
    shots=(3, 2),
    tasks=1,
    disturbed=4,
)


@dataclass(frozen=True)
class Subject:
    """A model in a folder, and how large the measurement is."""

    folder: Path
    sizes: Sizes

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return load_model(self.folder, None, torch.float32)[1]

    def load(self, dtype: str) -> Any:
        """The model."""
        return load_model(self.folder, self.tokenizer, getattr(torch, dtype))[0]

    @cached_property
    def key(self) -> str:
        """A hash of everything that the numbers depend on: model, texts, sizes and code."""
        here = Path(__file__).parent
        measuring = ("real_prompts", "real_fidelity", "real_changes", "real_protocol")
        sources = [here / f"{name}.py" for name in (*measuring, "goldwaser_experiments")]
        texts = [*LONG_TEXT, *sorted(TEXTS.glob("*.toml"))]
        digest = hashlib.sha256(f"{self.sizes}{code_fingerprint()}".encode())
        for path in [*sources, *texts, *sorted(self.folder.glob("*.safetensors"))]:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:12]

    @cached_property
    def config(self) -> Any:
        """The language model's configuration."""
        config: Any = AutoConfig.from_pretrained(self.folder)
        return config.get_text_config()

    def fits(self, tokens: int) -> bool:
        """Whether the model has positions for so many tokens."""
        return tokens <= getattr(self.config, "max_position_embeddings", tokens)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, by kind, that the model has positions for."""
        every = prompts(self.tokenizer, self.sizes.prompts)
        return [p for p in every if self.fits(len(p.context) + len(p.question) + p.answer)]

    def excerpts(self, dtype: str) -> list[Prompt]:
        """The contexts of many lengths."""
        slow, sizes, found = dtype == "float16", self.sizes, []
        for length, count in sizes.lengths.items():
            if self.fits(2 * length) and not (slow and length > sizes.slow_longest):
                fewer = min(count, sizes.slow_count) if slow else count
                found += excerpts(self.tokenizer, length, sizes.excerpt, fewer)
        return found


@dataclass(frozen=True)
class Store:
    """Results by name, each a file of arrays."""

    folder: Path

    def path(self, name: str) -> Path:
        """The file of a result."""
        return self.folder / f"{name}.npz"

    def missing(self, names: list[str]) -> list[str]:
        """The results that are not there yet."""
        return [name for name in names if not self.path(name).exists()]

    def save(self, name: str, arrays: Arrays) -> None:
        """Write a result, whole or not at all."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(name), [buffer.getvalue()])

    def load(self, name: str) -> Arrays:
        """Read a result."""
        with np.load(self.path(name)) as file:
            return dict(file)
