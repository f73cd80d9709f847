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
