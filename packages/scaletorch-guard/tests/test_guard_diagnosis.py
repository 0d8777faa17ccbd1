"""The doctor's judgement as plain data: thousands of simulated jobs, whose messages come late."""

from __future__ import annotations

import random
from collections import deque
from typing import Any
from zlib import crc32

import pytest

from scaletorch.guard.diagnosis import diagnose, with_details
from scaletorch.guard.facts import Fault, Need, Slowness
from scaletorch.guard.messages import Answer, Bye, Message, News, Raised
from scaletorch.guard.monitor import new_picture, new_question, update

Step = tuple[str, str]  # name of a group, what is called there

FAULTS = ("skip", "extra", "other", "group", "die", "leave", "raise", "stop", "sleep")


class SimRank:
    """One rank: what it has done, and what it has told."""

    def __init__(self, rank: int, program: list[Step], groups: dict[str, tuple[int, ...]]) -> None:
        self.rank, self.program, self.groups = rank, deque(program), groups
        self.counts: dict[str, int] = {}
        self.rolling: dict[str, int] = {}
        self.marks: dict[str, list[tuple[str, int, int, int]]] = {}
        self.entries: list[list[Any]] = []
        self.wait: tuple[int, str, int, float] | None = None
        self.waits = 0
        self.end = ""
        self.asleep = 0.0
        self.stopped = False

    def key(self, name: str) -> str:
        return f"{name}:{self.groups[name][0]}"

    def call(self, now: float) -> None:
        name, what = self.program.popleft()
        key = self.key(name)
        seq = self.counts.get(key, 0)
        check = crc32(what.encode())
        self.counts[key] = seq + 1
        self.rolling[key] = (self.rolling.get(key, 0) * 1000003 ^ check) % 2**52
        if (seq + 1) % 4 == 0:
            self.marks.setdefault(key, []).append(
                (f"call {seq + 1}", seq + 1, self.rolling[key], 0)
            )
        self.entries.append([seq, check, what, "train.py:1", now, key])
        self.waits += 1
        self.wait = (self.waits, key, seq, now)

    def news(self, now: float) -> News:
        return News(
            channels={self.key(n): [n, ranks, False] for n, ranks in self.groups.items()},
            counts=dict(self.counts),
            marks={key: list(marks) for key, marks in self.marks.items()},
            step=None,
            waits=[] if self.wait is None else [[*self.wait[:3], now - self.wait[3]]],
            free=int(self.wait is None),
            foreign=False,
            last=self.entries[-1] if self.entries else [],
        )

    def answer(self, asked: float) -> Answer:
        return Answer(asked, [list(values) for values in self.entries], "here")


