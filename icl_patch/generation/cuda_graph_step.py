"""A decode step captured as a CUDA graph."""

from dataclasses import replace

import torch
from torch import Tensor

from icl_patch.generation.decode_state import RunStep, StepInputs, StepOutput


class CapturedStep:
    """A step as a CUDA graph. A few ordinary calls first create everything that is created at first
    use; then the step is captured, and later calls launch the graph. Its tensors are the same at
    every call.
    """

    _WARM_UP = 3

    def __init__(self, run: RunStep, step_inputs: StepInputs, batch: int) -> None:
        self.run, self._calls = run, 0
        self._token_ids = step_inputs.current.new_zeros(batch)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: StepOutput | None = None

    def __call__(self, token_ids: Tensor, return_context_logits: bool) -> StepOutput:
        """Run the step on ``token_ids`` (B,)."""
        with torch.cuda.device(self._token_ids.device):  # streams and graphs are the current one's
            return self._run_or_replay(token_ids, return_context_logits)

    def _run_or_replay(self, token_ids: Tensor, return_context_logits: bool) -> StepOutput:
        self._token_ids.copy_(token_ids)
        self._calls += 1
        if self._calls <= self._WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                output = self.run(self._token_ids, return_context_logits)
            torch.cuda.current_stream().wait_stream(stream)
            return output
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._output = self.run(self._token_ids, return_context_logits)
            self._graph = graph
        assert self._output is not None
        self._graph.replay()
        number = self._calls
        return replace(self._output, is_overwritten=lambda: number != self._calls)
