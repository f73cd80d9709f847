"""The modes of decode steps. The command line offers them too, so this module imports no torch."""

from enum import Enum


class DecodeMode(Enum):
    """How a decode step runs the rows with the context and the rows without it."""

    # the unmodified model, then the current token alone in the shapes of its replay
    TWO_PASS = "two_pass"
    # one pass of 2B rows over a cache of the B rows with the context
    TWO_STREAM = "two_stream"
    # the same cache; 2B rows from the attention's output to the block's end only
    SHARED_CACHE = "shared_cache"


TWO_PASS = DecodeMode.TWO_PASS.value
AUTO_MODE = "auto"
MODES = (AUTO_MODE, *(mode.value for mode in DecodeMode))
