"""`python -m tools.vendoring` copies packages into another project."""

import sys

from .vendor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
