"""README and docs: their commands and code run as they stand, and their numbers are committed."""

import ast
import builtins
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.chats import chat_model
from support.processes import run_python

from icl_patch import ContextPatcher, embedded, static
from icl_patch.cli.main import _parser, main

REPOSITORY = Path(__file__).parents[2]
DOCS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
MODELS = ("Qwen/Qwen3-0.6B", "google/gemma-3-1b-it")
# Minutes, or a GPU: their options are parsed only.
SLOW = ("demo", "bench", "tune")
AFTER = """
import torch
from icl_patch import embedded
from icl_patch.patch.fingerprints import weight_fingerprint
fresh = embedded.load()[0]
kinds = [[type(module) for module in each.modules()] for each in (model, fresh)]
assert kinds[0] == kinds[1], "a block left the model patched"
model.float()
assert weight_fingerprint(model) == weight_fingerprint(fresh)
"""


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.S)


def commands() -> list[list[str]]:
    """The command lines of all pages, without comments."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            bare = re.sub(r"(?:^|\s)#.*", "", block)
            lexer = shlex.shlex(bare, posix=True, punctuation_chars="\n")
            lexer.whitespace, lexer.whitespace_split = " \t", True
            line: list[str] = []
            for word in [*lexer, "\n"]:
                if word.strip("\n"):
                    line.append(word)
                elif line:
                    found.append(line)
                    line = []
    return found


def test_every_fenced_block_is_known() -> None:
    """One in another language would be executed by no test."""
    languages = {found for page in PAGES for found in re.findall(r"```(\w+)\n", text_of(page))}
    assert languages == {"python", "sh", "text"}  # text is no language: it is shown alone


def undefined(block: str) -> set[str]:
    """The names that a block reads and does not define."""
    nodes = list(ast.walk(ast.parse(block)))
    read = {x.id for x in nodes if isinstance(x, ast.Name)}
    known = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    known |= {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
    known |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    for x in nodes:
        if isinstance(x, ast.Import | ast.ImportFrom):
            known |= {(name.asname or name.name).partition(".")[0] for name in x.names}
    return read - known - set(dir(builtins))


def test_a_snippet_runs_by_itself_or_says_that_it_does_not() -> None:
    assert undefined("import a.b\nx = a.c(y)") == {"y"}
    for page in PAGES:
        for block in blocks(page, "python"):
            before = text_of(page).partition(block)[0]
            assert not undefined(block) or "from above" in before, (page, undefined(block))


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred texts that a fit preserves the beginnings of eight: of bytes they are long."""
    texts = [text[:40] for text in static.preserved_texts()[:8]]
    monkeypatch.setattr(sys.modules[static.fit.__module__], "preserved_texts", lambda: texts)


