"""Ranks: what they return, how they fail, what they leave behind."""

import contextlib
import functools
import importlib.util
import os
import random
import shutil
import signal
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist import (
    InvalidArgumentError,
    RankFailedError,
    RankPool,
    StateError,
    get_timeout,
    launch,
)
from scaletorch.dist.ranks.process import get_server


@dataclass
class Point:
    x: int
    y: torch.Tensor


def total(start, *, factor=1):
    data = torch.tensor([float(start + factor * c10d.get_rank())])
    c10d.all_reduce(data)
    return data.item()


def move(point):
    return Point(point.x + c10d.get_rank(), point.y * 2)


def fail_on_one():
    if c10d.get_rank() == 1:
        raise ValueError("the 7th value is wrong")
    c10d.barrier()


def fail_alone_after(seconds):
    c10d.barrier()  # a busy machine starts one rank seconds after the other
    if c10d.get_rank() == 0:
        raise ValueError("first")
    time.sleep(seconds)
    raise KeyError("second")


def on_one(action, *args):
    if c10d.get_rank() == 1:
        action(*args)
    c10d.barrier()


class StubbornError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_stubborn():
    raise StubbornError("salt", "pepper")


def return_lock():
    return threading.Lock()


def draw():
    return random.random(), torch.rand(1).item()


def environment(*names):
    return [os.environ.get(name) for name in names]


def say(text):
    sys.stdout.write(f"{text} from {c10d.get_rank()}\n")


def nothing():
    return None


def leave_group():
    c10d.new_group([0, 1])


def leave_variable():
    os.environ["LEFT_BEHIND"] = "1"


def leave_grad_mode():
    torch.set_grad_enabled(False)


def test_pool_runs_functions_and_keeps_its_processes():
    with RankPool(2) as pool:
        assert pool.run(total, 1) == [3.0, 3.0]
        assert pool.run(total, 1, factor=10) == [12.0, 12.0]
        first = pool.run(os.getpid)
        assert pool.run(os.getpid) == first
        assert len({os.getpid(), *first}) == 3


def test_functions_and_values_of_any_module_travel():
    points = launch(move, 2, Point(5, torch.ones(2, dtype=torch.float64)))
    assert [point.x for point in points] == [5, 6]
    assert points[1].y.tolist() == [2.0, 2.0]
    assert points[1].y.dtype == torch.float64
    assert launch(functools.partial(total, 1, factor=2), 2) == [4.0, 4.0]
    assert launch(c10d.get_world_size, 2) == [2, 2]


def test_one_failure_names_the_rank_and_shows_where_the_others_waited():
    with pytest.raises(RankFailedError, match="the 7th value is wrong") as caught:
        launch(fail_on_one, 2)
    message = str(caught.value)
    assert message.startswith("fail_on_one on 2 ranks: rank 1 failed; rank 0 was left waiting")
    assert 'raise ValueError("the 7th value is wrong")' in message
    assert "in fail_on_one" in message.partition("rank 0 was still at")[2]
    assert caught.value.hung == (0,)
    assert isinstance(caught.value.exceptions[1], ValueError)


def test_failures_come_in_the_order_in_which_they_happened():
    with pytest.raises(RankFailedError) as caught:
        launch(fail_alone_after, 2, 0.3)
    assert list(caught.value.failures) == [0, 1]
    assert str(caught.value).index("first") < str(caught.value).index("second")


def test_a_hang_ends_at_the_deadline_with_every_stack():
    with pytest.raises(RankFailedError) as caught:
        launch(on_one, 2, time.sleep, 600, timeout=1.5)
    assert caught.value.hung == (0, 1)
    message = str(caught.value)
    assert "ranks 0, 1 had not finished after 1.5 s" in message
    assert "in barrier" in message
    assert "fork_server.py" not in message


