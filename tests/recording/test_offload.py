"""Models whose weights accelerate offloads: the bits of the same model in memory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.offload import ROOM, WAYS, offload, results
from support.optional import imported
from support.processes import run_python
from support.random_models import build, shallow, tokens
from support.static import random_examples, random_patch

from icl_patch import ContextPatcher, ops, verify
from icl_patch.errors import UnsupportedModelError
from icl_patch.evaluation import embedded
from icl_patch.layers.device_hooks import device_of, hooks_of
from icl_patch.models.model_checks import check_block_devices
from icl_patch.patch.fingerprints import weight_fingerprint
from icl_patch.static import fit

IDS = tokens(1, 2, 9), tokens(2, 2, 3)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """The model's weights lie where they were, and its modules have the same forwards."""

    def state() -> list[Any]:
        devices = [(name, x.device) for name, x in model.state_dict().items()]
        return [*devices, *(vars(module).get("forward") for module in model.modules())]

    before = state()
    yield
    assert state() == before


EVERY_WAY = [("llama", *pair) for pair in zip(("direct", "stable", "exact"), WAYS, strict=True)]
EVERY_WRITER = ("gemma3", "gpt2", "gpt_oss", "jamba")


@pytest.mark.parametrize(
    ("family", "update", "way"),
    [*EVERY_WAY, *((family, "exact", "disk") for family in EVERY_WRITER)],
)
def test_offloaded_weights_have_the_bits_of_weights_in_memory(
    family: str, update: str, way: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if family == "gemma3" else torch.float32
    expected, expected_file = results(shallow(family, 0, dtype), update, IDS, tmp_path / "x")
    model = offload(shallow(family, 0, dtype), way, tmp_path)
    with unchanged(model):
        got, file = results(model, update, IDS, tmp_path / "y")
    assert any(x.is_meta for x in model.parameters())
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert file == expected_file


@pytest.mark.parametrize(("family", "way"), [("gemma3", "disk"), ("llama", "device_map")])
def test_a_patch_of_one_pass_replays_with_its_bits(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the batch-invariant arithmetic, with its norms."""
    norms = Mock(wraps=ops.rms_norm)
    model = shallow(family, 0, torch.bfloat16)
    arguments = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    with ContextPatcher(model) as patcher:
        steps = list(patcher.generate(IDS[0], **arguments))
        patches = [step.patch for step in steps]
    model = offload(shallow(family, 0, torch.bfloat16), way, tmp_path)
    with unchanged(model), ContextPatcher(model) as patcher:
        monkeypatch.setattr(ops, "rms_norm", norms)
        for step, patch in zip(steps, patches, strict=True):
            assert patch.info.arithmetic == "batch_invariant"
            assert torch.equal(patcher.forward(patch.kept_ids, patch)[:, -1], step.logits)
    of_a_block = 2 if family == "llama" else 5  # the one that writes is in fp64
    assert norms.call_count == len(steps) * (of_a_block * model.config.num_hidden_layers + 1)


@pytest.mark.stress  # half a minute in a process of its own
def test_a_model_larger_than_memory(tmp_path: Path) -> None:
    imported("accelerate")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 11}
    model = build("llama", num_key_value_heads=4, **sizes)
    assert sum(x.nbytes for x in model.parameters()) > 2 * ROOM
    model.save_pretrained(tmp_path, max_shard_size="6MB")
    expected = []
    context = IDS[0].new_tensor(range(3, 20))[None]
    for update in ("stable", "exact"):
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(context, context[:, :3])
            total = patcher.forward(context[:, :3], patch).double().sum().item()
        expected.append(f"{update} {total}")
    done = run_python("-m", "support.offload", tmp_path)
    assert done.stdout.splitlines() == [*expected, "out of memory with all weights"], done.stderr


def test_an_error_in_a_pass_leaves_the_weights_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload(build("llama"), "disk", tmp_path)
    with unchanged(model), ContextPatcher(model, "stable") as patcher:
        reader = patcher.attached_model.blocks[1].readers["mlp.up_proj"]
        patch = patcher.compute(*IDS)
        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(reader, "linear_map", Mock(side_effect=KeyboardInterrupt))
            patcher.forward(IDS[1], patch)
        assert reader.base_layer.weight.is_meta
        patcher.forward(IDS[1], patch)


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    model = offload(build("llama"), "disk", tmp_path)
    assert weight_fingerprint(model) == weight_fingerprint(build("llama"))
    with ContextPatcher(model) as patcher:
        file = tmp_path / "weights" / "model.layers.0.mlp.up_proj.weight.dat"
        content = bytearray(file.read_bytes())
        content[0] ^= 1
        file.write_bytes(content)
        assert patcher.check_weights().changed


def test_verify_takes_an_offloaded_model(tmp_path: Path) -> None:
    model, tokenizer = embedded.load()
    report = verify(offload(model, "cpu", tmp_path), tokenizer=tokenizer, max_new_tokens=3)
    assert report.token_match == 1 and report.blocks_bit_identical == 1


def test_static_patches_are_applied_but_neither_fitted_nor_merged(tmp_path: Path) -> None:
    model = build("llama")
    patch = random_patch(model, 0)
    with patch.applied(model, check_front=False), torch.no_grad():
        expected = model(IDS[0]).logits
    offload(model, "disk", tmp_path)
    with patch.applied(model, check_front=False), torch.no_grad():
        assert torch.equal(model(IDS[0]).logits, expected)
    with pytest.raises(TypeError, match="weights in memory to merge into"):
        patch.merge(model)
    with pytest.raises(UnsupportedModelError, match="a gradient step keeps all the weights"):
        fit(model, random_examples(), rank=2, preserve=())


def test_what_does_not_work_is_refused(tmp_path: Path) -> None:
    model = offload(build("llama"), "cpu", tmp_path)
    with ContextPatcher(model, "stable") as patcher:
        with pytest.raises(UnsupportedModelError, match=r"compile does not cover .* hooks"):
            next(patcher.generate(IDS[0], max_new_tokens=2, compile=True))
        with pytest.warns(UserWarning, match="accelerate's hooks, which move tensors"):
            next(iter(patcher.generate(IDS[0], max_new_tokens=2)))
    part = model.model.layers[1].mlp.up_proj
    hooks_of(part)[0].execution_device = "cuda:1"
    assert device_of(part) == torch.device("cuda", 1)
    with pytest.raises(UnsupportedModelError, match=r"on one device, 1 is on cpu, cuda:1: give it"):
        check_block_devices({str(i): layer for i, layer in enumerate(model.model.layers)})


def test_the_page_has_the_measured_memory() -> None:
    root = Path(__file__).parents[2] / "docs"
    found = json.loads((root / "data" / "offload-memory.json").read_text())
    memory, disk = found["memory"], found["disk"]
    sentence = (
        f"{found['model']} in fp32 has {memory['weights']} MiB of weights. Loading it and making a"
        f" patch needed {disk['growth']} MiB from disk, and {memory['growth']} MiB with the weights"
        " in memory."
    )
    assert sentence in " ".join((root / "scale.md").read_text().split())
