"""`hatch run release` raises versions and builds what is to be published."""

import sys

from .release import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
