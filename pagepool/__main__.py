"""`python -m pagepool`."""

import sys

from pagepool.cli import main

if __name__ == "__main__":
    sys.exit(main())
