"""Comparison of the ranks' calls of attention."""

import pytest
import torch

from scaletorch.parallel.context_parallel import agreement
from scaletorch.parallel.context_parallel.cp_comms import Ring


class Group:
    """Stands for a process group, which a cache knows weakly."""


@pytest.fixture
def compared(monkeypatch):
    """Return the calls that were compared."""
    calls = []
    monkeypatch.setattr(agreement, "agree", lambda _, mine, *rest, **error: calls.append(mine))
    return calls


@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 3)])
def test_off_the_cpu_a_call_is_compared_where_it_is_new(compared, device, times):
    ring = Ring(Group(), (0, 1), 0)
    for _ in range(3):
        agreement.require_agreement(("call",), torch.device(device), ring)
    assert len(compared) == times


def test_calls_that_are_remembered_have_an_end(compared, monkeypatch):
    monkeypatch.setattr(agreement, "_MANY", 3)
    ring = Ring(Group(), (0, 1), 0)
    packed = [(f"documents {digest}",) for digest in range(5)]
    for each in [*packed, packed[4], packed[0]]:  # the fourth took the place of the first three
        agreement.require_agreement(each, torch.device("cuda"), ring)
    assert compared == [*packed, packed[0]]
    (known,) = agreement._agreed[ring.group].values()
    assert len(known) == 3
