"""Ranks have from the start what all tests' ranks would import; blocks of tests lie beside them."""

import sys
from pathlib import Path

from scaletorch.dist.testing import preload

sys.path.append(str(Path(__file__).parent))
preload("pytest", "torch._dynamo", "scaletorch.parallel.expert_parallel")
