"""`hatch run wheels` checks each wheel in isolation."""

import sys

from .check import main

if __name__ == "__main__":
    sys.exit(main())
