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


@pytest.mark.parametrize("version", ["0.1.2rc1", "0.1.1.dev3", "0.1.1+local", "0.1.10"])
def test_versions_on_their_way_count_as_their_release(version):
    assert compatible(version, "0.1.1")
    assert not compatible(version, "0.2.0")


def test_the_error_names_both_and_the_way_out():
    require_siblings("scaletorch-tp", "0.1.0", {"scaletorch-pg~=0.1.0": "0.1.5"})
    with pytest.raises(VersionMismatchError) as caught:
        require_siblings("scaletorch-tp", "0.1.3", {"scaletorch-pg~=0.1.2": "0.2.0"})
    assert str(caught.value) == (
        "scaletorch-tp 0.1.3 works with scaletorch-pg~=0.1.2, and scaletorch-pg 0.2.0 is beside "
        "it. `pip install scaletorch-tp==0.1.3`, or a newer one, brings siblings that fit; copies "
        "in another project are to be updated together."
    )
    assert isinstance(caught.value, (ImportError, dist.errors.ScaletorchError))


def test_older_than_the_pin_does_not_do():
    with pytest.raises(VersionMismatchError, match=r"scaletorch-pg~=0\.1\.2, and .* 0\.1\.1"):
        require_siblings("scaletorch-tp", "0.1.3", {"scaletorch-pg~=0.1.2": "0.1.1"})
