"""Tests import what lies beside them; ranks have what all tests' ranks import."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scaletorch.dist import RankPool
from scaletorch.dist.testing import preload

STANDIN = Path(__file__).parents[2] / "scaletorch-dist" / "tests" / "standin"

FAMILIES = (
    "llama", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4",
)  # fmt: skip

sys.path.append(str(Path(__file__).parent))
preload(
    "pytest",
    "torch._dynamo",  # which the first optimizer of a process imports
    "torch._dynamo.convert_frame",  # and these the first function that it compiles
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "networkx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "scaletorch.pretrain",
    "scaletorch.verify",
    "mutants",
)
if find_spec("transformers"):  # takes 2 s, in each rank that does not have it
    preload(*(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES))


@pytest.fixture(scope="module")
def four():
    """Four ranks, the same for all tests of a file."""
    with RankPool(4, timeout=200, seed=0) as pool:
        yield pool


@pytest.fixture
def alone():
    """A grid of one process."""
    from training import grid

    with grid({}) as manager:
        yield manager


@pytest.fixture(scope="session")
def plugins():
    """The folder of modules that put a stand-in in the place of a vendor's device."""
    if not STANDIN.exists():
        pytest.skip("needs the tests of scaletorch-dist")
    sys.path.insert(0, str(STANDIN))
    try:
        import build
    finally:
        sys.path.remove(str(STANDIN))
    build.prepare()
    return str(STANDIN / "plugins")
