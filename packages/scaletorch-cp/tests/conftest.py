"""Tests import what lies beside them; ranks have from the start what all would import."""

import sys
from pathlib import Path

from scaletorch.dist.testing import preload

sys.path.append(str(Path(__file__).parent))
preload("pytest", "torch._dynamo", "scaletorch.parallel.context_parallel")
