"""Seeded faults on 2 to 8 ranks: which ones the guard finds, how it names them, and how soon.

    python -m benchmarks.guard.faults --count 340 --seed 0
    python -m benchmarks.guard.faults --count 340 --log faults.json # go on with what is not in it
    python -m benchmarks.guard.faults --seed 0 --only 17 --show     # that one again, with its text
    python -m benchmarks.guard.faults --healthy 60                  # programs without a fault

Fault k of seed s is always the same program with the same mistake. A fault is *named* if every
surviving rank raised `RankFaultError` with the guilty rank among its ranks and its coordinates in
the text; *exactly* if it was the only one (two ranks that differ cannot be told apart). Different
strides are not a mistake for us: the result must be right, and nothing may be raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import scaletorch.dist as dist
from scaletorch import guard
from scaletorch.dist import RankFailedError, RankFaultError
from scaletorch.dist.ranks import process
from scaletorch.dist.ranks.pool import RankPool

from ..harness.tables import parser, table
from .kinds import CAUSE
from .kinds import KINDS as TRAINING
from .programs import KINDS, Program, groups_of, make_program, run_steps

DEADLINE = 25.0  # s after the fault, at which a rank that has not ended counts as hung
START = 120.0  # s until the fault
PATIENCE = 1.5  # s, the guard's
ENDLESS = ("kill", "stop", "stop first", "loop", "lock", "regex")  # the guilty rank never reports
GONE = (*ENDLESS, "exception", "lines", "early", "interrupt")  # the guilty rank is no survivor

COLUMNS = ["fault", "runs", "hangs", "silent", "named", "exactly", "aborted", "p50 s", "p99 s",
           "worst s"]  # fmt: skip

Row = tuple[int, str, int, dict[str, Any]]  # number, kind, ranks, result


def body(program: Program, folder: str) -> None:
    """Run a program on one rank, and record how it ended."""
    groups = groups_of(program.size)
    rank = dist.get_rank()

    def work() -> list[float]:
        with guarded(label(rank)):
            return run_steps(program, groups, lambda: note(folder))

    write_end(folder, rank, work)


def note(folder: str) -> None:
    """Record the time of the fault."""
    _write(folder, "begun", time.time())


def guarded(name: str, patience: float = PATIENCE) -> contextlib.AbstractContextManager[None]:
    """Return the guard as a context."""
    return guard.watch(label=name, patience=patience, warn=patience / 2)


def write_end(folder: str, rank: int, work: Callable[[], list[float]]) -> None:
    """Do a rank's work, and record how it ended."""
    _write(folder, f"pid{rank}", os.getpid())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    outcome: dict[str, Any] = {}
    try:
        outcome = {"results": work(), "error": ""}
    except RankFaultError as error:
        outcome |= {"error": error.kind, "ranks": error.ranks, "text": error.text}
    except BaseException as error:
        outcome |= {"error": type(error).__name__, "ranks": (), "text": str(error)}
    outcome["time"] = time.time()
    _write(folder, f"end{rank}", outcome)
    deadline = time.time() + START + DEADLINE
    while not os.path.exists(os.path.join(folder, "over")) and time.time() < deadline:
        time.sleep(0.02)


def label(rank: int) -> str:
    """Return a rank's name with coordinates."""
    return f"rank {rank} (dp{rank // 2} tp{rank % 2})"


def _write(folder: str, name: str, value: Any) -> None:
    with open(os.path.join(folder, name + ".new"), "w") as file:
        json.dump(value, file)
    os.rename(os.path.join(folder, name + ".new"), os.path.join(folder, name))


def _read(folder: str, name: str) -> Any:
    try:
        with open(os.path.join(folder, name)) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def run(program: Program) -> dict[str, Any]:
    """Run a program on fresh ranks; return the result."""
    return run_body(body, program, _judge)


