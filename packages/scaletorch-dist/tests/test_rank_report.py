"""What is told of ranks that failed."""

import pytest

from scaletorch.dist import RankFailedError, get_rank, launch
from scaletorch.dist.ranks.report import RankReport


def fail_alike(odd):
    raise ValueError("rank 2 has its own" if odd and get_rank() == 2 else "all say this")


def test_ranks_that_fail_alike_share_one_traceback():
    with pytest.raises(RankFailedError) as caught:
        launch(fail_alike, 3, False)
    text = str(caught.value)
    assert text.count("Traceback") == text.count("ValueError: all say this") == 1
    assert "--- ranks 0-2 failed alike ---" in text
    assert set(caught.value.failures) == {0, 1, 2}


def test_one_that_fails_in_its_own_way_is_shown_alone():
    report = RankReport("train", 4)
    for rank in (3, 0, 1):
        report.failures[rank] = "Traceback\nValueError: a\n"
    report.failures[2] = "Traceback\nValueError: b\n"
    text = str(report.error(None, timed_out=False))
    assert "--- ranks 0, 1, 3 failed alike ---\nTraceback\nValueError: a" in text
    assert "--- rank 2 failed ---\nTraceback\nValueError: b" in text
    assert text.startswith("train on 4 ranks: ranks 3, 0, 1, 2 failed")
