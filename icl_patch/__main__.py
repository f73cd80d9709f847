"""``python -m icl_patch`` is the command ``icl-patch``."""

import sys

from icl_patch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
