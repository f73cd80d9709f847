"""A streamer that prints text as it comes."""

from transformers import TextStreamer

from icl_patch.cli.output import output


class PrintedText(TextStreamer):
    """Prints to stdout, and reports its errors as :func:`icl_patch.cli.output.output` does."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the text."""
        with output():
            super().on_finalized_text(text, stream_end)
