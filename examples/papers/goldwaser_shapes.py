"""A small Gemma 3 with eyes: synthetic scenes of four coloured shapes, questions that only the
image answers, and its training.

The model is the real class, ``Gemma3ForConditionalGeneration`` with a SigLIP tower, and so is its
``Gemma3Processor``: code that runs on it runs on google/gemma-3-4b-it. A fifth of the scenes is
held out, by hash, and never drawn in training.
"""

import hashlib
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

COLOURS = {
    "red": (255, 30, 30),
    "green": (30, 230, 60),
    "blue": (60, 90, 255),
    "yellow": (250, 220, 30),
    "pink": (255, 80, 230),
    "white": (250, 250, 250),
}
SHAPES = ("ring", "square", "triangle", "cross")
CELLS = ("top left", "top right", "bottom left", "bottom right")
EVERYTHING = "all ?"
QUESTIONS = (EVERYTHING, *(f"{cell} ?" for cell in CELLS))
THINGS = tuple(itertools.product(COLOURS, SHAPES))
CHANCE = {
    question: len(THINGS) ** -(len(CELLS) if question == EVERYTHING else 1)
    for question in QUESTIONS
}
"""Of the whole answer right, for one who does not see the image."""

SIDE = 24  # of an image, in pixels
IMAGE_TOKENS = 4
_HELD_OUT_OF = 5
_ASKED = 2  # questions in a training document
_OTHER_TOKENS_WEIGHT = 0.1  # of a token outside an answer: which question comes is a matter of luck
_IMAGE_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{"
    " message['content'] }}{% else %}{% for part in message['content'] %}{{ '<start_of_image>' if"
    " part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Training:
    """How long both parts are trained, and how."""

    steps: int
    tower_steps: int
    batch: int = 32
    rate: float = 3e-3
    tower_rate: float = 2e-3


FULL = Training(steps=800, tower_steps=150)
QUICK = Training(steps=2, tower_steps=2, batch=4)


@dataclass(frozen=True)
class Scene:
    """The (colour, shape) in each of :data:`CELLS`."""

    things: tuple[tuple[str, str], ...]

    @classmethod
    def sample(cls, rng: random.Random, *, held_out: bool) -> "Scene":
        """Any scene of one side of the split."""
        while True:
            scene = cls(tuple(rng.choice(THINGS) for _ in CELLS))
            if scene.held_out == held_out:
                return scene

    @property
    def held_out(self) -> bool:
        """Whether the scene is reserved for evaluation (a fixed fifth of them, by hash)."""
        return hashlib.sha256(self.answer(EVERYTHING).encode()).digest()[0] % _HELD_OUT_OF == 0

    def answer(self, question: str) -> str:
        """The answer to one of :data:`QUESTIONS`."""
        named = [f"a {colour} {shape}" for colour, shape in self.things]
        asked = named if question == EVERYTHING else [named[QUESTIONS.index(question) - 1]]
        return " , ".join(asked) + " ."

    def draw(self, rng: random.Random) -> np.ndarray:
        """An image (SIDE, SIDE, 3) uint8: sizes and places vary."""
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
        for (colour, shape), (top, left) in zip(
            self.things, itertools.product((0, SIDE / 2), repeat=2), strict=True
        ):
            size = rng.uniform(4.4, 5.4)
            x = columns - left - SIDE / 4 - rng.uniform(-1, 1) * (SIDE / 4 - size)
            y = rows - top - SIDE / 4 - rng.uniform(-1, 1) * (SIDE / 4 - size)
            image[_mask(shape, x / size, y / size)] = COLOURS[colour]
        return image


def _mask(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The pixels of a shape of size 1 around the origin; y points down."""
    if shape == "ring":
        return (x * x + y * y <= 1) & (x * x + y * y >= 0.3)
    box = np.maximum(np.abs(x), np.abs(y))
    if shape == "square":
        return box <= 0.9
    if shape == "triangle":
        return (np.abs(y) <= 1) & (np.abs(x) <= (y + 1) / 2)
    return (box <= 1) & (np.minimum(np.abs(x), np.abs(y)) <= 0.3)


def held_out_scenes(count: int) -> list[Scene]:
    """``count`` scenes that no training has seen."""
    rng = random.Random(0)
    return [Scene.sample(rng, held_out=True) for _ in range(count)]


def build_processor() -> Gemma3Processor:
    """A word a token, three tokens more for images, and Gemma 3's own processing of images."""
    words = sorted(
        {word for text in (*QUESTIONS, *COLOURS, *SHAPES, "a , .") for word in text.split()}
    )
    special = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    vocabulary = {word: index for index, word in enumerate([*special.values(), *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings: dict[str, Any] = {
        "padding_side": "left",
        "model_max_length": 128,
        "extra_special_tokens": _IMAGE_TOKENS,
        **special,
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **settings)
    image_processor = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(
        image_processor, tokenizer, chat_template=_CHAT, image_seq_length=IMAGE_TOKENS
    )


def build_model(processor: Gemma3Processor) -> Gemma3ForConditionalGeneration:
    """The untrained model."""
    tokenizer: Any = processor.tokenizer
    config = Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 4,  # as in the embedded model: attention becomes sharp early
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": tokenizer.model_max_length,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": SIDE // 2,
            "vision_use_head": False,
        },
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_id=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    return Gemma3ForConditionalGeneration(config)


def encode(processor: Any, images: list[Any] | None, texts: list[str]) -> dict[str, Tensor]:
    """One user turn a row, an image (if there are images) before its text, through the chat
    template; left-padded.
    """
    conversations = []
    for row, text in enumerate(texts):
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if images is not None:
            parts.insert(0, {"type": "image", "image": Image.fromarray(images[row])})
        conversations.append([{"role": "user", "content": parts}])
    settings = {
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
        "add_generation_prompt": True,
    }
    return dict(
        processor.apply_chat_template(
            conversations, **settings, processor_kwargs={"padding": True, "padding_side": "left"}
        )
    )


def _batch(processor: Any, rng: random.Random, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Training documents, an image with questions and answers, and the loss weight of each token,
    (size, T).
    """
    scenes = [Scene.sample(rng, held_out=False) for _ in range(size)]
    texts, inside = [], []
    for scene in scenes:
        words: list[str] = []
        answers: list[bool] = []
        for question in rng.sample(QUESTIONS, _ASKED):
            for text, is_answer in ((question, False), (scene.answer(question), True)):
                words += text.split()
                answers += [is_answer] * len(text.split())
        texts.append(" ".join([*words, processor.tokenizer.eos_token]))
        inside.append([*answers, False])
    inputs = encode(processor, [scene.draw(rng) for scene in scenes], texts)
    weights = _OTHER_TOKENS_WEIGHT * inputs["attention_mask"].float()
    for row, answers in enumerate(inside):
        # a word is a token, and padding is on the left
        weights[row, -len(answers) :][torch.tensor(answers)] = 1.0
    return inputs, weights


def _steps(
    parameters: list[Tensor], rate: float, steps: int, loss_of: Callable[[], Tensor], title: str
) -> None:
    """``steps`` steps of AdamW on the loss of ``loss_of``, under a cosine schedule with warm-up."""
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warm_up = max(1, steps // 20)

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        )

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for _ in track(range(steps), title, console=Console(stderr=True)):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()


def _train_tower(model: Any, processor: Any, rng: random.Random, training: Training) -> None:
    """The vision tower alone: from each of its tokens a linear map, thrown away afterwards, reads
    colour and shape of one cell.
    """
    tower = model.model.vision_tower
    read = nn.Linear(tower.config.hidden_size, len(COLOURS) + len(SHAPES))
    colours, shapes = list(COLOURS), list(SHAPES)

    def loss_of() -> Tensor:
        scenes = [Scene.sample(rng, held_out=False) for _ in range(training.batch)]
        pixels = processor.image_processor(
            [scene.draw(rng) for scene in scenes], return_tensors="pt"
        )["pixel_values"]
        seen = read(tower(pixel_values=pixels).last_hidden_state).split(
            [len(COLOURS), len(SHAPES)], -1
        )
        wanted = torch.tensor(
            [
                [(colours.index(colour), shapes.index(shape)) for colour, shape in scene.things]
                for scene in scenes
            ]
        )
        pairs = zip(seen, wanted.unbind(-1), strict=True)
        losses = [F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in pairs]
        return losses[0] + losses[1]

    _steps(
        [*tower.parameters(), *read.parameters()],
        training.tower_rate,
        training.tower_steps,
        loss_of,
        "vision tower",
    )


def train(training: Training) -> tuple[Gemma3ForConditionalGeneration, Gemma3Processor]:
    """The trained model, in eval mode, and its processor: first its vision tower, then, with the
    tower frozen as in Gemma 3, the rest.
    """
    torch.manual_seed(0)
    rng, processor = random.Random(0), build_processor()
    model = build_model(processor)
    _train_tower(model, processor, rng, training)
    model.model.vision_tower.requires_grad_(False)

    def loss_of() -> Tensor:
        inputs, weights = _batch(processor, rng, training.batch)
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(
            logits.flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="none"
        )
        return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()

    _steps(
        [x for x in model.parameters() if x.requires_grad],
        training.rate,
        training.steps,
        loss_of,
        "model",
    )
    return model.eval(), processor


@torch.no_grad()
def score(model: Any, processor: Any, count: int) -> dict[str, dict[str, float]]:
    """Whole answers right on held-out scenes, a question at a time: with the image, with that of
    another scene, and with none.
    """
    scenes, rng = held_out_scenes(count), random.Random(0)
    images = [scene.draw(rng) for scene in scenes]
    found: dict[str, dict[str, float]] = {}
    for question in QUESTIONS:
        wanted = [scene.answer(question) for scene in scenes]
        shares = {}
        for name, shown in (
            ("with_image", images),
            ("with_another_image", images[1:] + images[:1]),
            ("without_image", None),
        ):
            inputs = encode(processor, shown, [question] * count)
            out = model.generate(**inputs, max_new_tokens=len(wanted[0].split()), do_sample=False)
            given = processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
            shares[name] = sum(a == b for a, b in zip(given, wanted, strict=True)) / count
        found[question] = {**shares, "chance": CHANCE[question]}
    return found


def trained(folder: Path, training: Training) -> tuple[Any, Any]:
    """The model and its processor from ``folder``, where they are trained first if they are not
    there yet with these settings.
    """
    settings, notes = asdict(training), folder / "training.json"
    if not notes.exists() or json.loads(notes.read_text(encoding="utf-8")) != settings:
        shutil.rmtree(folder, ignore_errors=True)
        model, processor = train(training)
        model.to(torch.bfloat16).save_pretrained(folder)  # score the model that is saved
        processor.save_pretrained(folder)
        # last: a folder with it is complete
        notes.write_text(json.dumps(settings), encoding="utf-8")
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval(), AutoProcessor.from_pretrained(folder)
