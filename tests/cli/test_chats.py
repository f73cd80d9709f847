"""The three ways to give a context mean the same in every command and in Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chats import shallow_chat_model
from support.commands import Run
from transformers import GenerationMixin

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.evaluation.loading import load_model
from icl_patch.evaluation.verify import verify
from icl_patch.models.prompts import encode
from icl_patch.static import LowRank, StaticInfo, StaticPatch

CONTEXT, QUESTION = "mode upper\n", "fmrp>"
WAYS = {  # options, ask's arguments, the text before the kept one, the kept text
    "text": ([f"--context={CONTEXT}"], {"context": CONTEXT}, f"<bos>{CONTEXT}", QUESTION),
    "user": (
        [f"--context={CONTEXT}", "--chat"],
        {"context": CONTEXT, "chat": True},
        f"<user>{CONTEXT}",
        f"{QUESTION}\n<model>",
    ),
    "system": (
        [f"--system={CONTEXT}"],
        {"system": CONTEXT},
        f"<system>{CONTEXT}\n",
        f"<user>{QUESTION}\n<model>",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model with a chat template."""
    return shallow_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.mark.parametrize(
    "way",
    [pytest.param(WAYS["text"], marks=pytest.mark.stress), *list(WAYS.values())[1:]],
    ids=WAYS,
)
def test_every_command_and_ask_have_one_prompt(
    way: tuple[list[str], dict, str, str],
    folder: str,
    tmp_path: Path,
    run: Run,
) -> None:
    given, arguments, before, kept = way
    model, tokenizer = load_model(folder, dtype=torch.float32)
    ids = tokenizer(before + kept, add_special_tokens=False, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    options = [folder, *given, "--question", QUESTION, "--dtype", "fp32", "--json"]
    status, out, _ = run("generate", *options, "--max-new-tokens", 3)
    assert (status, json.loads(out)["token_ids"]) == (0, new)
    status, out, _ = run("verify", *options, "--max-new-tokens", 3, "--update", "stable")
    assert [step["token_id"] for step in json.loads(out)["steps"]] == new
    file = tmp_path / "patch.safetensors"
    assert run("extract", *options, "--out", file)[0] == 0
    patch = ContextPatch.load(file)
    assert tokenizer.decode(patch.kept_ids[0]) == kept
    with torch.no_grad():
        expected = model(ids).logits[0, -patch.kept_ids.shape[1] :].argmax(-1)
    page = tmp_path / "report.html"
    status, out, _ = run("report", *options, "--max-new-tokens", 3, "--out", page)
    reported = json.loads(out)
    assert (status, reported["context"], reported["question"]) == (0, before, kept)
    assert reported["answers"]["with_context"] == tokenizer.decode(new, skip_special_tokens=True)
    out = run("replay", "--patch", file, folder, "--json")[1]
    replayed = json.loads(out)["rows"][0]["replayed"]
    assert replayed == [tokenizer.decode([token]) for token in expected.tolist()]
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        answer = patcher.ask(question=QUESTION, max_new_tokens=3, **arguments)
    assert answer.token_ids[0].tolist() == new


def test_a_context_alone_is_the_prompt(folder: str, run: Run) -> None:
    command = ["verify", folder, "--max-new-tokens", 2, "--update", "stable", "--json"]
    whole = [*command, "--context", CONTEXT + QUESTION, "--chat"]
    parts = [*command, "--context", CONTEXT, "--question", QUESTION, "--chat"]
    steps = [json.loads(run(*arguments)[1])["steps"] for arguments in (whole, parts)]
    assert steps[0] == steps[1]
    status, _, err = run("generate", folder, "--system", CONTEXT)
    assert (status, err) == (
        2,
        "icl-patch generate: expected --question, the user's message, with --system\n",
    )
    ids = {"input_ids": torch.tensor([[1, 2]])}
    with pytest.raises(ValueError, match="chat and system for text only, got input_ids"):
        verify(folder, context=ids, system=CONTEXT)


def test_what_extract_refuses(folder: str, tmp_path: Path, run: Run) -> None:
    command = ["extract", folder, "--question", "d", "--out", tmp_path / "p.safetensors"]
    status, _, err = run(*command, "--context", "")
    assert status == 2
    assert "expected a context, got an empty --context" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::icl_patch.errors.StaticPatchWarning")  # of the chat
def test_generate_puts_the_front_of_a_static_patch_before_a_text(
    folder: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(folder)
    path = "model.layers.0.mlp.up_proj"
    n, k = model.get_submodule(path).weight.shape
    changes = {path: LowRank(torch.zeros(1, n), torch.zeros(1, k))}
    prompts, generate = [], GenerationMixin.generate

    def noted(self: GenerationMixin, ids: torch.Tensor, **arguments: Any) -> Any:
        prompts.append(tokenizer.decode(ids[0]))
        assert arguments["attention_mask"].shape == ids.shape
        return generate(self, ids, **arguments)

    monkeypatch.setattr(GenerationMixin, "generate", noted)
    for front, begin in (("q", "q<bos>"), ("<bos>", "<bos>")):
        file = tmp_path / f"{len(front)}.safetensors"
        info = StaticInfo.of(model, tokenizer, "test", encode(tokenizer, front))
        StaticPatch(info, changes).save(file)
        command = ["generate", folder, "--patch", file, "--max-new-tokens", 2]
        assert run(*command, "--context", CONTEXT, "--question", QUESTION)[0] == 0
        assert run(*command, "--question", QUESTION, "--chat")[0] == 0
        assert prompts[-2:] == [f"{begin}{CONTEXT}{QUESTION}", f"<user>{QUESTION}\n<model>"]
