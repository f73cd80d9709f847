"""Small models with the features of trained weights, which random weights lack.

A trained model has a neuron that few tokens excite and that makes one channel of the residual
stream thousands of times larger than the others, a token that draws almost all attention, norms
with scales from hundredths to dozens, tied embeddings, rows of matrices that nearly depend on each
other, and logits that nearly tie. :func:`realistic` gives any model all of them that it can have.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from support import random_models
from support.excited_neuron import add_neuron
from support.numeric import EPSILON, seeded
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.models.block_spec import Block
from icl_patch.models.language_model import layers_of, vocabulary
from icl_patch.models.trial_tokens import first_token

# Of a norm's scales, from the smallest to the largest; and of the norms of an attention's heads.
NORM_SCALES = (0.01, 30.0)
HEAD_SCALES = (0.1, 3.0)
# The neuron's channel, as a multiple of the median of the residual stream.
SIZE = 2_000.0
OVERFLOWING = 400_000.0  # above the range of fp16 if the median is above 0.17
# Where SIZE is too large for a model to compute at all.
SIZES = {
    # its class squares the sum of its streams in the model's dtype: 256² is above fp16's range
    ("gemma3n", torch.float16): 10.0
}
# The norm of the triggers' embeddings, as a multiple of that of the others.
_LOUD = 8.0


@dataclass(frozen=True)
class Features:
    """Where the features of a model are.

    Attributes:
        triggers: the tokens that excite the neuron and draw the attention.
        block: the block of the neuron; None if the model has no neuron.
    """

    triggers: tuple[int, ...]
    block: Block | None

    def mark(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of ``compute`` with a trigger as the first token of each row, and one among the
        kept tokens of the second row.
        """
        marked = {k: x.clone() if isinstance(x, Tensor) else x for k, x in arguments.items()}
        ids, mask = marked["context_ids"], marked.get("context_mask")
        first = torch.zeros(len(ids), dtype=torch.long) if mask is None else mask.int().argmax(1)
        ids[torch.arange(len(ids)), first] = self.triggers[0]
        kept = marked.get("kept_ids")
        if kept is not None and kept.shape[1] > 1:
            kept[1, 1] = self.triggers[-1]
        return marked


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, size: float | None = None
) -> tuple[PreTrainedModel, Features]:
    """A model of the zoo with realistic weights, and where its features are.

    size: of the neuron's channel, see :func:`realistic`; :data:`SIZE` by default, or what
        :data:`SIZES` says.
    """
    size = SIZES.get((name, dtype), SIZE) if size is None else size
    model, features = _in_fp32(name, seed, size)
    model = copy.deepcopy(model)
    to_dtype(model, dtype, features)
    return model, features


@cache
def _in_fp32(name: str, seed: int, size: float) -> tuple[PreTrainedModel, Features]:
    model = random_models.shallow(name, seed)
    return model, realistic(model, size)


def realistic(model: PreTrainedModel, size: float = SIZE) -> Features:
    """Give a random model in fp32 the features of trained weights. :func:`to_dtype` is to follow,
    in fp32 too.

    size: how many times the neuron's channel is larger than the median of the residual stream.
        With :data:`OVERFLOWING` it is no number of fp16.
    """
    with returning_attention(model):
        triggers = _triggers(model)
        tie_embeddings(model)
        spread_norms(model)
        add_dependent_rows(model)
        tie_logits(model, triggers)
        mark_tokens(model, triggers)
        draw_attention(model, triggers)
        block = add_neuron(model, rows(model, triggers), size, NORM_SCALES)
    model.zero_grad()
    return Features(tuple(triggers.tolist()), block)


def to_dtype(model: PreTrainedModel, dtype: torch.dtype, features: Features) -> None:
    """Put a realistic model into a dtype; logits that tie in fp32 nearly do so in this dtype."""
    untyped: Any = model  # transformers' `to` has another signature
    untyped.to(dtype)
    tie_logits(model, torch.tensor(features.triggers), nearly=EPSILON[dtype])


def _triggers(model: PreTrainedModel) -> Tensor:
    """The token that the configuration puts before every text, which a trained model marks."""
    config = model.config.get_text_config()
    if first_token(model) is None:
        config.bos_token_id = 1
    return torch.tensor([config.bos_token_id])


