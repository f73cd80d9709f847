"""A chat template, and the embedded model, which has none, with it."""

import shutil
from pathlib import Path

from icl_patch import embedded

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def chat_model(folder: Path) -> str:
    """The embedded model in a new folder, with the template."""
    shutil.copytree(embedded.MODEL_DIR, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


def shallow_chat_model(folder: Path) -> str:
    """Its first two blocks, whose answers mean nothing but come in a third of the time."""
    chat_model(folder)
    model, _ = embedded.load()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers, model.config.layer_types = 2, model.config.layer_types[:2]
    model.save_pretrained(folder)
    return str(folder)
