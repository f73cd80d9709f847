"""The command line as a user meets it: what is printed where, files, exit status."""

import argparse
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.commands import Run
from support.processes import run_python
from transformers import PreTrainedConfig, T5Config, ViTConfig

from icl_patch import ContextPatch, ContextPatcher, embedded
from icl_patch.bench.commands import tune
from icl_patch.cli import arguments
from icl_patch.cli import main as cli
from icl_patch.evaluation import demo, report
from icl_patch.evaluation.verify import verify
from icl_patch.ops import native
from icl_patch.patch.logit_digest import LogitDigest
from icl_patch.patch.serialization import UPDATES
from icl_patch.static import LowRank, StaticInfo, StaticPatch


def prompt_text() -> str:
    prompt = embedded.held_out_prompts("recall", 1)[0]
    return prompt.context + prompt.question


def test_a_terminal_of_80_columns_breaks_no_word(capsys: pytest.CaptureFixture) -> None:
    """The short verdict, and the tables."""
    verified = verify(max_new_tokens=3)
    for line in report.verdict_lines(verified).splitlines():
        assert len(line) <= 80
    assert report.verdict_lines(verified).splitlines()[0] == (
        "identical: yes, 3 of 3 tokens, in two passes, to the unmodified model"
    )
    tables = report.verify_tables([verified])
    console = Console(width=80, file=io.StringIO())
    console.print(*tables)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert all(str(cell) in shown for table in tables for cell in table.columns[0].cells)
    assert len(report.legend(tables).splitlines()) > 5


def test_the_legend_explains_what_stands_in_the_tables() -> None:
    """A noise of 0 is explained where there is one, and nowhere else."""
    verified = verify(max_new_tokens=1)
    for noise in (0.0, 1e-7):
        floor = {"linf_max": 1e-6, "tvd_max": noise}
        legend = report.legend(report.verify_tables([replace(verified, noise_floor=floor)]))
        assert ("0 here: batching happened to round alike" in legend) is (noise == 0)
        assert "floor L∞: the noise" in legend


def test_replay_says_that_a_patch_has_become_another(tmp_path: Path, run: Run) -> None:
    """As on another processor: the file's digest is of other logits than those of its replay."""
    model, tokenizer = embedded.load()
    context, kept = (tokenizer(x, return_tensors="pt").input_ids for x in ("mode upper\n", "fmrp>"))
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(context, kept)
    file = tmp_path / "patch.safetensors"
    command = ["replay", "--patch", file, "--json"]
    patch.save(file)
    assert run(*command)[0] == 0
    others = LogitDigest.of(-patch.logits, patch.kept_mask, torch.float32, identical=False)
    patch.with_digest(others).save(file)
    status, out, _ = run(*command)
    assert (status, json.loads(out)["error"]["type"]) == (1, "ReplayMismatch")
    model, _ = embedded.load()
    with ContextPatcher(model) as patcher:  # as the message says
        patcher.compute(context, kept).save(file)
    assert run(*command)[0] == 0


def test_verify_says_when_the_check_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "icl_patch.recording.block_math.direct_scale",
        lambda delta, normalized, scale: scale.expand_as(delta),
    )
    status, out, err = run("verify", "--max-new-tokens", "3", "--update", "direct", "--json")
    numbers = json.loads(out)  # one object alone
    assert (status, err, numbers["passed"], numbers["tokens"]) == (1, "", False, 3)
    assert (numbers["update"], numbers["dtype"]) == ("direct", "float32")


def test_generate_in_a_mode(run: Run) -> None:
    command = ["generate", "--context", prompt_text(), "--max-new-tokens", "5"]
    command += ["--update", "stable", "--mode", "shared_cache"]
    status, out, _ = run(*command, "--json", "--sample", "--temperature", "0.1")
    result = json.loads(out)
    assert (status, result["mode"], len(result["token_ids"])) == (0, "shared_cache", 5)
    assert run(*command, "--temperature", "0.5")[0] == 2


def test_an_empty_context_and_a_temperature_of_zero_are_refused(run: Run) -> None:
    """Neither means the default, nor does an empty file."""
    command = ("generate", "--max-new-tokens", "6")
    for given, message in (
        (("--context", ""), "expected a context, got an empty --context"),
        (("--context", "", "--question", "a"), "expected a context, got an empty --context"),
        (("--context-file", os.devnull), f"a context in {os.devnull}, got an empty file"),
        (("--context", "a", "--sample", "--temperature", "0"), "temperature"),
    ):
        status, out, err = run(*command, *given)
        assert (status, out) == (2, "") and message in err  # not even the end of a line