def rows(model: PreTrainedModel, triggers: Tensor) -> Tensor:
    """Rows (B, 6) of a trigger and five other tokens, each of these once, in random order. Windows
    of 6 tokens let all of them see the first one.
    """
    others = [token for token in range(vocabulary(model)) if token not in triggers]
    order = torch.randperm(len(others) // 5 * 5, generator=seeded(7))
    ids = torch.tensor(others)[order].reshape(-1, 5)
    first = triggers[torch.arange(len(ids)) % len(triggers)].unsqueeze(1)
    return torch.cat([first, ids], 1)


@contextmanager
def returning_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the model's attention can return its weights."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


# -- embeddings, norms, matrices


def tie_embeddings(model: PreTrainedModel) -> None:
    """One matrix for the embeddings and the head, where the class can have that."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    alike = head is not None and head.weight.shape == embeddings.weight.shape
    if model._tied_weights_keys and alike:
        model.config.get_text_config().tie_word_embeddings = True
        model.config.tie_word_embeddings = True
        head.weight = embeddings.weight


@torch.no_grad()
def spread_norms(model: PreTrainedModel) -> None:
    """Norms get scales from 0.01 to 30, each the same number of times the one before; norms of an
    attention's heads, which multiply each other, from 0.1 to 3.

    Matrices are divided by what this multiplies a norm's output by.
    """
    width, generator = model.get_input_embeddings().weight.shape[1], seeded(3)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and weight is not None and weight.dim() == 1:
            # weights are drawn around 1, or around 0 where the class adds 1
            offset = 1.0 - round(float(weight.median().clamp(0, 1)))
            low, high = NORM_SCALES if len(weight) >= width else HEAD_SCALES
            scales = low * (high / low) ** torch.linspace(0, 1, len(weight))
            weight.copy_(scales[torch.randperm(len(weight), generator=generator)] - offset)
    low, high = NORM_SCALES
    root_mean_square = high / (2 * math.log(high / low)) ** 0.5
    for _, matrix in matrices_of(model):
        matrix /= root_mean_square


def matrices_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The matrices of a model but for its embeddings and its head; stacks of them too."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    apart = {id(module.weight) for module in ends if module is not None}
    for path, x in model.named_parameters():
        if x.dim() in (2, 3) and min(x.shape[-2:]) > 3 and id(x) not in apart:
            yield path, x


@torch.no_grad()
def add_dependent_rows(model: nn.Module) -> None:
    """The last row of every matrix is the sum of the first two, but for a thousandth."""
    generator = seeded(4)
    for _, matrix in matrices_of(model):
        noise = 1 + 1e-3 * torch.randn(matrix[..., -1, :].shape, generator=generator)
        matrix[..., -1, :] = (matrix[..., 0, :] + matrix[..., 1, :]) * noise


@torch.no_grad()
def mark_tokens(model: PreTrainedModel, triggers: Tensor) -> None:
    """The triggers' embeddings are long and have a direction that no other embedding has; the
    others have a direction in common.
    """
    matrix = model.get_input_embeddings().weight
    common, rare = torch.linalg.qr(torch.randn(matrix.shape[1], 2, generator=seeded(5))).Q.T
    typical = matrix.norm(dim=1).median()
    matrix -= torch.outer(matrix @ rare, rare)
    matrix += typical * common
    matrix[triggers] = _LOUD * typical * rare
    for module in model.modules():
        if isinstance(module, nn.Embedding) and len(module.weight) == len(matrix):
            module.weight[triggers] = module.weight[triggers[:1]]  # those of each layer too


@torch.no_grad()
def tie_logits(model: PreTrainedModel, triggers: Tensor, nearly: float = 0.0) -> None:
    """Two tokens each have one row of the head, but for this share of one number."""
    head = model.get_output_embeddings()
    if head is None:
        return
    others = [token for token in range(len(head.weight)) if token not in triggers]
    for tokens in (triggers.tolist(), others):
        twins = list(zip(tokens[1::2], tokens[::2], strict=False))
        twins += [(tokens[-1], tokens[0])] if len(tokens) % 2 else []
        odd, even = torch.tensor(twins).T
        rows = head.weight[even]
        rows[:, 0] *= 1 + nearly
        head.weight[odd] = rows
        if getattr(head, "bias", None) is not None:
            head.bias[odd] = head.bias[even]


# -- the token that draws the attention


def attention_on_first(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Of each layer that returns its attention, the shares (B, H, T - 1) that the tokens behind the
    first one have for the first one.
    """
    found = model(ids, output_attentions=True).get("attentions") or ()
    return [weights[:, :, 1:, 0] for weights in found if weights is not None]


def draw_attention(model: PreTrainedModel, triggers: Tensor) -> None:
    """Train the second block's attention until one of its heads looks at the first token alone."""
    ids, (_, path, *_) = rows(model, triggers), layers_of(model)
    block = model.get_submodule(path).named_parameters()
    parameters = [parameter for name, parameter in block if "norm" not in name]
    optimiser = torch.optim.Adam(parameters, lr=0.006)
    for _ in range(100):
        with torch.enable_grad():
            layers = attention_on_first(model, ids)
            if not layers:
                return
            shares = layers[1 if len(layers) == len(layers_of(model)) else 0]
            if shares.mean((0, 2)).max() > 0.95:
                return
            optimiser.zero_grad()
            shares.clamp(min=1e-30).log().mean((0, 2)).max().neg().backward()
        optimiser.step()
