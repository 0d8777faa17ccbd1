"""Stands in for the vendor's plugin of this name: put this folder on the path.

With `STANDIN_NARROW` its backend moves float64 as float32, as CNCL does.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import vendor

vendor.install("mlu", "cncl", narrow="STANDIN_NARROW" in os.environ)
