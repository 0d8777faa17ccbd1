"""Public names are what each package's record says."""

import pytest
from tools.packages import PACKAGES
from tools.release import api

MODULE = '''
"""A module."""
from typing import overload

from torch import Tensor
from .same import same

__all__ = ["LIMITS", "Named", "Tensor", "both", "same"]

LIMITS: dict[str, int] = {}

class _Base:
    def inherited(self, x: int = 1) -> None: ...

class Named(_Base):
    size: int

    def __init__(self, name: str, *, size: int = 2) -> None: ...

    @property
    def first(self) -> str: ...

    def _hidden(self) -> None: ...

@overload
def both(x: int) -> int: ...
@overload
def both(x: str) -> str: ...
def both(x): ...

def private(): ...
'''
RECORD = """
scaletorch.tiny
    LIMITS: dict[str, int]
    class Named(_Base)
        __init__(name: str, *, size: int = 2) -> None
        first: str
        inherited(x: int = 1) -> None
        size: int
    Tensor = torch.Tensor
    both(x: int) -> int
    both(x: str) -> str
    same(x: float) -> float

scaletorch.tiny.same
    other() -> None
    same = scaletorch.tiny.same
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_the_recorded_ones(package):
    difference = api.difference(package)
    assert not difference, (
        f"{difference}\n\nIf that is meant: hatch run api --accept, and a fragment"
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A package of one module and a submodule that is named as a function."""
    folder = tmp_path / "packages" / "tiny" / "src" / "scaletorch" / "tiny"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(MODULE)
    same = "def same(x: float) -> float: ...\ndef other() -> None: ...\n"
    (folder / "same.py").write_text(same)
    monkeypatch.setattr(api, "ROOT", tmp_path)
    monkeypatch.setattr(api, "PACKAGES", ["tiny"])
    (folder / "building.py").write_text("def inner() -> None: ...\n")
    modules = ["scaletorch.tiny", "scaletorch.tiny.same", "scaletorch.tiny.building"]
    monkeypatch.setattr(api, "MODULES", {"tiny": modules})
    return folder


def test_a_record_names_everything_public_until_a_change_is_accepted(tiny, capsys):
    assert api.record("tiny", "api.txt").endswith(RECORD)
    assert api.record("tiny", "building.txt").endswith(
        "scaletorch.tiny.building\n    inner() -> None\n"
    )
    assert api.main(["--accept"]) == 0
    assert api.main([]) == 0
    (tiny / "same.py").write_text("def same(x: float, y: int = 0) -> float: ...\n")
    assert api.main([]) == 1
    shown = capsys.readouterr()
    assert "-    same(x: float) -> float" in shown.out
    assert "+    same(x: float, y: int = 0) -> float" in shown.out
    api.main(["--accept"])
    assert api.main([]) == 0
