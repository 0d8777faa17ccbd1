"""Tests may skip for want of a thing only where the machine does not say that it has it."""

import subprocess
import sys

import pytest
from tools.testing import skips

SKIPPING = """
import pytest

REASONS = ["hatch env create ray", "scontrol is not installed", "no CUDA device", "no CUDA device"]

@pytest.mark.parametrize("reason", REASONS)
def test_it(reason):
    pytest.skip(reason)

def test_that_passes(): pass

def test_of_a_library():
    pytest.importorskip("no_such_library")
"""


@pytest.fixture(scope="module")
def reasons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipping")
    (folder / "test_it.py").write_text(SKIPPING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--junitxml=report.xml",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run([*command, "test_it.py"], cwd=folder, check=True, capture_output=True)
    return skips.skipped(folder / "report.xml")


def test_reasons_are_read_from_the_report(reasons):
    assert reasons["no CUDA device"] == 2
    assert sorted(map(skips.lacking, reasons)) == ["cuda", "libraries", "ray", "slurm"]


@pytest.mark.parametrize(
    ("has", "wrong"),
    [
        (None, []),
        ("compiler", []),
        ("ray mpi", ["1 skipped: hatch env create ray"]),
        ("cuda", ["2 skipped: no CUDA device"]),
    ],
)
def test_what_the_machine_has_may_not_be_missing(reasons, has, wrong):
    assert skips.forbidden(reasons, has) == wrong


def test_an_unknown_reason_is_wrong_where_the_machine_says_what_it_has(reasons):
    found = skips.Counter({"it is Monday": 1})
    assert skips.forbidden(found, "ray") == ["1 skipped: it is Monday"]
    assert skips.forbidden(found, None) == []


def test_a_misspelt_word_is_told():
    with pytest.raises(ValueError, match=r"\['slurn'\] are none of"):
        skips.forbidden(skips.Counter(), "slurn")
