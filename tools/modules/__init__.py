"""Token models composed at random, on random layouts, beside one process: `__main__`."""

import sys

from ..packages import ROOT

_TESTS = str(ROOT / "packages" / "scaletorch" / "tests")  # where `refusals` is
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
