"""All ranks make the calls of every communicator in one order, and open none in a step."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as c10d
from group_calls import MOST, Called, Recorder, faults
from sweeps import today
from test_host_waits import LAYOUTS, small_model
from training import grid, sizes_of

import scaletorch.dist as dist
from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import devices
from scaletorch.dist.building import all_to_all_flat
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import SCHEDULES

PLAIN = {"rehearse": False}
OPTIONS = [
    {},
    PLAIN | {"sequence_parallel": True, "loss_parallel": True},
    *(PLAIN | {"cp_method": method} for method in ("all_gather", "ulysses", "hybrid", "auto")),
]
EXPERTS = [
    ((4, 1, 1, 1), {"ep": 4}),
    ((2, 1, 1, 2), {"ep": 2}),
    ((2, 1, 1, 2), {"ep": 4, "sequence_parallel": True}),
    ((2, 2, 1, 1), {"ep": 2}),
    ((2, 1, 2, 1), {"ep": 4}),
    ((4, 1, 1, 1), {"ep": 2, "recompute": True}),
]
OF_EIGHT = [(2, 2, 1, 2), (1, 4, 2, 1), (2, 2, 2, 1), (1, 4, 1, 2), (2, 4, 1, 1), (1, 2, 2, 2)]
TRAINING = [name for name in SCHEDULES if name != "forward_only"]

pytestmark = pytest.mark.timeout(500)  # the first test may build the stand-in


def calls_of(layout, plant=None, ep=1, **options):
    """This rank's calls while a model is built and takes two steps."""
    device, recorder, pp = devices.current_device(), Recorder(), layout[1]
    with recorder.recording(), grid(sizes_of(layout) | {"ep_size": ep}) as manager:
        torch.manual_seed(0)
        model = small_model(ep > 1, tie_embeddings=pp > 1, num_layers=8 if pp == 4 else 4)
        model = parallelize(model.to(device), manager, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder.late = True
        ids = torch.randint(32, (8, 8)).to(device)
        for _ in range(2):
            optimizer.zero_grad()
            train_step(model, shard_global_batch({"input_ids": ids, "labels": ids}, 2, model=model))
            optimizer.step()
        if plant is not None:
            plant(manager, device)
    return recorder.calls, recorder.most


def calls_of_all(cases):
    dist.init_dist("pytorch", backend="hccl", timeout=60)
    return [calls_of(layout, **options) for layout, options in cases]


def faults_of(cases, size):
    """Return the faults of each case, as lines."""
    answers = run_ranks(calls_of_all, size, cases, init=False, timeout=450)
    for calls, _ in (found for rank in answers for found in rank):
        assert any(c.late for c in calls), "no call of a step was recorded"
    return [
        faults([SimpleNamespace(calls=calls, most=most) for calls, most in ranks])
        for ranks in zip(*answers, strict=True)
    ]


def require_order(cases, size):
    for case, found in zip(cases, faults_of(cases, size), strict=True):
        assert not found, f"{case}:\n" + "\n".join(found)


def test_layouts_and_options_call_in_one_order_on_what_is_open(plugins, monkeypatch):
    monkeypatch.syspath_prepend(plugins)
    options = [
        (layout, options)
        for options in OPTIONS
        for layout in LAYOUTS
        if layout[2] > 1 or "cp_method" not in options
    ]
    plain = [(layout, PLAIN) for layout in LAYOUTS]
    experts = [(layout, PLAIN | options) for layout, options in EXPERTS]
    require_order([*today(plain, 6), *today(options, 50), *today(experts, 6)], 4)


def test_every_schedule_of_eight_ranks_calls_in_one_order(plugins, monkeypatch):
    monkeypatch.syspath_prepend(plugins)
    monkeypatch.setenv("STANDIN_DEVICES", "8")
    cases = [(layout, PLAIN | {"schedule": name}) for name in TRAINING for layout in OF_EIGHT]
    require_order(today(cases, 54), 8)


def differ(manager, device):
    """Make another collective on one rank, one round the grid in a circle, and one on one rank."""
    rank, tp, dp = manager.global_rank, manager.tp_group, manager.dp_group
    one = torch.ones(1, device=device)
    c10d.all_reduce(one if rank else one.int(), group=tp)
    order = (tp, dp) if rank in (1, 2) else (dp, tp)
    for work in [c10d.all_reduce(one.clone(), group=group, async_op=True) for group in order]:
        work.wait()
    c10d.all_reduce(one, group=manager.cp_group)
    c10d.new_group([rank, rank ^ 1], use_local_synchronization=True)


def mismatch(manager, device):
    """Send in another order than is received, send what is not received, and too many at once."""
    first, group = manager.pp_rank == 0, manager.pp_group
    (peer,) = set(c10d.get_process_group_ranks(group)) - {manager.global_rank}
    one = torch.ones(1, device=device)
    call = c10d.isend if first else c10d.irecv
    for data in (one, one.int()) if first else (one.int(), one):
        call(data, peer, group).wait()
    if not first:
        mismatch.kept = c10d.isend(one, peer, group)  # which never ends
    many = [c10d.P2POp(call, one.clone(), peer, group) for _ in range(MOST + 1)]
    for work in c10d.batch_isend_irecv(many):
        work.wait()


def late(manager, device):
    """Exchange a message with a rank that none was exchanged with before."""
    peer = next(r for r in c10d.get_process_group_ranks(manager.tp_group) if r != dist.get_rank())
    one = torch.ones(1, device=device)
    dist.exchange([(one, peer)], [(one.clone(), peer)], group=manager.tp_group)


def swap_exchanges(manager, device):
    """Start two exchanges of experts, on one rank in the other order."""
    parts = [1] * manager.ep_size
    ones = torch.ones(manager.ep_size, device=device)
    order = (ones.int(), ones) if manager.ep_rank == 1 else (ones, ones.int())
    for work in [all_to_all_flat(each, parts, parts, manager.ep_group) for each in order]:
        work.wait()


PLANTED = [
    ((2, 1, 1, 2), differ, ["collective", "in different orders", "of one rank", "made on"]),
    ((2, 2, 1, 1), mismatch, ["in their order", "in their messages", "a batch of 129 messages"]),
    ((1, 1, 2, 2), late, ["send on", "recv on", "is a first use, after construction"]),
    ((2, 1, 1, 2), swap_exchanges, ["collective", "all_to_all_single", "differs between members"]),
]


def test_a_fault_of_each_kind_is_seen(plugins, monkeypatch):
    monkeypatch.syspath_prepend(plugins)
    cases = [
        (layout, PLAIN | {"plant": plant, "ep": 2 if plant is swap_exchanges else 1})
        for layout, plant, _ in PLANTED
    ]
    for found, (layout, _, texts) in zip(faults_of(cases, 4), PLANTED, strict=True):
        lines = "\n".join(found)
        assert all(text in lines for text in texts), f"{layout}: {texts} in\n{lines}"


def test_an_exchange_whose_ends_expect_other_sizes_is_seen():
    where = "ep", (0, 1), "npu"

    def found(*sizes):
        made = Called(where, "made", (), None, False)
        calls = [
            [made, Called(where, "alltoall_base", ("float32",), None, False, each)]
            for each in sizes
        ]
        return faults([SimpleNamespace(calls=each, most=0) for each in calls])

    assert found(((2, 1), (2, 3)), ((3, 4), (1, 4))) == []
    (line,) = found(((2, 1), (2, 3)), ((4, 3), (1, 4)))
    assert "sends ((2, 3), (1, 4)) where ((2, 1), (4, 3)) is expected" in line
