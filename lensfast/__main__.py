"""python -m lensfast: the same as the lensfast command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