def test_a_rank_that_crashes_says_where_its_threads_were():
    with pytest.raises(RankFailedError, match="rank 1 was killed by SIGSEGV") as caught:
        launch(on_one, 2, signal.raise_signal, int(signal.SIGSEGV))
    crash = caught.value.failures[1]
    assert "Segmentation fault" in crash
    assert "in on_one" in crash
    assert "fork_server.py" not in crash
    assert "Extension modules" not in crash
    with pytest.raises(RankFailedError, match="rank 1 was killed by SIGKILL"):
        launch(on_one, 2, signal.raise_signal, int(signal.SIGKILL))


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_exits_is_named_with_its_code(code):
    with pytest.raises(RankFailedError, match=f"rank 1 exited with code {code} before it returned"):
        launch(on_one, 2, os._exit, code)


def test_a_rank_is_named_with_its_code_where_the_disk_lost_the_pools_files():
    pool = RankPool(2)
    shutil.rmtree(Path(pool._processes[0].stack_file).parent)
    with pytest.raises(RankFailedError, match="rank 1 exited with code 3 before it"):
        pool.run(os._exit, 3)


def test_what_cannot_travel_is_named():
    with pytest.raises(RankFailedError, match="salt and pepper") as caught:
        launch(raise_stubborn, 2)
    assert caught.value.exceptions == {}
    with pytest.raises(RankFailedError, match="return_lock returned a lock that does not pickle"):
        launch(return_lock, 2)
    with pytest.raises(InvalidArgumentError, match="arguments of total do not pickle"):
        launch(total, 2, threading.Lock())  # before anything starts


def test_functions_that_ranks_cannot_find_are_refused(monkeypatch):
    def inner():
        return None

    for fn in (inner, lambda: None):
        with pytest.raises(InvalidArgumentError, match="move it to module level"):
            launch(fn, 2)
    for fn in ([].append, Point(1, torch.ones(1)).__eq__):
        with pytest.raises(InvalidArgumentError, match="module-level function"):
            launch(fn, 2)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(nothing, "__module__", "__main__")  # as typed into an interpreter
    with pytest.raises(InvalidArgumentError, match="put it in a file and import it"):
        launch(nothing, 2)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2"])
def test_bad_world_sizes_are_refused(world_size):
    for start in (RankPool, functools.partial(launch, nothing)):
        with pytest.raises(InvalidArgumentError, match="integer of at least 1"):
            start(world_size)


def test_a_failure_closes_the_pool_and_ends_its_processes():
    pool = RankPool(2)
    pids = pool.run(os.getpid)
    with pytest.raises(RankFailedError):
        pool.run(fail_on_one)
    pool.close()
    with pytest.raises(StateError, match="closed"):
        pool.run(os.getpid)
    for each in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def test_an_unknown_backend_fails_at_the_start():
    with pytest.raises(RankFailedError, match="starting on 2 ranks"):
        RankPool(2, backend="carrier-pigeon")


@pytest.mark.parametrize(
    ("function", "reusable"),
    [(os.getpid, True), (leave_group, False), (leave_variable, False), (leave_grad_mode, False)],
)
def test_a_pool_knows_whether_a_function_left_something_behind(function, reusable):
    with RankPool(2) as pool:
        pool.run(function)
        assert pool.reusable is reusable


def test_generators_start_alike_with_a_seed_and_elsewhere_without_one():
    with RankPool(2, seed=3) as pool:
        first = pool.run(draw)
        assert first[0] == first[1]
        assert pool.run(draw) == first
    own, other = launch(draw, 2)
    assert own[0] != other[0]


def test_ranks_get_the_variables_of_a_launcher(monkeypatch):
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.setenv("HIDDEN", "yes")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SEEN", "HIDDEN")
    got = launch(environment, 2, *names, "TORCHELASTIC_RUN_ID", env={"HIDDEN": None})
    assert got[1] == ["1", "1", "2", "2", "yes", None, None]
    first, second = launch(environment, 2, "MASTER_ADDR", "MASTER_PORT", init=False)
    assert first == second
    assert first[0] == "127.0.0.1"
    assert int(first[1]) > 1023


