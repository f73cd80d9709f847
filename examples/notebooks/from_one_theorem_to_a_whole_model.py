# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---
# %% [markdown]
"""
# From one theorem to a whole model

A transformer block that has read a context computes the same as a block that has not, with other
weights. This notebook goes from that theorem on a toy block to a model of many blocks, and asserts
equality at every step.

Run it as a script, `python from_one_theorem_to_a_whole_model.py [MODEL]`, or open it in Jupyter
with jupytext. MODEL is a folder or hub id of a Llama, Qwen, Mistral or Gemma 3; without it the
small Gemma 3 of the package is used.
"""

# %%
import copy
import sys

import torch
import torch.nn.functional as F

from icl_patch import ContextPatcher, metrics, ops
from icl_patch.evaluation.loading import load_model
from icl_patch.models.prompts import make_prompt, split_ids

MODEL = sys.argv[1] if "__file__" in globals() and len(sys.argv) > 1 else None
torch.set_grad_enabled(False)


def relative_error(result, expected):
    """The largest difference, relative to the largest expected number."""
    return float((result - expected).abs().max() / expected.abs().max())


# %% [markdown]
"""
## 1. A block in twenty lines

Attention adds to the token's residual stream `x` what it read in the tokens before it. The MLP
adds its own output behind that. The context reaches the MLP through one vector alone: the residual
stream `hidden` between the two.
"""

# %%
d, inner, eps = 8, 20, 1e-6
generator = torch.Generator().manual_seed(0)


def random(*shape):
    """Numbers in fp64, so that only formulas are compared, not rounding."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


W_query, W_key, W_value = random(d, d), random(d, d), random(d, d)
weights = {"gate": random(inner, d), "up": random(inner, d), "down": random(d, inner)}


def norm(x):
    return x / (x.square().mean() + eps).sqrt()


def attention(tokens):
    x = tokens[-1]
    scores = (tokens @ W_key.T) @ (W_query @ x) / d**0.5
    return x + scores.softmax(0) @ tokens @ W_value.T


def inner_vector(hidden, gate, up):
    z = norm(hidden)
    return F.silu(gate @ z) * (up @ z)


def block(tokens, gate, up, down):
    hidden = attention(tokens)
    return hidden + down @ inner_vector(hidden, gate, up)


context, token = random(5, d), random(1, d)
with_context = block(torch.cat([context, token]), **weights)
without = block(token, **weights)
print(f"without the context, the output is off by {relative_error(without, with_context):.0%}")
assert relative_error(without, with_context) > 0.1

# %% [markdown]
"""
## 2. The theorem

Let `z` be the MLP's normalised input without the context, and `z_ctx` the one with it. A matrix `W`
that reads `z` gives what it would have given for `z_ctx` if it becomes

    W + u vᵀ,   u = W (z_ctx - z),   v = z / ‖z‖²        because v·z = 1.

Behind these readers, the MLP computes the same as with the context. Only the residual connection
still lacks `delta = hidden_ctx - hidden`, and the MLP's last matrix adds it in the same way, with
`u = delta` and `v = h / ‖h‖²`. Every change has rank 1.
"""

# %%
hidden_ctx, hidden = attention(torch.cat([context, token])), attention(token)
z_ctx, z = norm(hidden_ctx), norm(hidden)
h = inner_vector(hidden_ctx, weights["gate"], weights["up"])
v = z / z.square().sum()
delta = hidden_ctx - hidden

changes = {
    "gate": torch.outer(weights["gate"] @ (z_ctx - z), v),
    "up": torch.outer(weights["up"] @ (z_ctx - z), v),
    "down": torch.outer(delta, h / h.square().sum()),
}
patched = {name: weight + changes[name] for name, weight in weights.items()}

output = block(token, **patched)
print(f"patched, without the context: off by {relative_error(output, with_context):.0e}")
assert relative_error(output, with_context) < 1e-12
assert all(torch.linalg.matrix_rank(change) == 1 for change in changes.values())

# %% [markdown]
"""
The patch belongs to this one token. For another token, with the same context, it is wrong.
"""

# %%
other = random(1, d)
off = relative_error(block(other, **patched), block(torch.cat([context, other]), **weights))
print(f"the same patch for another token: off by {off:.0%}")
assert off > 0.1

# %% [markdown]
"""
## 3. Gemma's form