def test_what_a_generation_configuration_asks_for_is_left_out(tmp_path: Path, run: Run) -> None:
    """Beams, several answers and outputs: the commands are greedy, and give one answer."""
    model, tokenizer = embedded.load()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    wanted = {"num_beams": 3, "num_return_sequences": 2, "output_hidden_states": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | wanted))
    changes = {"model.layers.0.mlp.down_proj": LowRank(torch.zeros(1, 128), torch.zeros(1, 256))}
    info = StaticInfo.of(model, tokenizer, "test", ())
    StaticPatch(info, changes).save(tmp_path / "static.safetensors")
    prompt = ("--context", "say german\n", "--question", "7 0 4.", "--max-new-tokens", "5")
    expected = json.loads(run("generate", *prompt, "--json")[1])["text"]
    for command in (("generate",), ("generate", "--patch", tmp_path / "static.safetensors")):
        status, out, err = run(command[0], tmp_path, *command[1:], *prompt, "--json")
        assert (status, json.loads(out).get("text")) == (0, expected), err
    status, out, _ = run(
        "extract", tmp_path, *prompt, "--out", tmp_path / "p.safetensors", "--json"
    )
    assert (status, json.loads(out).get("answer")) == (0, expected)


MODEL_FILE = embedded.MODEL_DIR / "model.safetensors"
HERE = str(Path(__file__).parent)
ERRORS = [
    ("", 2, "UsageError", "required: COMMAND"),
    ("dance", 2, "UsageError", "invalid choice: 'dance'"),
    ("verify --dtype int3", 2, "UsageError", "expected one of fp32, bf16, fp16"),
    ("verify --max-new-tokens 0", 2, "UsageError", "expected a number ≥ 1, got 0"),
    ("verify --device cuda:99", 2, "UsageError", "expected a device of this machine"),
    ("report --context a --out a.xyz", 2, "UsageError", "expected a file name ending in .html"),
    ("report --context a --out /nowhere/a.html", 2, "UsageError", "expected a folder that exists"),
    ("fit --examples . --out /proc/a.safetensors", 2, "UsageError", "a folder that can be written"),
    ("verify --context a --dataset .", 2, "UsageError", "not allowed with argument --context"),
    ("verify --question a --dataset .", 2, "ValueError", "expected no --question with --dataset"),
    ("verify --task-column a", 2, "ValueError", "expected no --task-column without --dataset"),
    ("verify --dataset . --task-column kept", 2, "ValueError", "expected a column of its own"),
    ("extract --out a", 2, "UsageError", "one of the arguments --context --context-file"),
    ("extract --context a --question b --out a", 2, "ArgumentTypeError", "ending in .safetensors"),
    ("extract --context a --out a.safetensors", 2, "ValueError", "expected --question"),
    ("extract --context a --keep-first -1 --out a", 2, "UsageError", "a number ≥ 0, got -1"),
    *(
        (f"generate --question a {option} --patch {__file__}", 2, "ValueError", f"no {name} with")
        for option in ("--keep-first 1", "--compile", "--mode two_pass", "--update stable")
        for name in option.split()[:1]
    ),
    (f"generate --patch {__file__}", 2, "ValueError", "expected --context or --question with"),
    ("verify --seed 18446744073709551616", 2, "UsageError", "a seed from -2⁶³ to 2⁶⁴ - 1, got 184"),
    ("extract --context a --out caf\udce9.safetensors", 2, "UsageError", "in UTF-8, which safet"),
    ("apply --patch . --out caf\udce9", 2, "UsageError", "'caf\\udce9': rename it"),
    ("extract --context a --layers 1 --out a", 2, "ValueError", "no --layers without --dataset"),
    ("extract --dataset . --layers x --out a", 2, "UsageError", "expected blocks as START:STOP"),
    ("extract --dataset /nowhere --out a", 2, "UsageError", "expected a data set, got '/nowhere'"),
    ("verify /nowhere/at/all", 2, "OSError", "or a hub id, got /nowhere/at/all: "),
    (f"verify {HERE}", 2, "OSError", "expected a folder with a model, as save_pretrained writes"),
    (
        "verify --context-file /nowhere/at/all",
        2,
        "UsageError",
        "a file with the context, got '",
    ),
    ("replay --patch /nowhere", 2, "UsageError", "expected a patch file, got '/nowhere', which"),
    ("fit --examples /nowhere --out a.safetensors", 2, "UsageError", "a file of examples, got '"),
    ("verify --revision main", 2, "ValueError", "no --revision with the embedded model"),
    (f"inspect --patch {__file__}", 1, "PatchFormatError", "safetensors"),
    (f"inspect --patch {MODEL_FILE} --device cpu", 2, "ValueError", "expected MODEL with --revis"),
]


