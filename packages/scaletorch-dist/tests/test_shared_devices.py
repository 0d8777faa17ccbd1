"""Ranks that share devices, by a stand-in that refuses two ranks on one device as NCCL does."""

import os
import sys

import pytest
import torch

import scaletorch.dist as dist
from scaletorch.dist import devices
from scaletorch.dist.devices import entry_of_backend
from scaletorch.dist.startup.initialize import SETTING
from scaletorch.dist.testing import run_ranks

SHARING = dict(entry_of_backend("nccl").sharing)
HOST = "NCCL_HOSTID"
LOADING = "CUDA_MODULE_LOADING"
ONE = {"STANDIN_DEVICES": "1", "STANDIN_REFUSES": "1"}

pytestmark = pytest.mark.timeout(500)  # the first test may build the stand-in


@pytest.fixture
def card(standin, monkeypatch, install):
    """Ranks find the stand-in card by its entry point; this process never asks for devices."""
    install("card", "card_entry:ENTRY")
    monkeypatch.syspath_prepend(standin / "card")
    for name in SHARING:
        monkeypatch.delenv(name, raising=False)
    yield
    assert "torch_card" not in sys.modules


def place():
    """Where a rank is: its backend, its device, and what it has of the variables of sharing."""
    sums = torch.ones(1, device=devices.current_device())
    dist.all_reduce(sums)
    assert sums.item() == dist.get_world_size()
    here = {name: os.environ[name] for name in SHARING if name in os.environ}
    return dist.get_backend(), devices.current_device().index, here


def said(capfd):
    """Return the lines that ranks have logged."""
    return [line for line in capfd.readouterr().err.splitlines() if " ranks" in line]


def test_ranks_beyond_the_devices_share_them_and_one_rank_says_so(card, capfd):
    found = dist.launch(place, 3, backend="cardcl", env={**ONE, "STANDIN_DEVICES": "2"})
    for rank, (backend, device, here) in enumerate(found):
        assert (backend, device) == ("cardcl", rank % 2)
        assert here == {**SHARING, HOST: f"scaletorch-{rank}"}
    assert said(capfd) == [
        "3 ranks share 2 card devices with backend 'cardcl', by sockets of this host: slow, "
        "for tests"
    ]


def test_test_ranks_share_a_device_and_keep_what_the_user_has_set(card, monkeypatch):
    monkeypatch.setenv("NCCL_BUFFSIZE", "4096")
    found = run_ranks(place, 2, backend="cardcl", env={**ONE, "NCCL_NET": "Mine"})
    own = SHARING | {"NCCL_BUFFSIZE": "4096", "NCCL_NET": "Mine"}
    assert found == [("cardcl", 0, own | {HOST: f"scaletorch-{rank}"}) for rank in range(2)]


def test_the_same_host_on_two_ranks_is_refused(card):
    with pytest.raises(dist.RankFailedError, match="Duplicate card detected"):
        dist.launch(place, 2, backend="cardcl", env={**ONE, HOST: "mine"})


def test_launch_takes_the_machines_own_backend_where_each_rank_has_a_device(card, capfd):
    for backend in (None, "cardcl"):
        assert dist.launch(place, 2, backend=backend) == [("cardcl", 0, {}), ("cardcl", 1, {})]
    assert not said(capfd)
    assert dist.launch(place, 2, env=ONE) == [("gloo", 0, {}), ("gloo", 0, {})]
    assert said(capfd) == [
        "2 ranks, 1 card device: backend 'gloo', through the host's memory; backend='cardcl' "
        "lets ranks share devices"
    ]


def join(setting):
    """Join as a rank of torchrun, and say where this rank is."""
    os.environ[SETTING] = setting
    before = dict(os.environ)
    dist.init_dist("pytorch", backend="cardcl", timeout=60)
    found = place()
    dist.cleanup_dist()
    assert os.environ == before
    return found


def torchrun(*args, count="1", **kwargs):
    env = {"STANDIN_DEVICES": count}
    return run_ranks(join, 2, *args, init=False, env=env, **kwargs)


def test_a_launchers_ranks_share_a_device_where_the_setting_says_so(card):
    expected = [("cardcl", 0, {**SHARING, HOST: f"scaletorch-{rank}"}) for rank in range(2)]
    assert torchrun("1") == expected
    assert torchrun("1", count="2") == [("cardcl", 0, {}), ("cardcl", 1, {})]


def test_a_backend_without_a_way_to_share_says_what_else_there_is(standin, monkeypatch):
    monkeypatch.syspath_prepend(standin / "plugins")
    with pytest.raises(dist.RankFailedError) as caught:
        dist.launch(place, 2, backend="hccl", env={"STANDIN_DEVICES": "1"})
    assert sorted(caught.value.failures) == [0, 1]
    assert "backend 'hccl' takes one rank per device" in str(caught.value)
    assert "Start fewer ranks, or take backend 'gloo'" in str(caught.value)


def loading(joins):
    """How a rank's kernels are loaded while it is in the group, and afterwards."""
    if joins:
        dist.init_dist("pytorch", backend="cardcl", timeout=60)
    during = os.environ.get(LOADING)
    if joins:
        dist.cleanup_dist()
    return during, os.environ.get(LOADING)


@pytest.mark.parametrize("joins", [True, False])
def test_several_ranks_load_all_kernels_at_first_unless_told_otherwise(card, monkeypatch, joins):
    monkeypatch.delenv(LOADING, raising=False)

    def found(ranks=2, **env):
        given = {} if joins else {"backend": "cardcl"}
        (one,) = set(run_ranks(loading, ranks, joins, init=not joins, env=env, **given))
        return one

    assert found(STANDIN_UNUSED="1") == ("EAGER", None if joins else "EAGER")
    assert found(STANDIN_UNUSED="1", CUDA_MODULE_LOADING="LAZY") == ("LAZY", "LAZY")
    assert found(1, STANDIN_UNUSED="1") == (None, None)
    assert found() == (None, None)  # the device is in use already
