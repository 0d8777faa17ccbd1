"""Tests import what lies beside them and those of experts; ranks have what all ranks import."""

import sys
from pathlib import Path

from scaletorch.dist.testing import preload

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "scaletorch-ep" / "tests"))
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
