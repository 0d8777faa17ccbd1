"""Wheels that do not fit together say so when they are imported."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

import scaletorch.dist as dist
from scaletorch.dist.errors import VersionMismatchError
from scaletorch.dist.siblings import compatible, require_siblings

VERSIONS = st.tuples(*[st.integers(0, 3)] * 3).map(lambda numbers: ".".join(map(str, numbers)))


@settings(deadline=None)
@given(VERSIONS, VERSIONS)
def test_compatible_is_what_pip_takes_it_for(version, wanted):
    assert compatible(version, wanted) == SpecifierSet(f"~={wanted}").contains(version)
    assert compatible(f"{version}rc1", wanted) == compatible(f"{version}+local", wanted)
    assert compatible(f"{version}.dev3", wanted) == compatible(version, wanted)


def test_the_error_names_both_and_the_way_out():
    require_siblings("scaletorch-tp", "0.1.0", {"scaletorch-pg~=0.1.0": "0.1.5"})
    with pytest.raises(VersionMismatchError) as caught:
        require_siblings("scaletorch-tp", "0.1.3", {"scaletorch-pg~=0.1.2": "0.2.0"})
    assert "scaletorch-tp 0.1.3 works with scaletorch-pg~=0.1.2, but" in str(caught.value)
    assert "scaletorch-pg 0.2.0 is installed" in str(caught.value)
    assert "`pip install scaletorch-tp==0.1.3`" in str(caught.value)
    assert isinstance(caught.value, (ImportError, dist.errors.ScaletorchError))

    with pytest.raises(VersionMismatchError, match=r"scaletorch-pg 0\.1\.1 is installed"):
        require_siblings("scaletorch-tp", "0.1.3", {"scaletorch-pg~=0.1.2": "0.1.1"})
