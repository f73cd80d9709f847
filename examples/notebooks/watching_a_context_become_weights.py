# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---
# %% [markdown]
"""
# Watching a context become weights

What does a context do to a model's weights? Four pictures: how large the changes are, which of the
context's tokens they come from, how they grow with the context, and where a block could not change.

Run it as a script, `python watching_a_context_become_weights.py [MODEL] [FOLDER]`, which writes the
pictures to FOLDER (build/notebooks), or open it in Jupyter with jupytext. MODEL is a folder or hub
id of a chat model; without it the small Gemma 3 of the package is used.
"""

# %%
import copy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from icl_patch import ContextPatcher, controllability
from icl_patch.analysis.attribution import attribution
from icl_patch.evaluation.loading import load_model
from icl_patch.evaluation.report import visible_text
from icl_patch.models.prompts import make_prompt, split_ids

SCRIPT = "__file__" in globals()
MODEL, FOLDER, *_ = [*(sys.argv[1:] if SCRIPT else []), "", ""]
if SCRIPT:
    plt.switch_backend("Agg")
torch.set_grad_enabled(False)


def show(figure, name):
    """In a script: write the picture."""
    if SCRIPT:
        folder = Path(FOLDER or "build/notebooks")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)
    else:
        plt.show()


def visible(token):
    """A token's text without what matplotlib reads as markup."""
    return visible_text(token).replace("$", r"\$")


def heat_map(axes, values, tokens, label, **options):
    """Blocks from top to bottom, tokens from left to right."""
    image = axes.imshow(
        values.numpy(), aspect="auto", cmap="magma_r", interpolation="none", **options
    )
    axes.set_ylabel("block")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xticks(range(len(tokens)), [visible(token) for token in tokens], rotation=90)
    axes.tick_params(axis="x", labelsize=8, labelfontfamily="monospace")
    axes.figure.colorbar(image, ax=axes, label=label)


# %% [markdown]
"""
## The context and its patch

The system message is the context. `ask` answers the question, and returns the patch of every token
of the question and the answer: with it the model needs no context. The first token, such as
`<bos>`, stays in front (`keep_first=1`). Models look at it from every token, and a patch that took
its place too would also make up for that.
"""

# %%
model, tokenizer = load_model(MODEL or None, dtype=torch.float32)
if MODEL:
    system, question = "Your name is Pip. You are a robot who waters plants.", "Who are you?"
    prompt = make_prompt(tokenizer, question, system=system)
    given = {"question": question, "system": system}
else:
    prompt = make_prompt(tokenizer, "fmrp>", context="mode upper\n")
    given = {"context": "mode upper\n", "question": "fmrp>"}
context_ids, question_ids = split_ids(tokenizer, prompt)
context = [tokenizer.decode(token) for token in context_ids[0]]
patcher = ContextPatcher(model, tokenizer=tokenizer)
answer = patcher.ask(**given, max_new_tokens=12, keep_first=1)
patch = answer.patch
kept = [tokenizer.decode(token) for token in patch.kept_ids[0]]
print(f"context: {tokenizer.decode(context_ids[0])!r}\nanswer: {answer.text!r}")

prompt_ids = torch.cat([context_ids, question_ids], 1)
expected = model.generate(
    prompt_ids,
    attention_mask=torch.ones_like(prompt_ids),
    max_new_tokens=12,
    do_sample=False,
)[:, prompt_ids.shape[1] :]
assert answer.text == tokenizer.decode(expected[0], skip_special_tokens=True)

# %% [markdown]
"""
## 1. How large are the changes?

Each matrix that reads or writes the MLP's vectors changes by `u vᵀ`, for each token anew. Its size
`‖u‖ ‖v‖` is compared with the matrix's own. A dark cell: at that token the context means much to
that block.
"""

# %%
matrices = [name for name in patch.norms() if name.startswith("mlp.")]
squares = sum(patch.norms()[name][:, 0].double().square() for name in matrices)
own = torch.stack(
    [
        sum(
            model.get_submodule(block.path_of(name)).weight.double().square().sum()
            for name in matrices
        )
        for block in patch.blocks
    ]
)
sizes = 100 * (squares / own.unsqueeze(1)).sqrt()

figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
heat_map(axes, sizes, kept, "change, % of the weights")
axes.axvline(question_ids.shape[1] - 0.5, color="tab:blue", linestyle="--")
axes.set_title("How much the context changes each block's weights\n(question | answer)")
show(figure, "sizes")
print(f"changes from {sizes.min():.2f} % to {sizes.max():.2f} % of the weights")

for token in (0, len(kept) - 1):
    whole = dict(patch.weight_changes(0, token))
    for place, block in enumerate(patch.blocks):
        change = [whole[f"{block.path_of(name)}.weight"].double().norm() for name in matrices]
        size = 100 * torch.stack(change).norm() / own[place].sqrt()
        torch.testing.assert_close(size, sizes[place, token], rtol=1e-5, atol=0)

# %% [markdown]
"""
## 2. Which tokens of the context do they come from?

Leave out one token of the context, compute the patch again, and compare: 0 means that the block
does not notice, 1 that the difference is as large as the change itself. Special tokens stay, and
the first one.
"""

# %%
ordinary = [
    place
    for place, token in enumerate(context_ids[0].tolist())
    if place and token not in tokenizer.all_special_ids
]
spans = [(place, place + 1) for place in ordinary]
sources = attribution(patcher, context_ids, question_ids, spans, keep_first=1)

