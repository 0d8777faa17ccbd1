"""Two vendored copies on one process group: what the one does is not taken for the other's."""

import copy
import importlib
import sys

import pytest
import torch
import torch.distributed as c10d
from tools.vendoring import vendor
from torch import nn

from scaletorch.dist.testing import run_ranks

ACME, ZENITH = COPIES = ("acme._vendor.scaletorch", "zenith._vendor.scaletorch")


def of(copy, module):
    return importlib.import_module(f"{copy}.{module}")


@pytest.fixture(scope="module", autouse=True)
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    for name in ("acme", "zenith"):
        (folder / name).mkdir()
        vendor(["scaletorch"], folder / name / "_vendor")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, use):
        for layer in self.layers[:use]:
            x = layer(x)
        return x


def run_one_backward():
    """Buckets of the two copies' wrappers fill in other orders on other ranks."""
    torch.manual_seed(0)
    plain, rank = [Chain().double() for _ in COPIES], c10d.get_rank()
    wrapped = [
        of(name, "parallel.data_parallel").DataParallelBucket(
            copy.deepcopy(chain), bucket_size=1, group=c10d.group.WORLD
        )
        for name, chain in zip(COPIES, plain, strict=True)
    ]

    def run(modules, rank):
        uses = [[3, 3], [3, 2]][rank]
        data = torch.full((2, 4), rank + 1.0).double()
        sum(m(data, use).sum() for m, use in zip(modules, uses, strict=True)).backward()

    run(plain, 0)
    run(plain, 1)
    run(wrapped, rank)
    for chain, model in zip(plain, wrapped, strict=True):
        for ours, theirs in zip(model.parameters(), chain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="would be synchronised twice"):
        of(ACME, "parallel.data_parallel").DataParallelBucket(
            wrapped[1].module, group=c10d.group.WORLD
        )


def test_both_end_one_backward():
    run_ranks(run_one_backward, 2)


def send_to_another():
    """What one copy sends, another receives, also where both ends of each message are compared."""
    rank = c10d.get_rank()
    first, second = (of(name, "dist") for name in COPIES)
    came = []
    for at, name in enumerate((ACME, ACME, ZENITH)):
        ends = (of(name, "dist"), second if at == 1 else of(name, "dist"))
        data = torch.full((3,), float(at)) if rank == 0 else torch.empty(3)
        ends[rank].send(data, 1) if rank == 0 else ends[rank].recv(data, 0)
        came.append(data[0].item())
    assert first is not second
    return came


def test_one_sends_and_another_receives():
    checked = {"SCALETORCH_DIST_CHECK": "1"}
    assert run_ranks(send_to_another, 2, env=checked, timeout=20) == [[0.0, 1.0, 2.0]] * 2


def guard_both():
    guards = [of(name, "guard") for name in COPIES]
    for guard in guards:
        guard.start()
    for name in COPIES:
        of(name, "dist").all_reduce(torch.ones(2))
    for guard in guards:
        guard.step()
    for guard in reversed(guards):
        guard.stop()


def test_both_guard_one_group():
    run_ranks(guard_both, 2)


def test_layers_of_another_copy_are_refused_and_not_taken_for_plain_ones():
    assert not issubclass(of(ZENITH, "dist").ScaletorchError, of(ACME, "dist").ScaletorchError)
    ours, theirs = (of(name, "parallel.tensor_parallel") for name in COPIES)
    model = nn.Sequential(theirs.ColumnParallelLinear(4, 4))
    assert theirs.gather_tensors(model, model.state_dict()).keys() == {"0.weight", "0.bias"}
    for use in (ours.gather_tensors, ours.split_by_owner):
        with pytest.raises(ValueError, match=r"'0' is a zenith.* of another copy of this library"):
            use(model, model.state_dict())
    with pytest.raises(ValueError, match="it is a ColumnParallelLinear, not a Linear itself"):
        ours.apply_tensor_parallel(model, {"0": "column_gather"})
