"""The stand-in for vendors' devices, built once."""

import sys
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture(scope="session")
def standin():
    """The folder of the stand-in, which is built."""
    sys.path.insert(0, str(STANDIN))
    try:
        import build
    finally:
        sys.path.remove(str(STANDIN))
    build.prepare()
    return STANDIN
