"""A decode step captured as a CUDA graph."""

from dataclasses import replace

import torch

from icl_patch.generation.decode_state import RunStep, StepOutput


class CapturedStep:
    """A step as a CUDA graph. A few ordinary calls first create everything that is created at first
    use; then the step is captured, and later calls launch the graph. Its tensors are the same at
    every call.
    """

    _WARM_UP = 3

    def __init__(self, run: RunStep, device: torch.device) -> None:
        self.run, self._device, self._calls = run, device, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: StepOutput | None = None

    def __call__(self, return_context_logits: bool) -> StepOutput:
        """Run the current token."""
        with torch.cuda.device(self._device):  # streams and graphs are the current one's
            return self._run_or_replay(return_context_logits)

    def _run_or_replay(self, return_context_logits: bool) -> StepOutput:
        self._calls += 1
        if self._calls <= self._WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                output = self.run(return_context_logits)
            torch.cuda.current_stream().wait_stream(stream)
            return output
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._output = self.run(return_context_logits)
            self._graph = graph
        assert self._output is not None
        self._graph.replay()
        number = self._calls
        return replace(self._output, is_overwritten=lambda: number != self._calls)
