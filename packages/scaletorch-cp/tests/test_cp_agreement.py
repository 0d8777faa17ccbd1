"""When ranks compare their calls of attention."""

from types import SimpleNamespace

import pytest
import torch

from scaletorch.parallel.context_parallel import agreement


class Group:
    """Stands for a process group, which a cache knows weakly."""


@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 3)])
def test_off_the_cpu_a_call_is_compared_where_it_is_new(monkeypatch, device, times):
    compared, group = [], Group()
    gathered = lambda mine, *_: compared.append(mine) or [mine]  # noqa: E731
    monkeypatch.setattr(agreement, "_gathered", gathered)
    monkeypatch.setattr(agreement, "_groups", lambda *_: [group])
    call = SimpleNamespace(ring=None, parts=None)
    for _ in range(3):
        agreement.require_agreement(agreement.REFUSED, torch.device(device), call)
    assert len(compared) == times
