"""Tests import what lies beside them; ranks have what all tests' ranks import."""

import sys
from pathlib import Path

from scaletorch.dist.testing import preload

sys.path.append(str(Path(__file__).parent))
preload(
    "pytest", "torch._dynamo", "torch.distributed.tensor", "scaletorch.parallel.tensor_parallel"
)
