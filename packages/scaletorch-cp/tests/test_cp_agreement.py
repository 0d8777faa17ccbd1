"""When ranks compare their calls of attention."""

import pytest
import torch

from scaletorch.parallel.context_parallel import agreement


class Group:
    """Stands for a process group, which a cache knows weakly."""


@pytest.fixture
def compared(monkeypatch):
    """Return the calls that were compared, by a group of one rank, which lives as long."""
    calls, group = [], Group()
    monkeypatch.setattr(agreement, "_gathered", lambda mine, *_: calls.append(mine) or [mine])
    monkeypatch.setattr(agreement, "_groups", lambda *_: [group])
    return calls


@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 3)])
def test_off_the_cpu_a_call_is_compared_where_it_is_new(compared, device, times):
    for _ in range(3):
        agreement.require_agreement(agreement.REFUSED, torch.device(device), None)
    assert len(compared) == times


def test_calls_that_are_remembered_have_an_end(compared, monkeypatch):
    monkeypatch.setattr(agreement, "_MANY", 3)
    packed = [agreement.REFUSED._replace(documents=digest) for digest in range(5)]
    for each in [*packed, packed[4], packed[0]]:  # the fourth took the place of the first three
        agreement.require_agreement(each, torch.device("cuda"), None)
    assert compared == [*packed, packed[0]]
    (known,) = agreement._agreed[agreement._groups()[-1]].values()
    assert len(known) == 3
