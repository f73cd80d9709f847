"""What a patched model must do in whichever implementation runs its products:
``test_dispatch.py`` calls it in plain torch, ``interpreter_checks.py`` in Triton's interpreter.
"""

import torch
from support.numeric import noise_limit
from support.random_models import build, shallow

from icl_patch import ContextPatcher, metrics

MODELS = {
    "gemma3": lambda: build(
        "gemma3", num_hidden_layers=1, layer_types=["full_attention"], hidden_size=40
    ),
    "llama": lambda: build("llama", num_hidden_layers=1),
    "gpt2": lambda: shallow("gpt2"),  # its matrices are Conv1D's, (K, N), and it ends in a bias
}


def check_model(name: str, update: str) -> None:
    """A patch of a context, beside the pass that was recorded."""
    kept, model = torch.randint(1, 90, (2, 2)), MODELS[name]()
    with ContextPatcher(model, update) as patcher:
        computed = patcher.compute(torch.randint(1, 90, (2, 5)), kept)
        logits = patcher.forward(kept, computed)
    error = float(metrics.linf(logits, computed.logits).max())
    print(name, update, error)
    assert error <= noise_limit(model)
    assert update != "exact" or torch.equal(logits, computed.logits)
