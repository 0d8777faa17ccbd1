"""The hunt: measure once, then judge drawn mutants, several at a time; it can be resumed."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from . import measure, tree
from .choose import candidates, within
from .draw import Mutant, all_places, draw
from .reasons import equivalents
from .verdict import Verdict, judge
from .worker import Worker

ROUNDS = (
    25.0,
    200.0,
)  # s of tests asked in each round; the second round is for survivors of the first

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Hunt:
    """A folder of results, and the settings of its hunt."""

    root: Path
    out: Path
    commit: str
    seed: int
    count: int
    workers: int
    niceness: int

    @property
    def results(self) -> Path:
        """The file with a line for each judged mutant and round."""
        return self.out / "results.jsonl"


def open_hunt(hunt: Hunt) -> None:
    """Create the folder, or resume in it.

    Raises:
        ValueError: It holds results of another commit or seed.
    """
    hunt.out.mkdir(parents=True, exist_ok=True)
    place = hunt.out / "hunt.json"
    own = {"commit": hunt.commit, "seed": hunt.seed}
    if place.exists() and json.loads(place.read_text()) != own:
        raise ValueError(f"{hunt.out} holds {place.read_text()}, not {own}: name another folder")
    place.write_text(json.dumps(own))


def resolve(root: Path, commit: str) -> str:
    """Return the full name of a commit."""
    words = ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read(hunt: Hunt) -> list[dict[str, Any]]:
    """Return all results so far, without a last line that a kill cut short."""
    if not hunt.results.exists():
        return []
    lines = hunt.results.read_text().split("\n")
    if lines[-1]:
        hunt.results.write_text("\n".join(lines[:-1]) + "\n" * (len(lines) > 1))
    return [json.loads(line) for line in lines[:-1]]


def go(hunt: Hunt, say: Callable[[str], None]) -> None:
    """Measure what is not measured yet, and judge what is not judged yet."""
    open_hunt(hunt)
    names = [hunt.out / f"tree-{n}" for n in range(hunt.workers)]
    folders = [tree.make(hunt.root, hunt.commit, name) for name in names]
    workers = [Worker(folder, hunt.niceness) for folder in folders]
    try:
        todo = measure.waiting(folders[0], hunt.out)
        _share(workers, todo, lambda worker, file: _measure(worker, file, hunt.out, say))
        measured = measure.load(hunt.out)
        mutants = draw(all_places(folders[0], tree.sources(folders[0])), hunt.seed, hunt.count)
        writing = threading.Lock()

        def one(worker: Worker, mutant: Mutant, turn: int) -> None:
            began = time.monotonic()
            verdict, of = _judge(worker, mutant, measured, turn)
            seconds = round(time.monotonic() - began, 1)
            line = {**mutant.data(), **verdict.data(), "of": of, "round": turn, "seconds": seconds}
            with writing, hunt.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            say(sentence(line))

        for turn in range(len(ROUNDS)):
            waiting = _waiting(read(hunt), mutants, turn)
            known = equivalents(hunt.commit, hunt.seed) if turn else {}
            waiting = [mutant for mutant in waiting if mutant.number not in known]
            _share(workers, waiting, lambda worker, mutant, turn=turn: one(worker, mutant, turn))  # type: ignore[misc]
    finally:
        for worker in workers:
            worker.close()


def _measure(worker: Worker, file: str, out: Path, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    measure.measure(worker, file, out)
    say(f"measured {file} in {time.monotonic() - began:.0f} s")


def _judge(
    worker: Worker, mutant: Mutant, measured: measure.Measured, turn: int
) -> tuple[Verdict, int]:
    """Run the tests of one round; return the verdict, and how many tests run the place at all."""
    tests = candidates(mutant.place, measured)
    if not tests:
        return Verdict("not run"), 0
    before = within(tests, measured, ROUNDS[turn - 1]) if turn else []
    own = within(tests, measured, ROUNDS[turn])[len(before) :]
    verdict = judge(worker, mutant, own, measured) if own else Verdict("survived")
    return replace(verdict, asked=len(before) + verdict.asked), len(tests)


def _waiting(results: list[dict[str, Any]], mutants: list[Mutant], turn: int) -> list[Mutant]:
    """Return mutants that survived earlier rounds and are not judged in this one."""
    done = [e for e in results if e["round"] >= turn or e["verdict"] != "survived"]
    done += [each for each in results if each["asked"] == each["of"]]
    judged = {each["mutant"] for each in done}
    return [mutant for mutant in mutants if mutant.number not in judged]


def _share(
    workers: list[Worker], items: Iterable[Item], work: Callable[[Worker, Item], None]
) -> None:
    """Do the work on every item, one at a time on each worker; stop at the first error."""
    waiting: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    errors: list[BaseException] = []

    def run(worker: Worker) -> None:
        while not errors:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(worker, item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def sentence(line: dict[str, Any]) -> str:
    """Return a result as one line."""
    change = f"{line['before']!r} -> {line['after']!r}".replace("\\n", " ")
    fate = {
        "caught": f"{line['how']} {line['by']}",
        "survived": f"survived {line['asked']} of {line['of']} tests",
    }
    end = fate.get(line["verdict"], line["verdict"])
    where = f"{line['file'].split('/src/')[-1]}:{line['line']}"
    return f"{line['mutant']:>4} {where} {line['kind']} {change}: {end} ({line['seconds']} s)"
