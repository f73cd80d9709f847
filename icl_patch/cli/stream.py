"""A streamer that prints text as it comes."""

from torch import Tensor
from transformers import TextStreamer

from icl_patch.cli.output import output


class PrintedText(TextStreamer):
    """Prints to stdout, and reports its errors as :func:`icl_patch.cli.output.output` does."""

    _has_begun = False

    def put(self, value: Tensor) -> None:
        """Take the prompt, then tokens."""
        self._has_begun = not self.next_tokens_are_prompt
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the text; an error before the first token leaves no line to end."""
        if self._has_begun:
            with output():
                super().on_finalized_text(text, stream_end)
