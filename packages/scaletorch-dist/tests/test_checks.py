"""Checks before anything is sent: of arguments, and of the calls of other ranks."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import (
    InvalidArgumentError,
    MismatchError,
    NotInGroupError,
    check_collectives,
)
from scaletorch.dist import functional as F
from scaletorch.dist.building import agree
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.dist.wire import backend, checks
from scaletorch.dist.wire.checks import checking

ON = {"SCALETORCH_DIST_CHECK": "1"}


def test_the_environment_is_read_at_every_call_and_the_switch_comes_first(monkeypatch):
    found = []
    try:
        for switch, value in ((None, "1"), (False, "1"), (True, "0"), (None, "0")):
            check_collectives(switch)
            monkeypatch.setenv("SCALETORCH_DIST_CHECK", value)
            found.append(checking())
    finally:
        check_collectives(None)
    assert found == [True, False, True, False]
    with pytest.raises(InvalidArgumentError, match="True, False or None, got 'no'"):
        check_collectives("no")


def x(*shape):
    return torch.ones(shape)


# What rank 0 does | what rank 1 does | what both errors say.
DIFFERENT = {
    "shape": (lambda: dist.all_reduce(x(2)), lambda: dist.all_reduce(x(3)),
     r"rank 0: all_reduce\(float32\[2\], sum.*rank 1: all_reduce\(float32\[3\]"),
    "dtype": (lambda: dist.all_gather(x(2)), lambda: dist.all_gather(x(2).int()),
     "float32.*int32"),
    "op": (lambda: dist.all_reduce(x(2)), lambda: dist.all_reduce(x(2), "max"), "sum.*max"),
    "root": (lambda: dist.broadcast(x(2)), lambda: dist.broadcast(x(2), 1), "src=0.*src=1"),
    "call": (lambda: dist.all_reduce(x(2)), lambda: dist.gather(x(2)), r"all_reduce\(.*gather\("),
    "reduce_scatter": (lambda: dist.reduce_scatter(x(2), [x(2), x(3)]),
     lambda: dist.reduce_scatter(x(2), [x(2), x(2)]), r"\[float32\[2\], float32\[3\]\]"),
    "lists": (lambda: dist.all_to_all([x(1), x(2)], [x(1), x(1)]),
     lambda: dist.all_to_all([x(3), x(1)], [x(2), x(1)]),
     "rank 1 sends 12 bytes to rank 0, which expects 4"),
    "objects": (lambda: dist.all_gather_object(1), lambda: dist.broadcast_object_list([1]),
     "all_gather_object.*broadcast_object_list"),
    "dict op": (lambda: dist.all_reduce_dict({"a": x(1)}, "min"),
     lambda: dist.all_reduce_dict({"a": x(1)}, "MEAN"), "min.*mean"),
    "elements of parameters": (lambda: dist.all_reduce_params([x(4), x(2)]),
     lambda: dist.all_reduce_params([x(4), x(3)]),
     r"\[float32\[4\], float32\[2\]\].*\[float32\[4\], float32\[3\]\]"),
    "functional": (lambda: F.all_gather(x(2, 2), 0), lambda: F.all_gather(x(2, 2), 1),
     r"functional.all_gather\(.*dim=0.*dim=1"),
}  # fmt: skip


@distributed_test(world_size=2, env=ON)
def test_different_calls_are_an_error_on_every_rank():
    for name, (first, second, text) in DIFFERENT.items():
        call = (first, second)[dist.get_rank()]
        with pytest.raises(MismatchError, match=text):
            call()
        # Nothing is left behind: the next call is right.
        data = x(3)
        dist.all_reduce(data)
        assert data.tolist() == [2] * 3, name


@distributed_test(world_size=3, env=ON)
def test_right_calls_pass():
    rank, size = dist.get_dist_info()
    wide = x(4, 2).t()
    dist.all_reduce(wide if rank else wide.contiguous())
    dist.all_gather(x(2), async_op=True).wait()
    dist.scatter(x(1), [x(1)] * size if rank == 0 else None)
    dist.all_to_all(x(size))
    sizes = list(range(1, size + 1))
    dist.all_to_all([x(rank + 1, n) for n in sizes], [x(n, rank + 1) for n in sizes])
    dist.reduce_scatter(x(rank + 1), [x(n) for n in sizes], "max")
    assert dist.all_gather_object(rank) == list(range(size))
    leaf = x(2, rank + 1).requires_grad_()
    F.all_gather(leaf, 1, sizes=sizes).sum().backward()
    right, left = (rank + 1) % size, (rank - 1) % size
    for _ in range(3):
        target = x(2)
        dist.exchange([(torch.full((2,), float(rank)), right)], [(target, left)])
        assert target.tolist() == [left] * 2
    works = [dist.isend(x(2), right, tag=3), dist.irecv(x(2), left, tag=3)]
    for work in works:
        work.wait()
        assert work.is_completed()
    pair = c10d.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x(2), group=pair)
        dist.barrier(pair)
    else:
        with pytest.raises(NotInGroupError):  # which disturbs nobody
            dist.all_reduce(x(2), group=pair)
    dist.barrier()


@distributed_test(world_size=2)
def test_the_switch_costs_one_message_a_call():
    """Every difference is found by one small message, and none is sent with the checks off."""
    data = x(2)
    own = backend.all_gather_single
    with mock.patch.object(backend, "all_gather_single", side_effect=own) as call:
        dist.all_reduce(data)
        assert not call.called
        check_collectives()
        dist.all_reduce(data)
        assert call.call_count == 1
    check_collectives(None)


@pytest.mark.parametrize("compares", [False, True])
def test_a_guard_records_calls_whether_or_not_they_are_compared(monkeypatch, compares):
    recorded, compared = [], []
    guard = SimpleNamespace(record=lambda group, call, facts: recorded.append(call))
    monkeypatch.setattr(backend, "guard", guard)
    monkeypatch.setattr(checks, "differing_texts", lambda text, group: compared.append(text))
    check_collectives(compares)
    try:
        checks.compare(SimpleNamespace(size=lambda: 2), "all_reduce", x(1))
    finally:
        check_collectives(None)
    assert recorded == ["all_reduce"]
    assert bool(compared) is compares


def disagree(lines, errors):
    rank = c10d.get_rank()
    try:
        with torch.device("meta"):  # as where a model is built
            agree("the plan", lines[rank], error=errors.get(rank))
    except (MismatchError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_a_difference_is_shown_on_every_rank():
    assert run_ranks(disagree, 3, [["a", "b"]] * 3, {}) == [None] * 3
    message, _ = run_ranks(disagree, 2, [[], [str(i) for i in range(60)]], {})
    assert message.endswith("  … and 48 lines more")
    lines = [["a", "b"], ["a", "c"], ["a", "b"]]
    for rank, message in enumerate(run_ranks(disagree, 3, lines, {})):
        assert message == (
            "MismatchError: the ranks disagree on the plan: rank 1 differs from ranks 0, 2; every "
            f"rank must be given the same (this is rank {rank})\n"
            "rank 1 (+), ranks 0, 2 (-):\n  - b\n  + c"
        )


def test_a_mistake_of_one_rank_reaches_all():
    messages = run_ranks(disagree, 2, [["a"]] * 2, {1: OSError("disk on fire")})
    assert messages == [
        "MismatchError: rank 1 cannot take part in the plan: OSError: disk on fire",
        "OSError: disk on fire",
    ]


def test_one_process_raises_its_own_error():
    agree("the plan", ["a"])
    with pytest.raises(OSError, match="disk"):
        agree("the plan", ["a"], error=OSError("disk"))
