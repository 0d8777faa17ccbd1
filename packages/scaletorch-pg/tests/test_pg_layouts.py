"""Layouts near a wrong one, and ranks in short form."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid, layouts, legal_layouts


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (2, 4), (7, 4), (12, 40), (16, 35)])
def test_legal_layouts_are_all_there_are(world_size, count):
    found = list(legal_layouts(world_size))
    assert len(found) == len(set(found)) == count
    assert {grid.world_size for grid in found} == {world_size}


@pytest.mark.parametrize(
    ("asked", "world_size", "nearest"),
    [
        (Grid(4, 2, 2, 2), 16, Grid(4, 2, 2, 1)),
        (Grid(8, 1, 1, 1), 64, Grid(8, 1, 1, 8)),
        (Grid(3, 1, 1, 1), 4, Grid(4, 1, 1, 1)),
        (Grid(2, 2, 2, 2), 7, Grid(1, 1, 1, 7)),
        (Grid(4, 1, 1, 1), 1, Grid()),
    ],
)
def test_data_parallelism_gives_way_first(asked, world_size, nearest):
    assert layouts.nearest(asked, world_size)[0] == nearest


def test_big_worlds_are_searched_by_divisors():
    with mock.patch.object(layouts, "divisors", wraps=layouts.divisors) as calls:
        found = list(legal_layouts(100_000))
    assert len(found) == 56 * 56  # each of 2^5 and 5^5 goes to four axes
    assert calls.call_count < len(found)


@pytest.mark.parametrize("bad", [0, -4, 2.5, True, None])
def test_worlds_are_numbers(bad):
    with pytest.raises(InvalidArgumentError, match="world_size must be a positive int, got"):
        list(legal_layouts(bad))


def test_names_of_layouts_are_read_back_and_need_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import scaletorch.parallel.pg_manager as pg\n"
        "assert all(pg.parse_layout(pg.layout_name(g)) == g for g in pg.legal_layouts(16))\n"
        "print(pg.layout_name(pg.Grid(tp=2, dp=4, ep=2, etp=2)), pg.parse_layout('dp4-ep2').ep)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert (done.stdout, done.stderr) == ("4x1x1x2-ep2-etp2 2\n", "")