@pytest.mark.parametrize(
    ("command", "status", "kind", "message"), ERRORS, ids=[command for command, *_ in ERRORS]
)
def test_errors_are_a_line_on_stderr_or_json(
    command: str,
    status: int,
    kind: str,
    message: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(*command.split())
    assert (got, out) == (status, "") and message in err and "Traceback" not in err
    got, out, err = run(*command.split(), "--json")
    error = json.loads(out)
    assert (got, err, error["status"], error["error"]["type"]) == (status, "", status, kind)
    assert message in error["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_demo_answers_and_verifies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON; every update in both dtypes: test_demo_shows_each_result_when_it_is_there."""
    few = [(torch.float32, "stable"), (torch.bfloat16, "exact")]
    monkeypatch.setattr(demo, "GRID", few)
    answer = embedded.held_out_prompts(embedded.KINDS[0], 1)[0].answer
    monkeypatch.setattr(demo, "_ANSWER_TOKENS", len(answer) + 1)
    status, out, _ = run("demo", "--prompts", "2", "--max-new-tokens", "2", "--json")
    data = json.loads(out)
    assert status == 0 and data["passed"] is True
    verified = [(entry["dtype"], entry["update"], entry["tokens"]) for entry in data["verify"]]
    assert verified == [("float32", "stable", 4), ("bfloat16", "exact", 4)]
    assert data["answers"][0]["patched"] == answer


@pytest.mark.parametrize(
    "arguments", [["--version"], ["verify", "--help"], ["dance"]], ids=" ".join
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom icl_patch.cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit as stop:\n"
        "    print(stop.code, {'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    done = run_python("-c", script)
    assert done.stdout.splitlines()[-1] == f"{2 if arguments == ['dance'] else 0} set()"
    if arguments == ["--version"]:
        assert done.stdout.startswith("icl-patch ")
        assert f"native library: {'yes' if native.cpu_instructions else 'no'}" in done.stdout
    else:
        assert "usage: icl-patch" in done.stdout + done.stderr


def test_options_offer_what_the_package_takes() -> None:
    """The command line lists them without importing torch."""
    assert arguments.UPDATES == UPDATES


def test_a_command_of_another_package_that_cannot_be_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others work."""
    broken = EntryPoint("dance", "nowhere.dance", "icl_patch.commands")
    monkeypatch.setattr("icl_patch.cli.main.entry_points", lambda group: [broken])
    status, _, err = run("inspect", "--patch", MODEL_FILE)
    assert status == 1 and "PatchFormat" not in err
    assert "icl-patch: no command dance (nowhere.dance): ModuleNotFoundError: " in err
    assert run("dance")[0] == 2


def test_output_survives_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["verify", "--max-new-tokens", "2"]) == 0
    terminal.seek(0)
    assert "identical: yes, 2 of 2 tokens" in terminal.read()


def test_progress_is_labelled_from_the_start_and_a_pipe_that_is_closed_early_is_no_error() -> None:
    """Nor is it at the end of the process, where Python writes out what is left."""
    script = f"set -o pipefail; '{sys.executable}' -P -m icl_patch verify --max-new-tokens 1 | true"
    environment = os.environ | {"FORCE_COLOR": "1"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "Errno" not in done.stderr
    # a token, in two arithmetics
    labels = ("importing torch", "loading the embedded model", "attaching", "2/2")
    places = [done.stderr.find(label) for label in labels]
    assert -1 not in places and places == sorted(places)


@pytest.mark.parametrize("kind", [T5Config, ViTConfig])
def test_models_that_are_no_causal_language_models(
    run: Run, tmp_path: Path, kind: type[PreTrainedConfig]
) -> None:
    """Without weights: the configuration says it before they are loaded."""
    kind().save_pretrained(tmp_path)
    status, out, err = run("verify", tmp_path)
    assert (status, out) == (2, "") and len(err) < 500
    for said in (f"of type '{kind.model_type}'", "choose another model", str(tmp_path)):
        assert said in err


def test_what_inspect_shows_and_leaves_out(run: Run, tmp_path: Path) -> None:
    """How a patch was computed, which only a replay reads, is in its JSON alone."""
    file = tmp_path / "p.safetensors"
    given = ("--keep-first", 6, "--context", "mode up", "--question", "per")
    _, out, _ = run("extract", *given, "--out", file)
    assert "of the question alone: --max-new-tokens patches the model's answer too" in out
    _, out, _ = run("inspect", "--patch", file)
    assert "['per']" in out and "mode " in out and "ids" not in out and "replayable" in out
    result = json.loads(run("inspect", "--patch", file, "--json")[1])
    names = {"passes", "longest", "divisible"}
    assert names <= result.keys() and not any(name in out for name in names)
    assert result["kept_text"] == ["per"]
    assert len(result["norms"]["mlp.gate_proj"]) == result["layers"] == 6
    assert result["prefix_text"] == ["<bos>mode "]
    assert len(result["kept_ids"][0]) == 3
    patch = ContextPatch.load(file)
    replace(patch, info=replace(patch.info, model="/nowhere")).save(file)
    _, out, _ = run("inspect", "--patch", file)
    assert "3 tokens; with MODEL they are shown as text" in out


def test_inspect_names_the_layers_and_leaves_padding_out(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    model, tokenizer = embedded.load()
    inputs = tokenizer(["mode upper\n", "mode flip\n"], return_tensors="pt", padding=True)
    kept = torch.tensor([[50, 51, 52, 53], [54, 0, 0, 0]])
    mask = torch.tensor([[True] * 4, [True] + [False] * 3])
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        context = {"context_ids": inputs["input_ids"], "context_mask": inputs["attention_mask"] > 0}
        patch = patcher.compute(**context, kept_ids=kept, kept_mask=mask)
    patch = patch.select(layers=slice(3, 5))
    patch.save(file)
    result = json.loads(run("inspect", "--patch", file, "--json")[1])
    assert result["layer_indices"] == [3, 4]
    of_tokens = [dict(patch.weight_changes(b, t)) for b, t in mask.nonzero().tolist()]
    for place, layer in enumerate(result["layer_indices"]):
        path = f"model.layers.{layer}.mlp.up_proj.weight"
        sizes = [float(changes[path].double().norm()) for changes in of_tokens]
        assert result["norms"]["mlp.up_proj"][place] == pytest.approx(sum(sizes) / len(sizes))
    out = run("inspect", "--patch", file)[1]
    assert [line.split()[1] for line in out.splitlines() if "│" in line][-2:] == ["3", "4"]


def test_extract_patches_the_answer_too(run: Run, tmp_path: Path) -> None:
    file, prompt = tmp_path / "whole.safetensors", ("say german\n", "7 0 4.")
    command = ("extract", "--context", prompt[0], "--question", prompt[1], "--out", file)
    answer = json.loads(run(*command, "--max-new-tokens", 5, "--json")[1])["answer"]
    model, tokenizer = embedded.load()
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        expected = patcher.ask(*prompt, max_new_tokens=5)
    patch = ContextPatch.load(file)
    assert answer == expected.text != ""
    assert torch.equal(patch.kept_ids, expected.patch.kept_ids)
    assert torch.equal(patch.layers[3]["readers.v"], expected.patch.layers[3]["readers.v"])


def test_verify_stops_where_the_answer_ends(run: Run) -> None:
    status, out, _ = run("verify", "--update", "stable")
    model, tokenizer = embedded.load()
    kind = embedded.held_out_prompts(embedded.KINDS[0], 1)[0]
    ids = tokenizer(kind.context + kind.question, return_tensors="pt").input_ids
    own = model.generate(ids, max_new_tokens=50, do_sample=False)[0, ids.shape[1] :]
    assert own[-1] == tokenizer.eos_token_id
    assert f"prompt: {kind.context + kind.question!r}\n" in out
    assert f"generated: {tokenizer.decode(own)!r}\n" in out
    assert status == 0 and f"same token: yes, {len(own)} of {len(own)} tokens" in out


@pytest.mark.parametrize(
    "command",
    [
        "verify --context a --chat",
        "verify --system a --question b",
        "generate --context a --chat",
        "extract --context a --question b --chat --out p.safetensors",
        "report --system a --question b --out p.html",
        "fit --examples chats.json --out p.safetensors",
        "verify --dataset rows.jsonl --chat",
        "extract --dataset rows.jsonl --system-column context --out p",
        "generate --patch static.safetensors --question b --chat",
    ],
)
def test_a_chat_without_a_template_is_refused_before_the_model_is_loaded(
    command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--dataset" in command:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path("chats.json").write_text('[{"system": "a", "questions": ["b"]}]')
    Path("rows.jsonl").write_text('{"context": "a", "kept": "b"}\n')
    Path("static.safetensors").touch()
    monkeypatch.setattr("icl_patch.evaluation.loading.load_model", None)
    status, _, err = run(*command.split())
    assert status == 2 and "expected a tokenizer with a chat template" in err


def test_demo_shows_each_result_when_it_is_there(
    run: Run, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where stdout and stderr are no terminals."""
    seen, grid = [], demo.verify_grid

    def watched(*arguments: Any) -> Iterator[Any]:
        for entry in grid(*arguments):
            seen.append("".join(capsys.readouterr()))
            yield entry

    monkeypatch.setattr(demo, "verify_grid", watched)
    status, out, err = run("demo", "--prompts", 1, "--max-new-tokens", 1)
    assert "loading the embedded model" in seen[0]
    assert "without it, but patched" in " ".join(seen[0].split())
    assert "patched: 1 of 1" in seen[0]
    promise = "patched: update exact in float32, which promises every bit of the logits"
    assert promise in seen[0].splitlines()
    assert "direct, float32: same token: yes, 1 of 1" in seen[1]
    assert "verifying each update and dtype: 2 of 6" in seen[2]
    assert "exact, bfloat16: identical: yes" in out and "6 of 6" in err
    whole = "".join((*seen, out))
    for update, dtype in itertools.product(UPDATES, ("float32", "bfloat16")):
        promised = "identical" if update == "exact" else "same token"
        assert f"{update}, {dtype}: {promised}: yes, 1 of 1" in whole
    assert status == 0 and "TVD" not in whole  # --verbose shows the tables


def test_generate_streams(
    run: Run, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first words are printed before the last token is there."""
    printed = []
    steps = ContextPatcher.generate

    def watched(self: ContextPatcher, *arguments: Any, **options: Any) -> Iterator[Any]:
        for step in steps(self, *arguments, **options):
            printed.append(capsys.readouterr().out)
            yield step

    monkeypatch.setattr(ContextPatcher, "generate", watched)
    command = ("generate", "--context", "say german\n7 0 4.", "--max-new-tokens", "12")
    status, out, _ = run(*command)
    whole = "".join(printed) + out
    monkeypatch.undo()
    expected = json.loads(run(*command, "--json")[1])["text"]
    assert (status, whole) == (0, f"{expected}\n")
    assert sum(map(bool, printed)) > 1


@pytest.mark.parametrize("module", ["rich.console", "torch"])
def test_an_interrupt_while_importing_leaves_no_traceback(module: str) -> None:
    script = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["icl-patch", "verify"]
from icl_patch.__main__ import run
sys.exit(run())
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_tuning_without_triton_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'icl-patch[gpu]'")):
        tune.run(argparse.Namespace(device=torch.device("cuda")))


def test_logits_that_are_not_finite_fail_commands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that no trial sees spoils them."""
    of_token, static = tmp_path / "token.safetensors", tmp_path / "static.safetensors"
    prompt = ("--context", "4", "--question", "7")
    assert run("extract", *prompt, "--out", of_token)[0] == 0
    model, tokenizer = embedded.load()
    changes = {"model.layers.0.mlp.down_proj": LowRank(torch.zeros(1, 128), torch.zeros(1, 256))}
    StaticPatch(StaticInfo.of(model, tokenizer, "test", ()), changes).save(static)
    [token], own = tokenizer("7", add_special_tokens=False).input_ids, torch.nn.Embedding.forward

    def spoilt(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        return own(self, ids).masked_fill((ids == token).unsqueeze(-1), torch.nan)

    monkeypatch.setattr(torch.nn.Embedding, "forward", spoilt)
    text = (*prompt, "--max-new-tokens", "2")
    for command in (
        ("generate", *text),
        ("generate", *text, "--patch", static),
        ("verify", *text),
        ("replay", "--patch", of_token),
    ):
        status, out, err = run(*command)
        assert (status, out.strip()) == (1, ""), (command, err)
        assert re.search(r"NaN or infinity in row 0: model\.layers\.0 has outputs", err), command
