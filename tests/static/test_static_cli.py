"""The commands of static patches: fit, generate, apply, export."""

import json
import re
from pathlib import Path

import pytest
import torch
from support.chats import chat_model
from support.commands import Run
from support.full_disk import full_disk

from icl_patch import ContextPatcher, embedded
from icl_patch.cli import fit
from icl_patch.evaluation.loading import load_model
from icl_patch.patch.fingerprints import tokenizer_fingerprint
from icl_patch.static import PARTS, LowRank, StaticInfo, StaticPatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples of ``say german``, and a patch fitted on them by the command."""
    path = tmp_path_factory.mktemp("static")
    questions = [f"{n} {(3 * n + 1) % 10} {(7 * n + k) % 10}." for n in range(10) for k in (2, 5)]
    example = {"context": "say german\n", "questions": questions}
    (path / "examples.json").write_text(json.dumps([example]))
    prompts = [prompt for kind in embedded.KINDS for prompt in embedded.held_out_prompts(kind, 5)]
    texts = [x.context + x.question + x.answer for x in prompts if "german" not in x.context]
    (path / "texts.json").write_text(json.dumps(texts))
    few = {"context": "say german\n", "questions": questions[:4], "answers": ["eins"] * 4}
    (path / "few.json").write_text(json.dumps([few]))
    (path / "text.json").write_text(json.dumps(texts[:5]))
    return path


@pytest.fixture
def patch_file(folder: Path, run: Run) -> Path:
    file = folder / "patch.safetensors"
    if not file.exists():
        arguments = ["--examples", folder / "examples.json", "--preserve", folder / "texts.json"]
        arguments += ["--rank", "16", "--end", r"\n", "--first-block", "0", "--steps", "60"]
        arguments += ["--learning-rate", "0.01", "--max-new-tokens", "27", "--json"]
        status, out, err = run("fit", *arguments, "--out", file)
        assert status == 0, err
        report, tokenizer = json.loads(out), embedded.load()[1]
        # in bf16 passes from a copy, where the processor has them; measured on the model itself
        assert report["held_out"]["kl"] < 0.2 * report["without"]["kl"]
        assert (report["without"]["whole"], report["fitted"]) == (0, 16)
        assert 0 < report["preserved"]["kl"] < 0.2
        assert report["front"] == [tokenizer.bos_token_id]
        assert report["tokenizer"] == tokenizer_fingerprint(tokenizer)
    return file


def test_generate_with_a_static_patch(patch_file: Path, tmp_path: Path, run: Run) -> None:
    arguments = ["generate", "--context", "4 7 7.", "--max-new-tokens", "18"]
    status, out, _ = run(*arguments, "--patch", patch_file)
    assert status == 0
    assert out.strip() == "vier sieben sieben"
    model, tokenizer = embedded.load()
    model.generation_config.stop_strings = ["sieben"]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    arguments.insert(1, str(tmp_path))
    assert run(*arguments, "--patch", patch_file)[1].strip() == "vier sieben"
    arguments.pop(1)
    # as many tokens as there are positions for are run, and the last one is not
    room = model.config.max_position_embeddings - len(tokenizer("4 7 7.").input_ids) + 1
    arguments[-1] = str(room)
    assert run(*arguments, "--patch", patch_file)[0] == 0
    arguments[-1] = str(room + 1)
    status, _, err = run(*arguments, "--patch", patch_file)
    assert status == 2 and "expected at most 512 tokens, as many as the model has" in err


def test_the_patch_of_a_token_is_refused(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "token.safetensors"
    arguments = ["--context", "mode upper\nbcdf", "--kept", ">", "--update", "stable"]
    assert run("extract", *arguments, "--out", file)[0] == 0
    out = ("--out", tmp_path / "out")
    for command, *options in (("export", *out), ("apply", *out), ("generate", "--context", ">")):
        status, _, err = run(command, "--patch", file, *options)
        assert status == 1 and "expected kind 'static', got 'per_token'" in err
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_apply_and_export_are_the_patch(patch_file: Path, tmp_path: Path, run: Run) -> None:
    assert run("apply", "--patch", patch_file, "--out", tmp_path / "model")[0] == 0
    arguments = ["export", "--patch", patch_file, "--out", tmp_path / "lora", "--json"]
    status, out, _ = run(*arguments)
    assert status == 0
    assert json.loads(out) == {"folder": str(tmp_path / "lora"), "kind": "static", "rank": 16}
    model, tokenizer = embedded.load()
    ids = tokenizer("4 7 7.", return_tensors="pt")["input_ids"]
    with StaticPatch.load(patch_file, model).applied(model):
        expected = model(ids).logits
    merged = load_model(str(tmp_path / "model"))[0](ids).logits
    # fp32 on all sides, through six blocks
    limit = 100 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (merged - expected).abs().max() <= limit
    for command, name in (("apply", "model"), ("export", "lora")):
        written = sorted((tmp_path / name).iterdir())
        stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
        for file in (*stale, "chat_template.jinja") if command == "apply" else ():
            (tmp_path / name / file).write_text("of an earlier model")
        again = [command, "--patch", patch_file, "--out", tmp_path / name]
        status, _, err = run(*again)
        assert status == 2
        assert f"got {tmp_path / name}, which exists: --force replaces it" in err
        assert run(*again, "--force")[0] == 0
        assert sorted((tmp_path / name).iterdir()) == written
    for command, name, other in (("apply", "lora", "a LoRA"), ("export", "model", "a model")):
        again = [command, "--patch", patch_file, "--out", tmp_path / name, "--force"]
        status, _, err = run(*again)
        assert status == 2
        assert f"expected another --out than {tmp_path / name}, which holds {other}" in err
    status, _, err = run("apply", "--patch", patch_file, "--out", patch_file)
    assert status == 2
    assert "expected a folder as --out, for a whole model, got the file" in err
    arguments = ["--patch", patch_file, "--dtype", "bf16", "--out", tmp_path / "bf16"]
    status, _, err = run("apply", *arguments)
    assert status == 1
    assert "in torch.bfloat16), got one of embedded (weights " in err and "in torch.float32)" in err


def test_a_model_that_cannot_be_written_leaves_nothing(
    patch_file: Path, tmp_path: Path, run: Run
) -> None:
    with full_disk(100_000):  # room for the small files
        out = tmp_path / "some" / "model"
        status, _, err = run("apply", "--patch", patch_file, "--out", out)
    assert status == 2
    assert "cannot be written to" in err
    assert not list((tmp_path / "some").iterdir())


def test_inspect_shows_a_static_patch(patch_file: Path, tmp_path: Path, run: Run) -> None:
    status, out, _ = run("inspect", "embedded", "--patch", patch_file, "--json")
    assert status == 0
    shown, patch = json.loads(out), StaticPatch.load(patch_file)
    assert (shown["kind"], shown["method"], shown["rank"]) == ("static", "distill", 16)
    path = "model.layers.2.mlp.down_proj"
    change = patch.changes[path]
    expected = (change.u.double().T @ change.v.double()).square().sum().sqrt()
    assert shown["norms"][path] == pytest.approx(float(expected))
    assert shown["report"]["held_out"]["questions"] == 4
    assert list(shown["norms"]) == list(patch.changes)
    status, out, _ = run("inspect", "--patch", patch_file)
    assert status == 0
    assert "4 held-out questions" in out
    sizes = [size for name, size in shown["norms"].items() if name.endswith(".down_proj")]
    cells = [[x.strip() for x in line.split("│")[1:-1]] for line in out.splitlines()]
    [row] = [row for row in cells if row[:1] == ["mlp.down_proj"]]
    values = [min(sizes), sum(sizes) / len(sizes), max(sizes)]
    assert row[:5] == ["mlp.down_proj", "6", *(f"{value:.1e}" for value in values)]
    assert len([row for row in cells if "_proj" in "".join(row[:1])]) == 3
    status, _, err = run("replay", "--patch", patch_file)
    assert status == 1
    assert "icl-patch generate read static patches" in err


def test_a_refused_fit_writes_nothing(folder: Path, tmp_path: Path, run: Run) -> None:
    """Of bad options, of a patch that is none, and of files without examples."""
    assert fit.PARTS == PARTS
    out = ("--out", tmp_path / "patch.safetensors")
    arguments = ["--examples", folder / "few.json", "--end", "\n"]
    arguments += ["--preserve", folder / "text.json"]
    for options, message in (
        (["--rank", "129"], "expected a rank from 1 to 128"),
        (["--learning-rate", "9", "--steps", "1"], "expected a patch"),
    ):
        status, _, err = run("fit", *arguments, *out, *options)
        assert status == 2 and message in err
    kinds = "expected lists of questions and answers in", "each answer in"
    for content, message in (
        *((content, "") for content in ("{}", "[]", '["text"]', '[{"context": "c"}]', "ÿ", "no")),
        ('[{"context": "c", "questions": 5}]', kinds[0]),
        ('[{"context": "c", "questions": null}]', kinds[0]),
        ('[{"context": "c", "questions": ["q"], "answers": "a"}]', kinds[0]),
        ('[{"context": "c", "questions": ["q"], "answers": [null]}]', kinds[1]),
        ('[{"context": 5, "questions": ["q"]}]', kinds[1]),
        ('[{"system": ["c"], "questions": ["q"]}]', kinds[1]),
        ('[{"context": "c", "questions": [{"a": 1}]}]', "a question as text, or as messages, got"),
        ('[{"context": "c", "questions": [null]}]', "a question as text, or as messages, got None"),
    ):
        (folder / "bad.json").write_bytes(content.encode("latin1"))
        status, _, err = run("fit", "--examples", folder / "bad.json", *out)
        assert status == 2 and "icl-patch fit: expected" in err and message in err, err
    assert not list(tmp_path.iterdir())


def test_the_answers_of_a_fit_are_kept_and_each_step_is_said(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chat, whose end is known: what did not end is said once, with the cure that is one."""
    folder, file = chat_model(tmp_path / "model"), tmp_path / "examples.json"
    example = {"system": "say german\n", "questions": ["4 7 7.", "1 2 3."]}
    file.write_text(json.dumps([example]))
    out, kept = tmp_path / "p.safetensors", tmp_path / "p.answers.json"
    arguments = ["fit", folder, "--examples", file, "--out", out, "--max-new-tokens", 5]
    arguments += ["--preserve", "texts.json", "--accept-worse", "--steps", 2]
    monkeypatch.chdir(tmp_path)
    Path("texts.json").write_text('["mode flip\\nbcdf>fdcb\\n"]')
    status, _, err = run(*arguments, "--seconds", "1e-9")
    assert status == 2 and f"{kept}: the model's answers, which the next fit takes" in err
    assert re.search(r"the model answers 2 questions with at most 5 tokens, in \d+ s or less", err)
    enough = re.search(
        r"expected enough seconds .*, got 1e-09: (\d+) are enough for all 2 steps\.", err
    )[1]
    model, tokenizer = load_model(folder)
    for entry in json.loads(kept.read_text())["answers"]:
        ids = torch.tensor([entry["prompt"]])
        own = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
        assert (entry["answer"], entry["text"]) == (own, tokenizer.decode(own))
    monkeypatch.setattr("icl_patch.static.answers.greedy", None)  # they are not asked for again
    status, shown, err = run(*arguments, "--seconds", enough)
    assert status == 0, err
    assert f"{kept}: 2 answers of the model, from an earlier fit" in err
    for line in (f"loading {folder}", "fitting: 1 of 2", "step 2: KL "):
        assert line in err
    note = "2 answers did not end within 5 tokens: give more max_new_tokens\n"
    assert shown.count(note) == 1 and "did not end" not in err
    kept.write_text("{}")
    out.unlink()
    status, _, err = run(*arguments)
    assert status == 2 and f"kept in {kept}, got something else: move it away" in err