class SimJob:
    """A job and its monitor; `run` returns the first fault."""

    def __init__(self, seed: int, fault: str | None) -> None:
        self.draw = draw = random.Random(f"{seed} {fault}")
        shape = draw.choice(((1, 2), (2, 1), (2, 2), (3, 2), (4, 2), (2, 4)))
        self.size = shape[0] * shape[1]
        self.guilty = draw.randrange(self.size)
        self.fault = fault
        world = tuple(range(self.size))
        program = [
            (draw.choice(("world", "ep", "tp", "dp")), f"{draw.choice('abc')}") for _ in range(40)
        ]
        self.place = draw.randrange(5, 25)
        shared = ["world", "ep"] + ["tp"] * (shape[1] > 1) + ["dp"] * (shape[0] > 1)
        program[self.place] = (draw.choice(shared), program[self.place][1])
        self.ranks = []
        for rank in world:
            row, column = divmod(rank, shape[1])
            groups = {"world": world, "ep": world}
            groups["tp"] = tuple(row * shape[1] + i for i in range(shape[1]))
            groups["dp"] = tuple(i * shape[1] + column for i in range(shape[0]))
            mine = self.changed(program) if rank == self.guilty and fault else program
            self.ranks.append(SimRank(rank, mine, groups))
        self.picture = new_picture(self.size, warn=5.0, patience=15.0)
        self.mail: list[tuple[float, int, Message | None]] = []  # to the monitor, by arrival
        self.asked: list[tuple[float, int, float]] = []
        self.latest: dict[int, float] = {}
        self.slow: set[int] = set()

    def changed(self, program: list[Step]) -> list[Step]:
        before, (name, what), after = (
            program[: self.place], program[self.place], program[self.place + 1 :]
        )  # fmt: skip
        match self.fault:
            case "skip":
                return before + after
            case "extra":
                return [*before, (name, what + "x"), (name, what), *after]
            case "other":
                return [*before, (name, what + "x"), *after]
            case "group":
                return [*before, ("ep" if name == "world" else "world", what + "x"), *after]
            case "leave":
                return before
        return program

    def send(self, rank: int, message: Message | None, now: float) -> None:
        """Post a message, None for the end of the connection; those of one rank arrive in order."""
        arrival = max(now + self.draw.random() * 0.4, self.latest.get(rank, 0.0) + 1e-6)
        self.latest[rank] = arrival
        self.mail.append((arrival, rank, message))

    def run(self, until: float = 120.0) -> Fault | None:
        now = 0.0
        while now < until:
            now += 0.1
            for rank in self.draw.sample(self.ranks, self.size):
                self.advance(rank, now)
            verdict = self.monitor(now)
            if verdict is not None:
                assert with_details(verdict, self.picture)
                return verdict
            if all(rank.end for rank in self.ranks) and not self.mail:
                return None
        return None

    def advance(self, rank: SimRank, now: float) -> None:
        if rank.end or rank.stopped:
            return
        if rank.wait is not None:
            _, key, seq, _ = rank.wait
            members = rank.groups[key.partition(":")[0]]
            if all(self.ranks[r].counts.get(key, 0) > seq for r in members):
                rank.wait = None
        if rank.wait is None and rank.asleep <= now:
            if rank.rank == self.guilty and len(rank.entries) == self.place:
                self.happen(rank, now)
            if rank.end or rank.stopped or rank.asleep > now:
                return
            if not rank.program:
                rank.end = "finished"
                self.send(rank.rank, rank.news(now), now)
                self.send(rank.rank, Bye(list(rank.entries)), now)
                return
            rank.call(now)
            rank.asleep = now + self.draw.choice((0, 0, 0.1, self.draw.random()))
        if self.draw.random() < 0.5:
            self.send(rank.rank, rank.news(now), now)

    def happen(self, rank: SimRank, now: float) -> None:
        if self.fault == "die":
            rank.end = "death"
            self.send(rank.rank, None, now)
        elif self.fault == "raise":
            rank.end = "exception"
            what = "ValueError: no"
            self.send(rank.rank, Raised(what, what, list(rank.entries)), now)
        elif self.fault == "stop":
            rank.stopped = True
        elif self.fault == "sleep":
            rank.asleep = now + 1000.0

    def monitor(self, now: float) -> Fault | None:
        for at, rank, asked in [question for question in self.asked if question[0] <= now]:
            self.asked.remove((at, rank, asked))
            other = self.ranks[rank]
            if not other.end and not other.stopped:
                self.send(rank, other.news(now), now)
                self.send(rank, other.answer(asked), now)
        for mail in sorted((m for m in self.mail if m[0] <= now), key=lambda m: m[0]):
            self.mail.remove(mail)
            _, rank, message = mail
            update(self.picture, rank, message, now)
        verdict = diagnose(self.picture, now)
        if isinstance(verdict, Need):
            for rank in verdict.ranks:
                if new_question(self.picture.reports[rank], now):
                    self.asked.append((now + self.draw.random() * 0.4, rank, now))
        if isinstance(verdict, Slowness):
            self.slow |= set(verdict.ranks)
        return verdict if isinstance(verdict, Fault) else None


def test_a_rank_whose_call_is_too_old_to_be_shown_may_be_slow():
    """Its last call in the group came before all calls that it remembers."""
    picture = new_picture(2, warn=5.0, patience=15.0)
    channels = {"x": ["tp", [0, 1], False]}
    asked, now, verdict = [], 0.0, None
    while now < 60.0 and not isinstance(verdict, Fault):
        now += 0.25
        for rank, waits in enumerate(([[1, "x", 3, now]], [])):
            news = News(channels, {"x": 4 - rank}, {}, 1, waits, rank, False, [])
            update(picture, rank, news, now)
        for rank in asked:
            update(picture, rank, Answer(now, [], "here"), now)
        verdict = diagnose(picture, now)
        asked = verdict.ranks if isinstance(verdict, Need) else []
    assert (verdict.kind, verdict.ranks) == ("slow", (1,))


def test_healthy_jobs_are_never_at_fault():
    for seed in range(60):
        job = SimJob(seed, None)
        fault = job.run()
        assert fault is None, (seed, fault)
        assert all(rank.end == "finished" for rank in job.ranks), seed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_the_guilty_is_named(fault):
    exact = 0
    for seed in range(30):
        job = SimJob(seed, fault)
        found = job.run()
        assert found is not None, (seed, fault)
        assert job.guilty in found.ranks, (seed, fault, job.guilty, found)
        exact += found.ranks == (job.guilty,)
        kinds = {"die": "death", "raise": "exception", "stop": "slow", "sleep": "slow"}
        if fault in kinds:
            assert found.kind == kinds[fault], (seed, found)
            assert found.ranks == (job.guilty,), (seed, found)
        if fault == "sleep":
            assert job.slow == {job.guilty}, seed  # was shown before
    # Two ranks that differ cannot be told apart; of more the odd one is.
    assert exact > 12, exact