@pytest.mark.usefixtures("few_texts")
@pytest.mark.filterwarnings("error::UserWarning:icl_patch.*")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In order, in one namespace; prints give their comments, and no block leaves the model
    patched.
    """
    if page == "docs/scale.md":
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    chat_folder = chat_model(tmp_path / "model")
    few_steps = static.Distillation(steps=5)
    code, namespace = blocks(page, "python"), {"__name__": "__main__", "FEW_STEPS": few_steps}
    for block in code:
        for name in MODELS:
            block = block.replace(f'"{name}"', repr(chat_folder))
        few = r"\1, distillation=FEW_STEPS, accept_worse=True)"
        block = re.sub(r"(static\.fit\(.*)\)", few, block)
        exec(compile(block, page, "exec"), namespace)
        if "model" in namespace:
            exec(compile(AFTER, page, "exec"), namespace)
    prints = re.findall(r"^ *print\(.*\)(?:  # (.*))?$", "".join(code), re.M)
    shown = capsys.readouterr().out.splitlines()
    assert (prints or "assert" in "".join(code)) and len(shown) >= len(prints)
    expected = [line for line in prints if line]
    assert [line for line in shown if line in expected] == expected, shown


@pytest.mark.usefixtures("few_texts")
def test_the_commands_of_all_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chat_folder = chat_model(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("mode upper\nfmrp>", encoding="utf-8")
    names = ("null", "eins", "zwei", "drei", "vier", "funf", "sechs", "sieben", "acht", "neun")
    triples = [(n, (3 * n + 1) % 10, (7 * n + 2) % 10) for n in range(10)]
    words = {f"{a} {b} {c}.": f"{names[a]} {names[b]} {names[c]}" for a, b, c in triples}
    example = {"context": "say german\n", "questions": [*words], "answers": [*words.values()]}
    (tmp_path / "examples.json").write_text(json.dumps([example]), encoding="utf-8")
    chat = {"system": "say german\n", "questions": [*words], "answers": [*words.values()]}
    (tmp_path / "chats.json").write_text(json.dumps([chat]), encoding="utf-8")
    (tmp_path / "texts.json").write_text('["mode flip\\nbcdf>fdcb\\n"]', encoding="utf-8")
    rows = [{"context": "mode upper\n", "kept": "fmrp>"}, {"context": "say german\n", "kept": "7>"}]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "prompts.jsonl").write_text(lines, encoding="utf-8")
    many = ["extract", "extract", "extract", "verify"] if find_spec("pyarrow") else []
    ran = []
    for command in commands():
        if command[0] != "icl-patch" or ("--dataset" in command and not many):
            continue
        arguments = [chat_folder if word in MODELS else word for word in command[1:]]
        if set(SLOW) & set(arguments):
            if "cuda" not in arguments:
                _parser().parse_args(arguments)
            continue
        if arguments[0] == "verify" and "--max-new-tokens" not in arguments:
            arguments += ["--max-new-tokens", "6"]  # 25 take 4 seconds
        if arguments[0] == "fit":
            arguments += ["--steps", "5", "--accept-worse"]
        if arguments[0] == "report":
            arguments += ["--groups", "2", "--max-new-tokens", "3"]
        assert main(arguments) == 0, arguments
        ran.append(arguments[0])
    readme = ["verify", "extract", "replay", "fit", "generate", "export", "apply"]
    static = ["fit", "generate", "apply", "export"]
    usage = ["verify", "verify", "verify", "generate", "extract", "inspect", "replay", "report"]
    assert ran == [*readme, *many, *static, *usage]


def test_every_target_of_make_exists_and_is_listed() -> None:
    targets = {
        command[1] for command in commands() if command[0] == "make" and "=" not in command[1]
    }
    known = set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.M))
    listed = set(re.findall(r"^make ([a-z-]+)", text_of("CONTRIBUTING.md"), re.M))
    assert {"demo", "test"} <= targets <= known <= listed


def test_tables_have_the_committed_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    script = str(REPOSITORY / "tools" / "readme.py")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(script, run_name="__main__")
    assert stopped.value.code == 0, capsys.readouterr().out


def test_the_prose_about_memory_and_speed_has_the_committed_numbers() -> None:
    readme, performance = text_of("README.md"), text_of("docs/performance.md")
    prose = " ".join(readme.split())
    rows = json.loads(text_of("docs/data/patch-memory.json"))["rows"]
    ratios = [row["patch_bytes"]["exact"] / row["cache_bytes"] for row in rows]
    assert f"{min(ratios):.0f} to {max(ratios):.0f} tokens in the KV cache" in prose
    rows = re.findall(r"^\| (.*?) \| .*?\((.*?)\) \| .*?\((.*?)\) \|$", performance, re.M)
    times = {name.removesuffix(", exact"): ratios for name, *ratios in rows}
    for call in ("`generate`", "`ask`", "`forward`"):
        row = rf"^\| {call}: .* \| {' [|] '.join(times[call])} \|$"
        assert re.search(row, readme, re.M), call
    table = performance.partition("<!-- steps-gpu")[2].partition("<!-- end")[0]
    rows = re.findall(r"^\| ([\w.-]+) \| (\d+) \| .* \| ([\d.]+)× \| \S+ \|$", table, re.M)
    on_a_gpu = {(model, batch): ratio for model, batch, ratio in rows}
    assert on_a_gpu.pop(("Llama-3-8B", "1")) == "1.00"
    span = f"took {min(on_a_gpu.values())} to {max(on_a_gpu.values())} times theirs"
    assert span in prose
    file = json.loads(text_of("bench/results/generation-nvidia-h100-80gb-hbm3.json"))
    name = "exact, compile=True"
    [step] = [row for row in file["rows"] if "Llama-3-8B" in row["case"] and row["call"] == name]
    assert f"patch in {1e3 * step['seconds']['median']:.2f} ms" in prose


@pytest.mark.stress
def test_the_table_of_operators_is_as_counted() -> None:
    """With the pinned versions: others call other operators."""
    done = run_python(REPOSITORY / "tools" / "launches.py")
    assert done.returncode == 0 and done.stdout.count("\n") == 17, done.stderr
    assert done.stdout in text_of("docs/performance.md")


def test_the_readme_shows_what_a_real_model_answered() -> None:
    """``make demo MODEL=FOLDER`` prints these answers of SmolLM2 too."""
    answers = json.loads(text_of("docs/data/demo.json"))["answers"]
    text = text_of("README.md")
    [shown] = [row for row in answers if row["context"] in text and row["question"] in text]
    assert text.count(f"# SmolLM2: {shown['patched']}\n") == 2
    assert f"*{shown['without']}*" in text


def test_the_prose_about_static_patches_has_the_committed_numbers() -> None:
    rows = re.findall(r"^\| (task|mean) \| (.*) \|", text_of("docs/static-results.md"), re.M)
    names, means = (row.split(" | ") for _, row in rows[:2])
    mean = dict(zip(names, means, strict=True))
    text = text_of("README.md")
    means = (mean[name] for name in ("no context", "static patch", "context"))
    assert re.search(rf"^\| right answers.* \| {' % [|] '.join(means)} % \|$", text, re.M)
    chats = text_of("docs/static-results.md").partition("## Chats")[2].partition("## Facts")[0]
    rows = re.findall(r"^\| (static patch|no context) \|(.*)", chats, re.M)
    found = {name: [int(x) for x in re.findall(r"\((\d+) %\)", cells)] for name, cells in rows}
    patched, plain = (found[name] for name in ("static patch", "no context"))
    shares = (f"{min(found)} to {max(found)} %" for found in (plain, patched))
    row = rf"^\| tokens as with the context.* \| {' [|] '.join(shares)} \| 100 % \|$"
    assert re.search(row, text, re.M)


def test_an_answer_costs_what_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that the model runs over, counted at its embeddings; a few more are checks."""
    times = {"never": 0, "once": 1, "twice": 2, "three times": 3, "four times": 4, "five times": 5}
    table = re.search(r"\| you call \| context.*?\n\n", text_of("README.md"), re.S)
    assert table is not None
    costs = {
        cells[0].split(":")[0].strip("`"): [times.get(cell, 0) for cell in cells[1:4]]
        for line in table[0].splitlines()[2:]
        if (cells := [cell.strip() for cell in line.strip("|").split("|")]) != [""]
    }
    model, tokenizer = embedded.load()
    embeddings, counted = model.get_input_embeddings(), [0]
    own = embeddings.forward

    def counting(ids: torch.Tensor) -> torch.Tensor:
        counted[0] += ids.numel()
        return own(ids)

    monkeypatch.setattr(embeddings, "forward", counting)
    context, question = "mode upper\n" * 8, "fmrp>"
    context_ids, ids = (
        tokenizer(text, return_tensors="pt").input_ids for text in (context, context + question)
    )
    new = {"max_new_tokens": 20}

    def check(call: str, run: Callable[[], object], answer: int, more: int) -> None:
        counted[0] = 0
        run()
        lengths = (context_ids.shape[1], len(question), answer)
        expected = sum(n * m for n, m in zip(costs[call], lengths, strict=True))
        assert expected <= counted[0] <= expected + more, call

    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        answer = patcher.ask(context, question, **new)
        steps = answer.token_ids.shape[1]
        list(patcher.generate(ids, **new))  # tries the step's form
        answered = steps - 1  # the last token is not run
        check("generate", lambda: list(patcher.generate(ids, **new)), answered, steps)
        check("ask", lambda: patcher.ask(context, question, **new), answered, steps)
        kept = ids[:, context_ids.shape[1] :]
        check("compute", lambda: patcher.compute(context_ids, kept), 0, 0)
        patch = answer.patch
        check("forward", lambda: patcher.forward(patch.kept_ids, patch), answered, 0)
    check("model.generate", lambda: model.generate(ids, **new), answered, 0)


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= 1740


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        folder = (REPOSITORY / page).parent
        for link in re.findall(r"(?:\]\(|src(?:set)?=\")([^)\"#\s]+)", text_of(page)):
            assert link.startswith("http") or (folder / link).exists(), f"{link} in {page}"