def test_a_patch_without_its_model_is_refused_by_the_models_name(tmp_path: Path, run: Run) -> None:
    """Not the tokenizer, which is another one too."""
    model, tokenizer = embedded.load()
    model.config._name_or_path = "my/model"
    changes = {"model.layers.10.mlp.up_proj": LowRank(torch.zeros(1, 2), torch.zeros(1, 3))}
    static, of_tokens = tmp_path / "static.safetensors", tmp_path / "tokens.safetensors"
    StaticPatch(StaticInfo.of(model, tokenizer, "test"), changes).save(static)
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        patcher.compute(torch.tensor([[1, 5]]), torch.tensor([[7]])).save(of_tokens)
    for command, file, *arguments in (
        ("generate", static, "--question", "a"),
        ("apply", static, "--out", tmp_path / "new"),
        ("export", static, "--out", tmp_path / "new"),
        ("replay", of_tokens),
    ):
        status, _, err = run(command, "--patch", file, *arguments)
        assert status == 2
        assert f"expected MODEL, my/model or its folder, as {file} is a patch of it" in err


def test_a_file_is_replaced_only_with_force(folder: Path, tmp_path: Path, run: Run) -> None:
    examples = ["--examples", folder / "few.json", "--preserve", folder / "text.json"]
    examples += ["--end", "\n", "--steps", "2"]
    for command, *options in (
        ("extract", "--context", "abc", "--question", "d"),
        ("fit", *examples, "--accept-worse"),
        ("report", "--context", "abc", "--question", "d", "--max-new-tokens", 1),
    ):
        out = tmp_path / ("mine.html" if command == "report" else "mine.safetensors")
        out.write_text("mine")
        status, _, err = run(command, *options, "--out", out)
        assert (status, out.read_text()) == (2, "mine")
        assert f"expected a new name for --out, got {out}, which exists: --force replaces it" in err
        assert run(command, *options, "--out", out, "--force")[0] == 0
        assert out.stat().st_size > 1000
