"""Every text is read by the same rules, in files, in arguments and in Python."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Run
from support.data_sets import write_json_lines
from support.random_models import build
from transformers import ByT5Tokenizer, LlamaConfig

from icl_patch import ContextPatcher, embedded, static
from icl_patch.evaluation.loading import encode_contexts
from icl_patch.evaluation.verify import verify
from icl_patch.models.prompts import encode
from icl_patch.texts import check_text, read_lines, read_text

TEXT = "Öl → 日本 🙂\n\nfmrp>"
NOT_UTF8 = {  # bytes, what the error says
    "UTF-16": (TEXT.encode("utf-16"), "the byte order mark of UTF-16 at 0", "utf-16"),
    "UTF-16 BE": (
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        "the byte order mark of UTF-16 at 0: .* iconv -f UTF-16 -t UTF-8",
        "utf-16",
    ),
    "UTF-32": (TEXT.encode("utf-32"), "the byte order mark of UTF-32 at 0", "utf-32"),
    "UTF-16 without a mark": (
        "mode".encode("utf-16-le"),
        "byte 0x00 at 1: .* iconv -f UTF-16",
        "utf-16-le",
    ),
    "Latin 1": (
        b"x\r\n" + "naïf".encode("latin1"),
        "byte 0xef at 5: .* iconv -f LATIN1",
        "latin1",
    ),
    "a byte of 0": (b"mode\0 upper", "byte 0x00 at 4: take it out", None),
    "cut": ("a日".encode()[:-1], "byte 0xe6 at 1", None),
}


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_a_file_is_its_text_without_mark_and_with_lines_that_end_in_lf(
    mark: bytes, end: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.write_bytes(mark + TEXT.encode().replace(b"\n", end))
    assert read_text(file) == TEXT
    lines = [line.rstrip("\r\n") for line in read_lines(file) if isinstance(line, str)]
    assert lines == TEXT.split("\n")
    file.write_bytes(b"a\n" + mark + b"b")  # two files, one behind the other
    assert list(read_lines(file)) == ["a\n", "b"]


@pytest.mark.parametrize("case", NOT_UTF8.values(), ids=NOT_UTF8)
def test_bytes_of_other_encodings_and_the_cure(
    case: tuple[bytes, str, str | None], tmp_path: Path
) -> None:
    content, message, encoding = case
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"expected UTF-8 text in {file}, got {message}"):
        read_text(file)
    if encoding is not None:  # the cure
        file.write_bytes(content.decode(encoding).encode())
        assert read_text(file) == content.decode(encoding).replace("\r\n", "\n")


def test_a_line_that_is_not_utf8_has_its_place_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("日\n".encode() + b"caf\xe9\n" + b"c")
    first, bad, last = read_lines(file)
    assert (first, last) == ("日\n", "c")
    assert isinstance(bad, ValueError) and f"{file}, got byte 0xe9 at 7: " in str(bad)


def test_a_byte_order_mark_is_in_no_prompt(tmp_path: Path, run: Run) -> None:
    """Of a file with a mark alone the answer would be one without a context."""
    file = tmp_path / "context"
    file.write_bytes(codecs.BOM_UTF8 + b"mode upper\r\nfmrp>")
    command = ("generate", "--context-file", file, "--max-new-tokens", 4, "--json")
    assert json.loads(run(*command)[1])["text"] == "FMRP"
    file.write_bytes(codecs.BOM_UTF8)
    status, out, err = run("generate", "--context-file", file, "--question", "fmrp>")
    assert (status, out) == (2, "") and f"a context in {file}, got an empty file" in err


@pytest.mark.parametrize(
    "command",
    [
        "verify --context-file FILE",
        "generate --context-file FILE",
        "extract --context-file FILE --question a --out p.safetensors",
        "report --context-file FILE --question a --out p.html",
        "fit --examples FILE --out p.safetensors",
        "fit --examples GOOD --held-out FILE --out p.safetensors",
        "fit --examples GOOD --preserve FILE --out p.safetensors",
        "verify --dataset FILE",
        "extract --dataset FILE --out p",
    ],
)
def test_every_command_names_the_file_and_its_encoding(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--dataset" in command:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    file, good = tmp_path / "file.jsonl", tmp_path / "good.json"
    good.write_text(json.dumps([{"context": "c", "questions": ["q"]}]))
    file.write_bytes(json.dumps([{"context": "c", "questions": ["q"]}]).encode("utf-16"))
    arguments = command.replace("FILE", str(file)).replace("GOOD", str(good)).split()
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert f"expected UTF-8 text in {file}, got the byte order mark of UTF-16 at 0" in err
    assert sorted(tmp_path.iterdir()) == [file, good]


@pytest.mark.parametrize(
    "command",
    [
        "extract SLOW --context a --question b --out p.safetensors",
        "extract SLOW --dataset rows.jsonl --out p",
        "verify SLOW --dataset rows.jsonl",
        "report SLOW --context a --question b --out p.html",
    ],
)
def test_a_slow_tokenizer_cannot_cut_a_prompt(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model, which is not there, would be loaded after this."""
    if "--dataset" in command:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    ByT5Tokenizer().save_pretrained("slow")
    LlamaConfig().save_pretrained("slow")
    write_json_lines(tmp_path / "rows.jsonl", [{"context": "a", "kept": "b"}])
    status, out, err = run(*command.replace("SLOW", "slow").split())
    assert (status, out) == (2, "")
    assert "expected a fast tokenizer, which knows where in a text a token begins" in err
    assert "got ByT5Tokenizer, which is slow: give" in err


