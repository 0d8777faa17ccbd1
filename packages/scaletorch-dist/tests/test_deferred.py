"""Names that are imported when they are asked for are as good as those of any package."""

import subprocess
import sys
from importlib import import_module

import pytest

import scaletorch.dist as dist
from scaletorch.dist import public

INIT = """
from scaletorch.dist.deferred import deferred
__getattr__, __dir__ = deferred(__name__)
"""
PUBLIC = """
from math import pi as circle

from .deep.under import below as below
from .parts import plain as plain
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a name of its own, one of a folder, and one of another package."""
    made = tmp_path / "put_off"
    (made / "deep").mkdir(parents=True)
    (made / "__init__.py").write_text(INIT)
    (made / "public.py").write_text(PUBLIC)
    (made / "parts.py").write_text("from . import beside\n\ndef plain(): return beside\n")
    (made / "beside.py").write_text("")
    (made / "deep" / "__init__.py").write_text("")
    (made / "deep" / "under.py").write_text("import wave\n\ndef below(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "put_off"]:
        del sys.modules[name]


def test_all_names_are_those_of_the_table():
    assert {name for name in vars(public) if not name.startswith("_")} == {*dist.__all__}
    for name in dist.__all__:
        assert getattr(dist, name) is getattr(public, name)
        assert name in vars(dist)
    assert {*dist.__all__, "errors"} <= {*dir(dist)}


def test_a_name_imports_what_it_needs(package):
    found = import_module("put_off")
    assert found.deep.__name__ == "put_off.deep"
    assert "put_off.public" not in sys.modules
    assert "put_off.parts" not in sys.modules
    assert "below" in dir(found)
    assert found.plain() is sys.modules["put_off.beside"]
    assert "put_off.deep.under" not in sys.modules
    assert vars(found)["plain"] is found.plain
    assert found.circle == pytest.approx(3.14159265)
    everything = {}
    exec("from put_off import *", everything)
    assert {*everything} - {"__builtins__"} == {"below", "circle", "plain"}


def test_what_is_missing_is_said_in_the_words_of_python(package):
    found = import_module("put_off")
    with pytest.raises(AttributeError, match=r"^module 'put_off' has no attribute 'plane'$"):
        found.plane  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'plane' from 'put_off'"):
        exec("from put_off import plane")
    for name in ("__wrapped__", "__pycache__", "not a name", "parts.py"):
        assert not hasattr(found, name)


def test_importing_the_package_imports_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import scaletorch.dist as dist, scaletorch.dist.siblings\n"
        "from scaletorch.dist import InvalidArgumentError\n"
        "assert 'all_reduce' in dir(dist) and issubclass(InvalidArgumentError, ValueError)\n"
        "try: dist.all_reduce\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("torch\n", "")
