"""`hatch run release` raises versions and builds the distributions to publish."""

import sys

from .release import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
