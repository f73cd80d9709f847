"""What a patched model must do in whichever implementation runs its products; ``test_backends.py`` starts this in a process of its own."""

import sys

import derivatives
import expert_products
import row_ops
import torch
import traced
from models import build
from numeric import noise_limit
from transformers import GPT2Config, GPT2LMHeadModel

from icl_patch import ContextPatcher, backends, metrics, ops


def gpt2() -> torch.nn.Module:
    """Its matrices are Conv1D's, (K, N), and it ends in a bias."""
    config = GPT2Config(n_embd=40, n_layer=1, n_head=4, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


MODELS = {
    "gemma3": lambda: build("gemma3", num_hidden_layers=1, layer_types=["full_attention"], hidden_size=40),
    "llama": lambda: build("llama", num_hidden_layers=1),
    "gpt2": gpt2,
}


def main(backend: str) -> None:
    assert backends.wanted == backend
    row_ops.check_all(widths=(1, 70))
    for dtype in (torch.float64, torch.float32):
        kernels = backend == "triton" and dtype == torch.float32
        expert_products.check_products(ops.expert_linear, dtype, expert_products.SMALL, bits=kernels)
    for op in derivatives.FUNCTIONS:
        derivatives.check_derivatives(op)
        derivatives.check_mapped(op)
    if backend == "triton":
        for op in traced.CALLS:
            traced.check_traced(op)
    kept = torch.randint(1, 97, (2, 2))
    for name, make in MODELS.items():
        torch.manual_seed(1)
        model = make()
        limit = noise_limit(model)
        for update in ("stable", "exact"):
            with ContextPatcher(model, update) as patcher:
                patch = patcher.compute(torch.randint(1, 97, (2, 5)), kept)
                logits = patcher.forward(kept, patch)
            error = float(metrics.linf(logits, patch.logits).max())
            print(name, update, error)
            assert error <= limit
            assert update != "exact" or torch.equal(logits, patch.logits)


if __name__ == "__main__":
    main(sys.argv[1])
