"""All causal families of the installed transformers on every axis and pair of axes: `__main__`."""

import sys

from ..packages import ROOT

_TESTS = str(ROOT / "packages" / "scaletorch" / "tests")  # the folder of `exactly`
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
