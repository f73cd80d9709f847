"""Small random models that give the tokens of images positions of three numbers (M-RoPE)."""

from typing import Any

import torch
import transformers
from torch import Tensor

from icl_patch.evaluation import tiny_models

IMAGE, START, END = 96, 94, 95
KINDS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of one of KINDS, whose images come as patches of 96 numbers, four for each token."""
    vision = {"num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "depth": 2}
    own = {
        "Qwen2VL": {"hidden_size": 32, "embed_dim": 16, "mlp_ratio": 2, "in_channels": 3},
        "Qwen2_5_VL": {"hidden_size": 16, "out_hidden_size": 32},
        "Qwen3VL": {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    }[kind]
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**tiny_models._COMMON, "num_hidden_layers": 2, "rope_parameters": rope},
        vision_config=vision | own,
        image_token_id=IMAGE,
        video_token_id=93,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    tiny_models.randomise(model)
    model.lm_head.weight.data[90:] = (
        0  # it never chooses a token that stands for a part of an image
    )
    return model.to(dtype).eval()


def one_image() -> dict[str, Tensor]:
    """A processor's output for one row with an image of 2 x 2 tokens, which take two positions."""
    return _processed([[5, START, *[IMAGE] * 4, END, 6]], [[1, 4, 4]])


def ragged_images() -> dict[str, Tensor]:
    """The same of two rows: images of 2 x 2 and 2 x 4 tokens, the first row with padding."""
    short, long = [5, START, *[IMAGE] * 4, END, 6], [7, 8, START, *[IMAGE] * 8, END, 9]
    return _processed([[0] * 5 + short, long], [[1, 4, 4], [1, 4, 8]])


def _processed(rows: list[list[int]], grids: list[list[int]]) -> dict[str, Tensor]:
    ids, grid = torch.tensor(rows), torch.tensor(grids)
    patches = int(grid.prod(1).sum())
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(patches, 96, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
