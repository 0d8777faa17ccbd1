"""The stand-in for vendors' devices, built once."""

import sys
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Give packages entry points for devices, as pip would leave them."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name, value):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[scaletorch.devices]\n{name} = {value}\n")

    return add


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
