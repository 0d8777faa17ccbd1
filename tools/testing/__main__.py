"""`hatch run test` runs each package's tests with only the wheels that it needs."""

import sys

from .suites import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