Gemma's blocks end in a norm with a scale `m`: `hidden + m ⊙ Norm(W_down h)`. What leaves that norm
has a fixed size before the scale, so `W_down` alone cannot add any `delta`. The scale can:
`m' = m + delta ⊘ Norm(W_down h)`. That is the *direct* update.

It divides by activations. Where one is small, the scale explodes, and multiplies every rounding
error with it. The *stable* update shares the work: it turns `W_down h` into a vector of the same
length in a better direction, and the scale takes only the rest.
"""

# %%
scale = 1 + random(d)


def gemma_block(tokens, gate, up, down, scale):
    hidden = attention(tokens)
    return hidden + scale * norm(down @ inner_vector(hidden, gate, up))


# a coordinate of W_down h that is nearly zero
weights["down"][3] -= (weights["down"][3] @ h) / h.square().sum() * h
weights["down"][3] += 1e-7 * h / h.square().sum()

expected = gemma_block(torch.cat([context, token]), **weights, scale=scale)
readers = {name: weights[name] + changes[name] for name in ("gate", "up")}
h_down = weights["down"] @ h

direct = scale + delta / norm(h_down)
output = gemma_block(token, **readers, down=weights["down"], scale=direct)
direct_error = relative_error(output, expected)

update = ops.stable_scale(delta[None], scale, h_down[None], eps)
stable = update.new_scale[0]
down = weights["down"] + torch.outer(update.u[0], h / h.square().sum())
output = gemma_block(token, **readers, down=down, scale=stable)
stable_error = relative_error(output, expected)

print(f"largest scale before: {scale.abs().max():.1f}")
print(f"direct: {direct.abs().max():.0e}, output off by {direct_error:.0e}")
print(f"stable: {stable.abs().max():.1f}, output off by {stable_error:.0e}")
assert stable_error < 1e-12
# equal too, but for rounding that the scale has multiplied
assert direct_error < 1e-15 * direct.abs().max()
assert direct.abs().max() > 1e4 * stable.abs().max()

# %% [markdown]
"""
## 4. Algorithm 1: a whole model

If the output of block 1 is the same with and without the context, so is the input of block 2. So
the blocks can be patched one after another, while the token runs through the model:

1. run the model with the context, and record `hidden_ctx`, `z_ctx` and `h` of every block;
2. run a copy on the token alone, at the same position; before a matrix is used, change it.
"""

# %%
model, tokenizer = load_model(MODEL, dtype=torch.float32)
if MODEL is None:
    prompt = make_prompt(tokenizer, "fmrp>", context="mode upper\n")
else:
    prompt = make_prompt(tokenizer, "Who are you?", system="Your name is Pip. You are a robot.")
context_ids, question_ids = split_ids(tokenizer, prompt)
prompt_ids = torch.cat([context_ids, question_ids], 1)
position = torch.tensor([[prompt_ids.shape[1] - 1]])
print(f"{context_ids.shape[1]} tokens of context, {question_ids.shape[1]} of the question")


def parts(block):
    """Norm before the MLP, and the scaled norm behind it, which only Gemma's blocks have."""
    behind = getattr(block, "post_feedforward_layernorm", None)
    before = block.post_attention_layernorm if behind is None else block.pre_feedforward_layernorm
    return before, block.mlp, behind


def observe(model, call):
    """Call ``call(block, part, input)`` before the norm, the readers and the last matrix run."""
    handles = []
    for place, block in enumerate(model.model.layers):
        before, mlp, _ = parts(block)
        modules = {"hidden": before, "gate": mlp.gate_proj, "up": mlp.up_proj, "h": mlp.down_proj}
        for part, module in modules.items():
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, inputs, place=place, part=part: call(place, part, inputs[0][0, -1])
                )
            )
    return handles


def add_outer(linear, u, z):
    linear.weight.data += torch.outer(u, z / z.square().sum())


