"""Collectives of Python objects, and collecting results."""

import os
import stat
import threading
from unittest import mock

import pytest
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, NotInGroupError, StateError
from scaletorch.dist.objects import object_calls
from scaletorch.dist.testing import distributed_test, run_ranks


class Moody:
    """Pickles, but does not unpickle."""

    def __reduce__(self):
        return (int, ("no number",))


class Unspeakable:
    """Does not pickle, for a reason that has no UTF-8."""

    def __reduce__(self):
        raise ValueError("bad \udc80 text")


@distributed_test(world_size=2)
def test_the_specified_examples():
    rank = dist.get_rank()
    data = ["foo", 12, {1: 2}] if rank == 0 else [None, None, None]
    assert dist.broadcast_object_list(data) is None
    assert data == ["foo", 12, {1: 2}]
    dist.broadcast_object_list([], 1)
    assert dist.all_gather_object([{"a": 1}, {"b": 2}][rank]) == [{"a": 1}, {"b": 2}]
    assert dist.gather_object(f"data{rank}") == (["data0", "data1"] if rank == 0 else None)
    results = [f"res{rank}_1", f"res{rank}_2"]
    expected = ["res0_1", "res1_1", "res0_2", "res1_2"]
    assert dist.collect_results(results, 4, "cpu") == (expected if rank == 0 else None)


@distributed_test(world_size=3)
def test_roots_are_global_ranks_in_groups_too():
    pair = c10d.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        for call in (dist.all_gather_object, dist.gather_object):
            with pytest.raises(NotInGroupError):
                call(1, group=pair)
        return
    assert dist.gather_object(rank, 2, pair) == ([1, 2] if rank == 2 else None)
    data = [rank]
    dist.broadcast_object_list(data, 2, pair)
    assert data == [2]
    expected = [1, 2, None] if rank == 1 else None
    assert dist.collect_results([rank, None], 3, group=pair) == expected
    for call in (
        lambda: dist.gather_object(rank, group=pair),
        lambda: dist.broadcast_object_list(data, group=pair),
    ):
        with pytest.raises(NotInGroupError, match="ranks are 1, 2"):
            call()


@distributed_test(world_size=3)
def test_an_unpicklable_object_fails_on_every_rank_and_harms_nothing():
    rank = dist.get_rank()
    odd = threading.Lock() if rank == 1 else rank
    for call in (
        lambda: dist.all_gather_object(odd),
        lambda: dist.gather_object(odd),
        lambda: dist.broadcast_object_list([odd], 1),
        lambda: dist.collect_results([odd], 3),
    ):
        with pytest.raises(InvalidArgumentError, match=r"rank 1: .*cannot pickle '_thread.lock'"):
            call()
    assert dist.all_gather_object(rank) == [0, 1, 2]


@distributed_test(world_size=2)
def test_any_text_of_an_error_travels():
    with pytest.raises(InvalidArgumentError, match=r"rank 1: .*bad \\udc80 text"):
        dist.all_gather_object(Unspeakable() if dist.get_rank() else 0)


