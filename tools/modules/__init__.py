"""Random token models on random layouts, compared with one process: `__main__`."""

import sys

from ..packages import ROOT

_TESTS = str(ROOT / "packages" / "scaletorch" / "tests")  # the folder of `refusals`
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
