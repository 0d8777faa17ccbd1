"""How many files of ours a warm call enters: what a newcomer has to read to follow it."""

import pytest
from tools.house.walk import WALKS, walk, way_of_sharded_model

from scaletorch.dist.testing import run_ranks


@pytest.mark.parametrize("name", WALKS)
def test_a_warm_call_enters_few_files(name):
    *_, most = WALKS[name]
    files = walk(name)
    assert len(files) <= most, "\n".join(sorted(files))


def test_a_model_goes_through_few_files_and_seldom_back_to_one():
    for files in run_ranks(way_of_sharded_model, 2):
        assert len(files) <= 30, files
        assert len(files) - len({*files}) <= 18, files
