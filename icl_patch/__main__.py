"""``python -m icl_patch`` and the command ``icl-patch``."""

import sys


def run() -> int:
    """Import the command line and run it; an interrupt ends either without a traceback."""
    try:
        from icl_patch.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
