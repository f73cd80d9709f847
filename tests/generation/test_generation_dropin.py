"""The loop inside ``model.generate``, patched modules in other loops, and one patch applied to
every step.
"""

import gc
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.models import build, ragged, shallow, tokens
from support.numeric import noise_limit
from support.patchers import IDS, KEPT, Snapshot
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from icl_patch import ContextPatch, ContextPatcher, UnsupportedModelError, metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "generation"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the repository's examples")
@pytest.mark.parametrize("name", ["custom_generate", "own_loop"])
def test_examples_say_that_they_hold(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example(name).main(*([[]] if name == "custom_generate" else []))
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "update", "mode"),
    [
        ("gemma3", "stable", "auto"),
        ("llama", "direct", "two_stream"),
        ("gemma3", "exact", "two_pass"),
    ],
)
def test_generate_with_our_decoding_method(family: str, update: str, mode: str) -> None:
    """The same call with and without it: the same sequences, and as many scores and logits, of the
    same size.
    """
    model, ids, mask = build(family), tokens(3, 3, 9), ragged(3, 9, side="left")
    arguments = {
        "max_new_tokens": 6,
        "do_sample": True,
        "top_k": 9,
        "num_return_sequences": 2,
        "pad_token_id": 0,
        "eos_token_id": 11,
    }
    arguments |= {
        "attention_mask": mask.long(),
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    before, limit = Snapshot(model), noise_limit(model)
    with ContextPatcher(model, update) as patcher:
        torch.manual_seed(0)
        said = model.generate(ids, **arguments, custom_generate=patcher.decoding_method(mode=mode))
        plain = model.generate(
            ids, max_new_tokens=2, pad_token_id=0, custom_generate=patcher.decoding_method()
        )
    assert isinstance(plain, Tensor)
    assert torch.equal(said.sequences, expected.sequences)
    for one, other in ((said.scores, expected.scores), (said.logits, expected.logits)):
        assert len(one) == len(other)
        live = torch.ones(6, dtype=torch.bool)
        for step, (ours, theirs) in enumerate(zip(one, other, strict=True)):
            assert ours.shape == theirs.shape
            finite = theirs.isfinite() & live.unsqueeze(1)
            assert torch.equal(ours.isfinite() & live.unsqueeze(1), finite)
            assert (ours - theirs)[finite].abs().max() <= limit * theirs[finite].abs().max()
            live &= expected.sequences[:, 9 + step] != 11
    before.check(model)


class _Counter(BaseStreamer):
    """How many tensors as wide as the vocabulary there are, at every token."""

    def __init__(self, width: int) -> None:
        self.width, self.counts = width, []

    def put(self, _value: Tensor) -> None:
        self.counts.append(
            sum(
                type(x) is Tensor and x.dim() == 2 and x.shape[1] == self.width
                for x in gc.get_objects()
            )
        )

    def end(self) -> None:
        pass


def test_what_was_not_asked_for_is_not_kept() -> None:
    model = build("llama", vocab_size=101)
    with ContextPatcher(model, "stable") as patcher:
        counter = _Counter(101)
        model.generate(
            IDS,
            max_new_tokens=9,
            eos_token_id=None,
            custom_generate=patcher.decoding_method(streamer=counter),
        )
    assert max(counter.counts[2:]) <= counter.counts[2]


def test_the_decoding_method_in_each_mode() -> None:
    """Its logits are those of :meth:`ContextPatcher.generate`, bit for bit."""
    model, ids = build("llama"), tokens(3, 3, 40)
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    chosen = {}
    with ContextPatcher(model) as patcher:
        for mode in ("two_pass", "shared_cache"):
            method = patcher.decoding_method(mode=mode)
            said = model.generate(ids, **arguments, **outputs, custom_generate=method)
            steps = patcher.generate(ids, mode=mode, **arguments)
            for logits, step in zip(said.logits, steps, strict=True):
                assert torch.equal(logits, step.logits)
            chosen[mode] = torch.stack(said.logits)
        assert not torch.equal(chosen["two_pass"], chosen["shared_cache"])


def test_the_decoding_method_of_another_model() -> None:
    with ContextPatcher(build("llama"), "stable") as patcher:
        method = patcher.decoding_method()
        with pytest.raises(ValueError, match="expected the model that the patcher is attached to"):
            build("llama", 1).generate(IDS, max_new_tokens=2, custom_generate=method)
    with pytest.raises(ValueError, match="detached"):
        patcher.model.generate(IDS, max_new_tokens=2, custom_generate=method)


@pytest.mark.parametrize("update", ["direct", "stable", "exact"])
@pytest.mark.parametrize("family", ["gemma3", "llama-tied", "gpt2", "gpt_neox"])
def test_an_applied_patch_is_its_tokens_change(family: str, update: str) -> None:
    """On its own token the changed weights give the context's logits; on others, those of the
    materialised weights.
    """
    model = stock(family)
    before = Snapshot(model)
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(tokens(5, 2, 7), tokens(6, 2, 1))
        for row in (0, 1):
            with patcher.applied(patch, row=row) as changed, torch.no_grad():
                token, place = (
                    patch.kept_ids[row : row + 1],
                    {"position_ids": patch.position_ids[row : row + 1]},
                )
                alone = changed(token, **place, use_cache=False).logits
                # of the changed weights: a direct update divides by activations, and magnifies what
                # they are off by
                limit, limit_elsewhere = (
                    noise_limit(changed, token, **place),
                    noise_limit(changed, IDS),
                )
                generated = changed.generate(
                    IDS,
                    attention_mask=torch.ones_like(IDS),
                    max_new_tokens=4,
                    do_sample=False,
                    pad_token_id=0,
                )
                elsewhere = changed(IDS).logits
            assert metrics.linf(alone[:, -1], patch.logits[row, -1:]).max() <= limit
            assert generated.shape[1] > IDS.shape[1]
            changes = dict(patch.weight_changes(row, 0))
            state = {name: value.clone() for name, value in before.state.items()}
            for name, change in changes.items():
                state.setdefault(name, torch.zeros_like(change)).add_(change)
            with torch.no_grad():
                expected = torch.func.functional_call(
                    stock(family), state, (IDS,), tie_weights=False
                ).logits
            assert metrics.linf(elsewhere, expected).max() <= limit_elsewhere
        assert not torch.equal(elsewhere, before.logits)
    before.check(model)


def stock(family: str) -> torch.nn.Module:
    return build(family, 2) if family in ("gemma3", "llama", "llama-tied") else shallow(family, 2)


def test_a_token_is_chosen_and_bad_choices_are_named(tmp_path: Path) -> None:
    model = build("llama")
    kept = ragged(2, 3, side="right")  # rows of 3 and 1 tokens
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(IDS, KEPT, kept_mask=kept)
        patch.save(tmp_path / "patch.safetensors")
        loaded = ContextPatch.load(tmp_path / "patch.safetensors", model)
        found = []
        for given, row, token in ((patch, 1, 0), (loaded, 1, -1), (patch, 0, -1), (patch, 0, 2)):
            with patcher.applied(given, row=row, token=token), torch.no_grad():
                found.append(model(IDS).logits)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[2], found[3])
        assert not torch.equal(found[0], found[2])
        for arguments, message in (
            ({"row": 2}, "a row and a token of 2 x 3, got 2 and -1"),
            ({"token": 3}, "a row and a token of 2 x 3, got 0 and 3"),
            ({"row": 1, "token": 1}, "kept token of row 1, which has 1, got padding"),
            ({"row": 1, "token": -2}, "kept token of row 1, which has 1, got padding"),
        ):
            with pytest.raises(ValueError, match=message), patcher.applied(patch, **arguments):
                pass
        with (
            pytest.raises(ValueError, match="all its layers"),
            patcher.applied(patch.select(layers=slice(1, 3))),
        ):
            pass
        with patcher.applied(patch):
            for call in (
                lambda: patcher.compute(IDS, KEPT),
                lambda: patcher.generate(IDS),
                lambda: patcher.applied(patch).__enter__(),
            ):
                with pytest.raises(ValueError, match="without an applied patch"):
                    call()
        with pytest.raises(ZeroDivisionError), patcher.applied(patch):
            _ = 1 / 0
        assert torch.equal(
            patcher.compute(IDS, KEPT, kept_mask=kept).layers[0]["readers.v"],
            patch.layers[0]["readers.v"],
        )


def test_experts_are_not_changed_for_other_tokens() -> None:
    with ContextPatcher(shallow("mixtral", 0), "stable") as patcher:
        patch = patcher.compute(IDS, KEPT)
        with (
            pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 has experts"),
            patcher.applied(patch),
        ):
            pass
        assert torch.equal(patcher.forward(KEPT, patch).argmax(-1), patch.logits.argmax(-1))
