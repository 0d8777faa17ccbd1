"""What a plan says of layouts is what their ranks hold and send, to the byte and the call."""

from itertools import islice

import pytest
from planned import differences, drawn, measured

from scaletorch.dist.testing import preload, run_ranks


@pytest.fixture(scope="module", autouse=True)
def _imported():
    preload("planned")  # by all ranks at once


@pytest.fixture(autouse=True)
def _messages(monkeypatch):
    """Ranks of one machine would not send gradients but read each other's memory."""
    monkeypatch.setenv("SCALETORCH_SHARED_MEMORY", "0")


@pytest.mark.parametrize(("ranks", "cases"), [(2, 3), (4, 5)])
def test_ranks_hold_and_send_what_is_planned(ranks, cases):
    chosen = list(islice(drawn(0, ranks), cases))
    found = run_ranks(measured, ranks, chosen, timeout=100)
    for case, *own in zip(chosen, *found, strict=True):
        assert not list(differences(case, own))
