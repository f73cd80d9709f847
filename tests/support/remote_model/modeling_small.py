"""A small decoder of one's own, as a folder on the hub holds it for ``trust_remote_code``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_small import SmallConfig


class SmallAttention(nn.Module):
    def __init__(self, config: SmallConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = config.num_attention_heads, layer
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, attention_mask: Tensor, past_key_values: DynamicCache) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        k, v = past_key_values.update(k, v, self.layer)
        causal = attention_mask is None and q.shape[2] > 1
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=causal
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class SmallBlock(nn.Module):
    def __init__(self, config: SmallConfig, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.norm_1, self.norm_2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = SmallAttention(config, layer)
        self.enter, self.leave = nn.Linear(d, 2 * d), nn.Linear(2 * d, d, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor, past_key_values: DynamicCache) -> Tensor:
        x = x + self.attention(
            self.norm_1(x), attention_mask=attention_mask, past_key_values=past_key_values
        )
        return x + self.leave(F.relu(self.enter(self.norm_2(x))).square())


class SmallForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SmallConfig
    _supports_sdpa = True
    _input_embed_layer = "embed"

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(64, config.hidden_size)
        self.blocks = nn.ModuleList(
            SmallBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        cache = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        before, width = cache.get_seq_length(), input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(before, before + width).expand_as(input_ids)
        x = self.embed(input_ids) + self.places(position_ids)
        if self.config.masks:
            mask = create_causal_mask(
                self.config, x, attention_mask, cache, position_ids=position_ids
            )
        else:
            mask = torch.ones(width, before + width, dtype=torch.bool).tril(before)
        for block in self.blocks:
            x = block(x, attention_mask=mask, past_key_values=cache)
        return CausalLMOutputWithPast(logits=self.lm_head(x), past_key_values=cache)
