"""The configuration of a model class that transformers does not have."""

from transformers import PreTrainedConfig


class SmallConfig(PreTrainedConfig):
    model_type = "small_remote"

    def __init__(
        self,
        vocab_size: int = 97,
        hidden_size: int = 32,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        masks: bool = True,
        **kwargs: object,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.masks = masks  # whether it asks transformers for its masks
        super().__init__(**kwargs)