def algorithm_1(model, prompt_ids, position):
    """A copy of the model whose weights hold the context, for the last token of the prompt."""
    with_context = {}
    handles = observe(model, lambda place, part, x: with_context.update({(place, part): x.clone()}))
    model(prompt_ids, use_cache=False)
    for handle in handles:
        handle.remove()

    changed, hidden = copy.deepcopy(model), {}

    def change(place, part, x):
        block, target = changed.model.layers[place], with_context[place, part]
        _, mlp, behind = parts(block)
        if part == "hidden":
            hidden[place] = x.clone()
        elif part in ("gate", "up"):
            reader = mlp.gate_proj if part == "gate" else mlp.up_proj
            add_outer(reader, reader.weight @ (target - x), x)
        else:
            delta = with_context[place, "hidden"] - hidden[place]
            if behind is None:
                add_outer(mlp.down_proj, delta, target)
            else:
                h_down = mlp.down_proj.weight @ target
                update = ops.stable_scale(delta[None], 1 + behind.weight, h_down[None], behind.eps)
                add_outer(mlp.down_proj, update.u[0].float(), target)
                behind.weight.data = (update.new_scale[0] - 1).float()

    handles = observe(changed, change)
    changed(prompt_ids[:, -1:], position_ids=position, use_cache=False)
    for handle in handles:
        handle.remove()
    return changed


by_algorithm_1 = algorithm_1(model, prompt_ids, position)
logits = {
    "with the context": model(prompt_ids, use_cache=False).logits[:, -1:],
    "without": model(prompt_ids[:, -1:], position_ids=position, use_cache=False).logits,
    "Algorithm 1": by_algorithm_1(
        prompt_ids[:, -1:], position_ids=position, use_cache=False
    ).logits,
}
for name in ("without", "Algorithm 1"):
    error = float(metrics.linf(logits[name], logits["with the context"]).max())
    print(f"{name}: logits off by {error:.0e}")

# %% [markdown]
"""
The model computes in fp32, so now there is rounding. How much is it? The unmodified model gives
other logits when every weight moves by one unit in the last place. A patch is right if its error
is no larger than ten times that noise.
"""

# %%
nudged = copy.deepcopy(model)
generator = torch.Generator().manual_seed(1)
for weight in nudged.parameters():
    sign = torch.randn(weight.shape, generator=generator).sign()
    weight.data *= 1 + sign * torch.finfo(torch.float32).eps
moved = nudged(prompt_ids, use_cache=False).logits[:, -1:]
noise = float(metrics.linf(moved, logits["with the context"]).max())
error = float(metrics.linf(logits["Algorithm 1"], logits["with the context"]).max())
print(f"noise {noise:.0e}, error of Algorithm 1 {error:.0e}")
assert error <= 10 * noise
assert metrics.linf(logits["without"], logits["with the context"]).max() > 1000 * noise

# %% [markdown]
"""
## 5. `ContextPatcher`

Algorithm 1 copies the model for each token and builds matrices. `ContextPatcher` keeps the vectors
`u` and `v` of every kept token, and applies them as `W z + u (v·z)`. With the update `stable` it
computes the same changes.
"""

# %%
with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
    patch = patcher.compute(prompt_ids[:, :-1], prompt_ids[:, -1:])
    replayed = patcher.forward(prompt_ids[:, -1:], patch)
error = float(metrics.linf(replayed, logits["with the context"]).max())
print(f"{patch}: error {error:.0e}")
assert error <= 10 * noise

before, after = model.state_dict(), by_algorithm_1.state_dict()
errors = []
for name, change in patch.weight_changes(row=0, token=0):
    assert torch.equal(before[name], model.state_dict()[name])  # the model itself is as it was
    errors.append(relative_error(after[name] - before[name], change))
print(f"{len(errors)} changes of weights, off by {max(errors):.0e} from those of Algorithm 1")
assert max(errors) < 1e-3

# %% [markdown]
"""
These differ by rounding: a small change was added to large weights. The default update, `exact`,
corrects for it. It computes patches of all the question's tokens at once, and then the logits,
without the context, have every bit that the unmodified model gives with it.
"""

# %%
cache = model(context_ids, use_cache=True)[1]
expected = model(question_ids, None, None, cache).logits  # no mask and no positions of our own
with ContextPatcher(model, tokenizer=tokenizer) as patcher:
    patch = patcher.compute(context_ids, question_ids)
    replayed = patcher.forward(question_ids, patch)
    of_another = patcher.compute(context_ids[:, :-1], question_ids)
    wrong = patcher.forward(question_ids, of_another)
print(f"bit-identical: {torch.equal(replayed, expected)}")
assert torch.equal(replayed, expected)
assert not torch.equal(wrong, expected)  # the patch of another context is another patch
