"""One meaning of "without the context": the unmodified model on the tokens that a patch runs on."""

import json
from pathlib import Path

import pytest
import torch
from support.commands import Run

from icl_patch import ContextPatcher, embedded
from icl_patch.evaluation import demo, report
from icl_patch.evaluation.context_report import context_report
from icl_patch.models.prompts import make_prompt

CONTEXT, QUESTION, SYSTEM = "mode upper\n", "fmrp>", "mode upper"
TEMPLATE = (
    "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)


@pytest.mark.parametrize(("keep_first", "front"), [(0, ""), (6, "<bos>mode ")])
def test_every_command_means_the_same_run(
    keep_first: int, front: str, tmp_path: Path, run: Run
) -> None:
    """The tokens that stay are the same with the patch and without it, in Python too."""
    model, tokenizer = embedded.load()
    context, question = (
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        for text in (CONTEXT, QUESTION)
    )
    bos = torch.tensor([[tokenizer.bos_token_id]])
    stay = torch.cat([bos, context], 1)[:, :keep_first]
    with torch.no_grad():
        logits = model(torch.cat([stay, question], 1)).logits
    tokens = [tokenizer.decode([token]) for token in logits[0, keep_first:].argmax(-1)]

    name = f"without the context, behind {front.replace(' ', '␣') or 'nothing'}"
    assert report.without_context(front) == name
    file, page = tmp_path / "p.safetensors", tmp_path / "p.html"
    prompt = ("--context", CONTEXT, "--question", QUESTION, "--keep-first", keep_first)
    run("extract", *prompt, "--out", file)
    [row] = json.loads(run("replay", "--patch", file, "--json")[1])["rows"]
    assert (row["without"], row["front"]) == (tokens, front)

    options = ("--max-new-tokens", 1, "--groups", 1, "--out", page, "--json")
    reported = json.loads(run("report", *prompt, *options)[1])
    assert (reported["answers"]["without"], reported["front"]) == (tokens[-1], front)
    one = demo.Prompt("few-shot", CONTEXT, QUESTION, "")
    [answer] = demo.answer_each(model, tokenizer, [one], keep_first)
    assert answer["without"].startswith(tokens[-1].strip("\n")) and answer["front"] == front
    assert answer["patched"] == answer["with_context"] == "FMRP"

    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        asked = patcher.ask(CONTEXT, QUESTION, keep_first=keep_first, max_new_tokens=4)
        replayed = patcher.forward(asked.patch.kept_ids, asked.patch)
    assert asked.text == "FMRP" and torch.equal(asked.patch.prefix_ids, stay)
    assert torch.equal(replayed[0, -4:].argmax(-1), asked.token_ids[0])


def test_report_and_demo_mean_the_same_run_in_a_chat() -> None:
    """Neither takes what the template would write without the system message."""
    model, tokenizer = embedded.load()
    tokenizer.chat_template = TEMPLATE
    prompt = make_prompt(tokenizer, QUESTION, system=SYSTEM)
    result = context_report(model, tokenizer, prompt, max_new_tokens=3, groups=1, keep_first=1)
    [answer] = demo.answer_each(
        model, tokenizer, [demo.Prompt("chat", SYSTEM, QUESTION, "")], keep_first=1
    )
    stay = [tokenizer.bos_token_id, *tokenizer(f"[user]{QUESTION}[answer]")["input_ids"][1:]]
    with torch.no_grad():
        expected = model.generate(torch.tensor([stay]), max_new_tokens=3, do_sample=False)
    text = tokenizer.decode(expected[0, len(stay) :], skip_special_tokens=True)
    assert result.answers["without"] == text and answer["without"].startswith(text)
    assert result.front == answer["front"] == "<bos>"
