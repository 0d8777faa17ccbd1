"""Tests import what lies beside them; ranks have what all tests' ranks import."""

import sys
from pathlib import Path

from scaletorch.dist.testing import preload

sys.path.append(str(Path(__file__).parent))
preload(
    "pytest",
    "rich.progress",
    "torch._dynamo",  # which the first optimizer of a process imports
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "scaletorch.pretrain",
    "scaletorch.verify",
    "mutants",
)
