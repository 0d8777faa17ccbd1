"""How many files of ours a warm call enters: what a newcomer has to read to follow it."""

import pytest
from tools.house.walk import WALKS, walk


@pytest.mark.parametrize("name", WALKS)
def test_a_warm_call_enters_few_files(name):
    *_, most = WALKS[name]
    files = walk(name)
    assert len(files) <= most, "\n".join(sorted(files))