def run_body(
    body: Callable[[Any, str], None],
    program: Any,
    judge: Callable[[Any, dict[int, Any], float | None], dict[str, Any]],
    *,
    init: bool = True,
) -> dict[str, Any]:
    """Run a body, which takes a program and a folder, on fresh ranks; return the judged result."""
    with tempfile.TemporaryDirectory() as folder:
        watched = threading.Thread(target=_end_when_known, args=(program, folder))
        watched.start()
        said: dict[int, str] = {}
        process.FAILURE_GRACE = START + 2 * DEADLINE  # do not end hung ranks early
        with RankPool(program.size, timeout=START + 2 * DEADLINE, init=init) as pool:
            try:
                pool.run(body, program, folder)
            except RankFailedError as error:
                said = error.failures
        watched.join()
        ends = {rank: _read(folder, f"end{rank}") for rank in range(program.size)}
        return judge(program, ends, _read(folder, "begun")) | {"said": said}


def _end_when_known(program: Program, folder: str) -> None:
    """Wait for the ranks that can end, then release all and kill those that cannot."""
    fault = program.fault
    guilty = {fault.rank} if fault is not None and endless(fault.kind) else set()
    deadline = time.time() + START
    waited = set(range(program.size)) - guilty
    while waited and time.time() < min(deadline, _begun(folder) + DEADLINE):
        waited = {rank for rank in waited if _read(folder, f"end{rank}") is None}
        for rank in [rank for rank in waited if _is_gone(_read(folder, f"pid{rank}"))]:
            if _read(folder, f"end{rank}") is None:
                _write(folder, f"end{rank}", {"error": "aborted"})  # gloo aborted it: no survivor
        time.sleep(0.02)
    _write(folder, "over", True)
    for rank in (*guilty, *waited):
        pid = _read(folder, f"pid{rank}")
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)


def endless(kind: str) -> bool:
    """Return whether the faulty rank of a kind never reports."""
    return kind in ENDLESS or (kind in TRAINING and TRAINING[kind].endless)


def _begun(folder: str) -> float:
    return _read(folder, "begun") or float("inf")


def _is_gone(pid: int | None) -> bool:
    return pid is not None and process_state(pid) == "Z"


def process_state(pid: int) -> str:
    """Return a process's state as a letter of /proc: `T` if it is stopped, `Z` if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"
    return {"t": "T", "X": "Z", "x": "Z"}.get(state, state)


def _judge(program: Program, ends: dict[int, Any], begun: float | None) -> dict[str, Any]:
    """Return the counted properties of one run."""
    fault = program.fault
    if fault is None or fault.kind == "stride":
        errors = [end for end in ends.values() if end is None or end["error"]]
        return {"hang": any(end is None for end in ends.values()), "false": bool(errors),
                "right": not errors and _right(program, ends), "ends": ends}  # fmt: skip
    survivors = {
        rank: end
        for rank, end in ends.items()
        if fault.kind not in GONE or rank != fault.rank
        if end is None or end["error"] != "aborted"
    }

    def names(end: dict[str, Any]) -> bool:
        caused = fault.kind not in ("exception", "lines") or CAUSE in end["text"].partition("\n")[0]
        named = fault.rank in end.get("ranks", ()) and label(fault.rank) in end["text"]
        return caused and named

    counts = counted(fault.rank, survivors, names, begun)
    return counts | {
        "aborted": len(ends) - len(survivors) - (fault.kind in GONE), "ends": ends,
    }  # fmt: skip


def counted(
    guilty: int,
    survivors: dict[int, Any],
    names: Callable[[dict[str, Any]], bool],
    begun: float | None,
) -> dict[str, Any]:
    """Return what the survivors of a fault have in common; `names` judges one's error."""
    found = [end for end in survivors.values() if end is not None]
    return {
        "hang": len(found) < len(survivors),
        "silent": any(not end["error"] for end in found),
        "named": len(found) == len(survivors) and all(map(names, found)),
        "exact": all(list(end.get("ranks", ())) == [guilty] for end in found),
        "seconds": max((e["time"] for e in found if e["error"]), default=0.0) - (begun or 0.0),
    }