@distributed_test(world_size=3)
def test_what_does_not_unpickle_fails_on_every_rank():
    rank = dist.get_rank()
    odd = Moody() if rank == 1 else rank
    for call, where in (
        (lambda: dist.all_gather_object(odd), "rank 2"),
        (lambda: dist.gather_object(odd, 2), "rank 2"),
        (lambda: dist.broadcast_object_list([odd], 1), "rank 0"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{where}: .*ValueError: .*no number"):
            call()
    assert dist.all_gather_object(1) == [1, 1, 1]


REFUSED = (
    r"^rank 1: \S*Text is not plain, so that it would have to be pickled, which is switched off: "
    "send plain types instead .*, or allow it with {} on every rank"
)


class Text(str):
    """Pickles, but is not plain."""


@pytest.mark.parametrize("kind", ["argument", "environment", "environment of another rank"])
@distributed_test(world_size=3)
def test_pickle_can_be_switched_off(kind):
    rank = dist.get_rank()
    allow = kind != "argument"
    variable, way_out = "SCALETORCH_ALLOW_PICKLE", "allow_pickle=True"
    if allow:
        if kind == "environment" or rank == 0:
            os.environ[variable] = "0"
        way_out = f"{variable}=1"
    odd = Text("a") if rank == 1 else "b"
    for call in (
        lambda: dist.all_gather_object(odd, allow_pickle=allow),
        lambda: dist.gather_object([odd], allow_pickle=allow),
        lambda: dist.broadcast_object_list([(odd,)], 1, allow_pickle=allow),
        lambda: dist.collect_results([{"a": odd}], 3, allow_pickle=allow),
    ):
        with pytest.raises(InvalidArgumentError, match=REFUSED.format(way_out)):
            call()
    assert dist.all_gather_object({"a": [rank]}, allow_pickle=allow)[2] == {"a": [2]}
    os.environ.pop(variable, None)
    assert type(dist.all_gather_object(odd)[1]) is Text


@pytest.mark.parametrize(
    ("sizes", "pickled"),
    [((5, 200_000, 70), True), ((300_000, 5, 0), False), ((400_000, 400_000, 399_000), True)],
)
@distributed_test(world_size=3)
def test_uneven_sizes_in_pieces(sizes, pickled):
    object_calls.PIECE, whole = 100_000, object_calls.PIECE
    kind = Text if pickled else str
    texts = [kind(chr(97 + rank) * size) for rank, size in enumerate(sizes)]
    mine, rank = texts[dist.get_rank()], dist.get_rank()
    try:
        assert dist.all_gather_object(mine) == texts
        assert dist.gather_object(mine, 1) == (texts if rank == 1 else None)
        data = [mine, mine]
        dist.broadcast_object_list(data, 2)
        assert data == [texts[2], texts[2]]
        assert dist.get_rank() != 2 or data[0] is mine
    finally:
        object_calls.PIECE = whole


@distributed_test(world_size=2)
def test_lists_of_different_lengths_are_an_error_on_both():
    data = [0] * (2 + dist.get_rank())
    with pytest.raises(InvalidArgumentError, match="rank 0: 2, rank 1: 3"):
        dist.broadcast_object_list(data)
    with pytest.raises(InvalidArgumentError, match="a list in place, got tuple"):
        dist.broadcast_object_list((1, 2))


def collect(counts, size, tmpdir):
    rank = dist.get_rank()
    results = [None if i == 1 else (rank, i) for i in range(counts[rank])]
    collected = dist.collect_results(results, size, tmpdir=tmpdir)
    for device in ("gpu", "npu", "cuda", "mlu", "musa", "xpu"):
        assert dist.collect_results(results, size, device) == collected
    left = os.listdir(tmpdir) if tmpdir and os.path.isdir(tmpdir) else None
    c10d.barrier()
    return collected, left


@pytest.mark.parametrize(
    ("counts", "size", "files"),
    [((3, 2), 5, False), ((2, 3), 4, True), ((0, 0), 0, True), ((1, 1), 9, False)],
)
def test_results_are_interleaved_and_cut(tmp_path, counts, size, files):
    tmpdir = str(tmp_path / "made" / "anew") if files else None
    (collected, left), (nothing, other) = run_ranks(collect, 2, counts, size, tmpdir)
    dealt = [(rank, i) for i in range(max(counts)) for rank in range(2) if i < counts[rank]]
    assert collected == [None if sample[1] == 1 else sample for sample in dealt][:size]
    assert nothing is None
    assert left == other == ([] if files else None)


@distributed_test(world_size=2)
def test_trouble_with_files_is_an_error_on_every_rank(tmp_path):
    rank, folder, file = dist.get_rank(), str(tmp_path), tmp_path / "file"
    if rank == 0:
        file.write_text("mine")
    c10d.barrier()
    with pytest.raises(StateError, match=r"rank 1: .*cannot pickle"):
        dist.collect_results([threading.Lock() if rank else 0], 2, tmpdir=folder)
    with pytest.raises(StateError, match=r"rank 0: .*ValueError: .*no number"):
        dist.collect_results([Moody()], 2, tmpdir=folder)
    with pytest.raises(StateError, match=r"rank 1: .*Text is not plain"):
        dist.collect_results([Text("a") if rank else 0], 2, tmpdir=folder, allow_pickle=False)
    c10d.barrier()
    assert os.listdir(folder) == ["file"]
    with pytest.raises(StateError, match=r"rank 0: .*exists"):
        dist.collect_results([1], 2, tmpdir=str(file))
    assert file.read_text() == "mine"


@distributed_test(world_size=2)
def test_a_file_that_was_cut_is_an_error_on_every_rank(tmp_path):
    load = object_calls.load_object

    def load_cut(data, terms):
        if type(data) is bytes:  # of a file
            [folder] = tmp_path.iterdir()
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            data = data[:-9]
        return load(data, terms)

    with (
        mock.patch.object(object_calls, "load_object", load_cut),
        pytest.raises(StateError, match=r"rank 0: .*does not unpickle"),
    ):
        dist.collect_results([dist.get_rank()] * 99, 198, tmpdir=str(tmp_path))
    c10d.barrier()
    assert list(tmp_path.iterdir()) == []


def test_one_process():
    lock = threading.Lock()
    assert dist.all_gather_object(lock) == [lock]
    assert dist.gather_object(lock) == [lock]
    data = [lock]
    dist.broadcast_object_list(data)
    assert data == [lock]
    assert dist.collect_results([1, None, 3], 2) == [1, None]
    assert dist.collect_results([1], 4, device="gpu") == [1]
    with pytest.raises(NotInGroupError):
        dist.broadcast_object_list(data, 1)


def refuse():
    for text, arguments in {
        "needs a list of results, got tuple": ((1, 2), 2),
        "a size of 0 or more, got -1": ([], -1),
        "a size of 0 or more, got 2.0": ([], 2.0),
        "cpu, gpu, npu, cuda, mlu, musa, xpu, got 'tpu'": ([], 1, "tpu"),
        "tmpdir needs device 'cpu', got 'gpu'": ([], 1, "gpu", "/tmp"),
    }.items():
        with pytest.raises(InvalidArgumentError, match=text):
            dist.collect_results(*arguments)


@pytest.mark.parametrize("size", [0, 2])
def test_bad_arguments(size):
    run_ranks(refuse, size) if size else refuse()