def test_a_slow_tokenizer_in_python() -> None:
    model, tokenizer = build("llama", vocab_size=400), ByT5Tokenizer()
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        with pytest.raises(ValueError, match="expected a fast tokenizer"):
            patcher.ask("a", "b")
        scale = pytest.importorskip("icl_patch.scale", reason="no pyarrow")
        with pytest.raises(ValueError, match="expected a fast tokenizer"):
            scale.extract_dataset(patcher, "rows.jsonl", "patches")


BYTE, SURROGATE = "caf\udce9", "half \ud83d"


@pytest.mark.parametrize("option", ["context", "question", "system", "end"])
def test_an_argument_with_bytes_that_are_not_utf8(option: str, run: Run) -> None:
    command = {"end": "fit"}.get(option, "verify")
    status, out, err = run(command, f"--{option}", BYTE)
    assert (status, out) == (2, "")
    message = "expected text that UTF-8 can encode, got byte 0xe9 as character 3, in 'caf"
    assert f"argument --{option}: {message}" in err.replace("/--kept", "")


@pytest.mark.parametrize("value", [3, b"c", None, ["c"], {"c": 1}])
def test_what_is_no_text_is_named(value: Any, tmp_path: Path) -> None:
    model, tokenizer = embedded.load()
    arguments: dict = {"questions": ["q"], "context": "c", "answers": ["a"]}
    refused = pytest.raises((TypeError, ValueError), match=r"^expected .*(3|c|[Nn]one)")
    for name, given in (("context", value), ("questions", [value]), ("answers", [value])):
        if name == "answers" and value is None:
            continue  # the model answers
        with refused:
            static.examples(model, tokenizer, **arguments | {name: given})
    with refused:
        static.documents(model, tokenizer, [value])


def test_lone_surrogates_in_python() -> None:
    model, tokenizer = embedded.load()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    message = r"expected text that UTF-8 can encode, got the lone surrogate U\+D83D as character"
    refused = pytest.raises(ValueError, match=message)
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        for arguments in (
            {"context": SURROGATE, "question": "q"},
            {"context": "c", "question": SURROGATE},
            {"context": "c", "question": SURROGATE, "chat": True},
            {"system": SURROGATE, "question": "q"},
        ):
            with refused:
                patcher.ask(**arguments)
        # the cure: the text in its own encoding
        whole = SURROGATE.encode("utf-16", "surrogatepass") + "\ude42".encode(
            "utf-16-le", "surrogatepass"
        )
        assert patcher.ask("c", whole.decode("utf-16"), max_new_tokens=1).token_ids.numel() == 1
    for arguments in (
        {"questions": [SURROGATE], "context": "c"},
        {"questions": ["q"], "context": SURROGATE},
        {"questions": ["q"], "context": "c", "answers": [SURROGATE]},
        {"questions": ["q"], "context": "c", "end": "\ud83d"},
    ):
        with refused:
            static.examples(model, tokenizer, **arguments)
    with refused:
        static.documents(model, tokenizer, [SURROGATE])
    with refused:
        verify(model, tokenizer, context=SURROGATE)
    with refused:
        encode_contexts(tokenizer, ["a", SURROGATE])
    check_text("🙂")
    assert tokenizer.decode(encode(tokenizer, "🙂")) == "🙂"