def test_ranks_of_a_launch_share_the_cores():
    assert launch(torch.get_num_threads, 2) == [max(1, (os.cpu_count() or 1) // 2)] * 2
    with RankPool(2) as pool:
        assert pool.run(torch.get_num_threads) == [1, 1]


def test_the_group_has_the_timeout_that_was_asked_for():
    timeout = timedelta(seconds=77)
    assert launch(get_timeout, 2, group_timeout=timeout) == [timeout] * 2


def test_ranks_print_where_this_process_prints(capfd):
    launch(say, 2, "hello")
    assert sorted(capfd.readouterr().out.splitlines()) == ["hello from 0", "hello from 1"]


def test_the_server_stays_single_threaded_and_pools_leave_no_files():
    with RankPool(2) as pool:
        assert pool.run(total, 0) == [1.0, 1.0]
        server = get_server()
        assert len(os.listdir(f"/proc/{server._process.pid}/task")) == 1
        assert any(name.startswith("tmp") for name in os.listdir(server.directory))
        folder = pool._processes[0].stack_file
    assert not Path(folder).parent.exists()


def test_the_fork_of_a_pools_owner_does_not_end_the_pool():
    with RankPool(1) as pool:
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(pool.run(os.getpid)) == 1


PROGRAM = """
    import os, sys, time
    import torch.distributed as c10d
    from scaletorch.dist import launch

    class Answer:
        def __init__(self):
            self.rank = c10d.get_rank()

    def work():
        return Answer()

    if __name__ == "__main__":
        print([answer.rank for answer in launch(work, 2)])
"""


def be_python(folder, *words):
    """Do what `python *words` does in a folder, in a process that has torch already."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    program = ModuleType("__main__")
    program.__spec__ = importlib.util.find_spec(words[1]) if words[0] == "-m" else None
    program.__file__ = words[0] if program.__spec__ is None else program.__spec__.origin
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program
    exec(compile(Path(program.__file__).read_text(), program.__file__, "exec"), vars(program))


def run_programs(folder):
    be_python(folder, "program.py")
    be_python(folder, "-m", "program")
    with pytest.raises(RankFailedError, match="starts ranks while a rank imports it"):
        be_python(folder, "unguarded.py")


def test_programs_launch_functions_of_their_own_below_a_main_guard(tmp_path, capfd):
    text = textwrap.dedent(PROGRAM)
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "unguarded.py").write_text(text.partition("if __name__")[0] + "launch(work, 2)")
    launch(run_programs, 1, tmp_path, init=False, timeout=200)
    assert capfd.readouterr().out == "[0, 1]\n" * 2


STUBBORN = """
    import ctypes, os, signal, sys, time
    import torch
    from scaletorch import dist

    def work():
        how = ("wait", "sleep", "ignore", "lock")[dist.get_rank()]
        sys.stdout.write(f"pid {os.getpid()}\\n")
        sys.stdout.flush()
        if how == "ignore":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if how == "lock":
            ctypes.PyDLL(None).sleep(60)
        if how == "wait":
            dist.all_reduce(torch.ones(1))
        time.sleep(60)

    if __name__ == "__main__":
        dist.launch(work, 4)
"""


def end_a_program(folder, number):
    """Fork a process that runs the program, end it by a signal, and wait for its ranks' end."""
    readable, writable = os.pipe()
    program = os.fork()
    if program == 0:
        os.dup2(writable, 1)
        with contextlib.suppress(BaseException):
            be_python(folder, "program.py")
        os._exit(0)
    os.close(writable)
    with open(readable) as said:
        pids = [int(said.readline().split()[1]) for _ in range(4)]
        os.kill(program, number)
        os.waitpid(program, 0)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{each}").exists() for each in pids):
            assert time.monotonic() < deadline, "a rank outlived its program"
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_program_that_launched_them(tmp_path, number):
    """Whatever each of them is at."""
    (tmp_path / "program.py").write_text(textwrap.dedent(STUBBORN))
    launch(end_a_program, 1, tmp_path, int(number), init=False, timeout=200)