def _right(program: Program, ends: dict[int, Any]) -> bool:
    """Return whether every rank's all-reduces over all ranks have the right results."""
    by_rank = [ends[rank]["results"] for rank in range(program.size)]
    calls = [call for step in program.steps for call in step]
    for number, call in enumerate(calls):
        if call.name == "all_reduce" and call.group in ("world", "ep"):
            values = [rank + 1 for rank in range(program.size)]
            each = sum(values) if call.op == "sum" else max(values)
            count = 1
            for length in call.shape:
                count *= length
            if any(results[number] != float(each * count) for results in by_rank):
                return False
    return True


def campaign(count: int, run_one: Callable[[int], Row], log: str | None) -> list[Row]:
    """Run faults 0 to `count` that a log does not have yet; append each result to it at once."""
    rows: list[Row] = []
    if log is not None and os.path.exists(log):
        with open(log) as file:
            rows = [tuple(json.loads(line)) for line in file]
    known = {row[0] for row in rows}
    for number in [number for number in range(count) if number not in known]:
        rows.append(run_one(number))
        if log is not None:
            with open(log, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


def one(seed: int, number: int, show: bool) -> Row:
    """Run one fault."""
    kind = KINDS[number % len(KINDS)]
    program = make_program(seed * 1_000_003 + number, kind)
    result = run(program)
    tell(number, kind, program, result, show)
    return number, kind, program.size, result


def tell(number: int, kind: str, program: Any, result: dict[str, Any], show: bool) -> None:
    """Print the result of one run if it is not as expected, or if `show` is set."""
    good = result.get("right", result.get("named")) and not result["hang"]
    if show or not good:
        counted = {name: value for name, value in result.items() if name not in ("ends", "said")}
        print(f"{number} {kind} {program.fault} of {program.size}: {counted}", flush=True)
        for rank, end in result["ends"].items():
            text = "nothing" if end is None else f"{end['error']} {end.get('text', '')}"
            print(f"  {rank}: {text} {result['said'].get(rank, '')}", flush=True)


def show(rows: list[Row], kinds: Sequence[str] = KINDS) -> None:
    """Print the counts of each kind."""
    found = {kind: [result for _, other, _, result in rows if other == kind] for kind in kinds}
    print(table(COLUMNS, [_counts(kind, results) for kind, results in found.items() if results]))
    print(Counter(size for _, _, size, _ in rows))


def _counts(kind: str, results: list[dict[str, Any]]) -> list[object]:
    if kind == "stride":
        wrong = len(results) - _sum(results, "right")
        hangs = _sum(results, "hang")
        return ["stride (no fault: right)", len(results), hangs, f"{wrong} wrong", *[""] * 6]
    seconds = sorted(result["seconds"] for result in results)
    p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return [
        kind, len(results), *(_sum(results, name) for name in ("hang", "silent", "named", "exact")),
        sum(result["aborted"] for result in results),
        *(f"{each:.2f}" for each in (statistics.median(seconds), p99, seconds[-1])),
    ]  # fmt: skip


def _sum(results: list[dict[str, Any]], name: str) -> int:
    return sum(bool(result[name]) for result in results)


def healthy(seed: int, count: int) -> int:
    """Run programs without a fault; return the number that raised, hung or were wrong."""
    bad = 0
    for number in range(count):
        result = run(make_program(seed * 1_000_003 + number, None, steps=40))
        if not result["right"]:
            bad += 1
            print(number, result, flush=True)
    return bad


def main() -> None:
    """Parse the command line and run it."""
    command = parser(__doc__)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--count", type=int, default=340)
    command.add_argument("--log")
    command.add_argument("--only", type=int)
    command.add_argument("--show", action="store_true")
    command.add_argument("--healthy", type=int)
    options = command.parse_args()
    if options.healthy is not None:
        print(
            f"{healthy(options.seed, options.healthy)} of {options.healthy} healthy runs went bad"
        )
    elif options.only is not None:
        one(options.seed, options.only, show=True)
    else:
        show(campaign(options.count, lambda n: one(options.seed, n, options.show), options.log))


if __name__ == "__main__":
    main()
