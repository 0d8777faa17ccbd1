"""Ranks have from the start what all tests' ranks would import, each by itself."""

from scaletorch.dist.testing import preload

preload(
    "pytest", "torch._dynamo", "torch.distributed.tensor", "scaletorch.parallel.pg_manager.public"
)
