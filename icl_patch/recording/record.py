"""Recording a pass: the recorders' hooks and modes, installed on entry and removed on exit."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from icl_patch.layers.experts import PatchedScaledExperts
from icl_patch.layers.router import PatchedRouter
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.expert_recorder import record_experts, record_scaled_experts


@contextmanager
def recording(recorders: Sequence[BlockRecorder]) -> Iterator[None]:
    """Within this context the recorders compute their blocks' factors."""
    with ExitStack() as stack:
        for recorder in recorders:
            stack.callback(recorder.block.off)
            _set_modes(recorder, stack)
            recorder.hook(stack)
        yield


def _set_modes(recorder: BlockRecorder, stack: ExitStack) -> None:
    """Let the block's patched modules hand their inputs to the recorder."""
    block = recorder.block
    for name, reader in block.readers.items():
        record = recorder.router if isinstance(reader, PatchedRouter) else recorder.reader
        reader.record(lambda layer, *inputs, name=name, record=record: record(name, layer, *inputs))
    if block.experts is not None:
        scaled = isinstance(block.experts, PatchedScaledExperts)
        record_these: Any = record_scaled_experts if scaled else record_experts
        block.experts.record(lambda layer, *inputs: record_these(recorder, layer, *inputs))
    if block.down is not None:
        block.down.record(recorder.down)
    if block.post_norm is not None:
        block.post_norm.record(recorder.norm)
    if block.inner_norm is not None:
        block.inner_norm.record(recorder.inner_norm)
    if block.spec.addend is not None:
        addend = block.module.get_submodule(block.spec.addend)
        block.hook(stack, addend.register_forward_hook, recorder.on_addend)
