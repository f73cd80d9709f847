"""A streamer that prints text as it comes."""

from transformers import TextStreamer

from icl_patch.cli import common


class PrintedText(TextStreamer):
    """Prints to stdout, and reports its errors as :func:`icl_patch.cli.common.output` does."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the text."""
        with common.output():
            super().on_finalized_text(text, stream_end)