figure, (bars, axes) = plt.subplots(
    2, figsize=(9, 6), layout="constrained", height_ratios=(1, 3), sharex=True
)
bars.bar(range(len(ordinary)), sources.mean(1).tolist(), color="tab:orange")
bars.set_ylabel("mean")
bars.set_title("What leaving out one context token changes in the patch of the question")
heat_map(axes, sources.T, [context[place] for place in ordinary], "relative change", vmin=0)
show(figure, "sources")
strongest = ordinary[int(sources.mean(1).argmax())]
print(f"most comes from {context[strongest]!r}")

whole = [(1, context_ids.shape[1])]
everything = attribution(patcher, context_ids, question_ids, whole, keep_first=1)
assert (everything == 1).all()  # without any context there is no change

# %% [markdown]
"""
## 3. How do they grow with the context?

Read the context token by token. After i tokens the weights are `W_i`, and `W_{i+1} - W_i` is a step
of gradient descent. Here are the steps at one token: the one before the first word of the answer
that owes its chance to the context. The line shows this chance.
"""

# %%
growth = patcher.dynamics(context_ids, patch.kept_ids, keep_first=1)
start = question_ids.shape[1] - 1  # where the answer's first word is predicted
words = torch.cat([patch.kept_ids[0, start + 1 :], expected[0, -1:]])
logits = torch.stack([part.logits[0, start:] for part in growth.patches])
chances = logits.softmax(-1)[:, range(len(words)), words]  # (n + 1, words)
gain = chances[-1] - chances[0]
chosen = int((gain > gain.max() / 2).int().argmax())  # the first
chance, word = chances[:, chosen], tokenizer.decode(words[chosen])

squares = sum(
    torch.stack(
        [
            growth.trajectory(f"{block.path_of(name)}.weight").step_norms()[:, 0, start + chosen]
            for block in patch.blocks
        ]
    ).square()
    for name in matrices
)
steps = 100 * (squares / own.unsqueeze(1)).sqrt()

figure, (line, axes) = plt.subplots(
    2, figsize=(9, 6), layout="constrained", height_ratios=(1, 3), sharex=True
)
line.plot(range(len(growth)), chance[1:].tolist(), marker="o", color="tab:blue")
line.axhline(float(chance[0]), color="tab:gray", linestyle="--")
line.set_ylim(-0.05, 1.05)
line.set_ylabel(f"chance of\n“{visible(word)}”")
line.set_title("What each further token of the context adds\n(dashed: the first one alone)")
heat_map(axes, steps, context[1:], "step, % of the weights")
show(figure, "growth")
print(
    f"chance of {word!r}: {chance[0]:.2g} behind {context[0]!r}, {chance[-1]:.2g} with the context"
)

cache = model(context_ids, use_cache=True)[1]
last = model(patch.kept_ids, None, None, cache).logits[0, start + chosen].softmax(-1)
assert abs(chance[-1] - last[words[chosen]]) < 1e-3
assert chance[-1] > chance[0]

# %% [markdown]
"""
In the first block the token's own input depends on the context only by the distance to the first
token, which grows. If the first token is absorbed too, all steps share `v` there, and have rank 1.
In later blocks they have rank 2.
"""

# %%
reader = f"{patch.blocks[0].path_of(patch.blocks[0].spec.readers[0])}.weight"
absorbed = patcher.dynamics(context_ids, patch.kept_ids, layers=slice(1))
changes = absorbed.trajectory(reader).changes[1:]
directions = changes.v[:, 0, -1, 0].double()
spread = (directions - directions[0]).norm(dim=-1).max() / directions[0].norm()
print(f"first block: directions of the steps differ by {spread:.0e}")
assert spread < 1e-4
patcher.detach()

# %% [markdown]
"""
## 4. Where could a block not change?

A change of the first matrices needs an input that is not 0, a change of the last one an inner
vector that is not 0. In this model that is so everywhere. In a copy two blocks are broken on
purpose: one gets no input, so that its inner vector is 0 as well; of another only the inner vector
is 0.
"""

# %%
broken = copy.deepcopy(model)
deaf, mute = broken.model.layers[1], broken.model.layers[-2]
gemma = hasattr(deaf, "pre_feedforward_layernorm")
before = deaf.pre_feedforward_layernorm if gemma else deaf.post_attention_layernorm
before.weight.fill_(-1 if gemma else 0)  # Gemma's scale is 1 + weight
mute.mlp.gate_proj.weight.zero_()

figure, columns = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained", sharey=True)
for axes, subject, title in zip(columns, (model, broken), ("as trained", "broken"), strict=True):
    with ContextPatcher(subject, "stable") as patcher:
        judged = controllability(patcher, context_ids, question_ids, keep_first=1)
    holds = torch.tensor(
        [[bool(b.input_controllable.all()), bool(b.output_controllable.all())] for b in judged]
    )
    axes.imshow(holds.numpy(), aspect="auto", cmap="RdYlGn", vmin=0, vmax=1, alpha=0.7)
    for row, column in (~holds).nonzero().tolist():
        axes.text(column, row, "no", ha="center", va="center", weight="bold")
    axes.set_xticks((0, 1), ("takes any input", "gives any output"))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title)
    print(f"\n{title}\n{judged}")
    assert bool(holds.all()) == (subject is model)
columns[0].set_ylabel("block")
figure.suptitle("Blocks whose change of weights can do all that any context does: green")
show(figure, "controllability")
assert (~holds).nonzero().tolist() == [[1, 0], [1, 1], [len(holds) - 2, 1]]
