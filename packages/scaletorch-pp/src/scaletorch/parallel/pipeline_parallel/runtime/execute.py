"""The runtime: executes one rank's program, whatever the schedule and the model are.

If a stage raises in the middle of a step, every rank of the pipeline learns why: soon if there is
one pipeline, at the end of the step if there are several, since the ranks of one stage may meet
inside it (tensor parallelism, experts), and each of them has to make the calls that all make.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ....dist import all_gather, all_gather_object, get_world_size, guard
from ....dist.errors import RankFaultError
from ...pg_manager import describe_rank
from .mail import Mail, StageError
from .program import Step, Task

PERIOD = 0.2  # seconds between looks at what the others say
ANSWER = 5.0  # seconds that the store gets: the process that holds it may have stopped


def execute(
    steps: Sequence[Step],
    mail: Mail,
    run: Callable[[Task], None],
    watch: Watch,
    note: Callable[[], bool],
) -> None:
    """Start each step's messages, wait for the input of its task, and run it.

    If anything raises on any rank, all ranks raise. The messages that are left still pass,
    without contents, so that no rank waits in vain and none is left over for the next step. If a
    guard is on, it tells all ranks instead, also those outside the pipeline that wait for these.

    Raises:
        StageError: Another rank has failed.
        RankFaultError: A guard has found a fault of another rank.
    """
    running = _Running(mail, run, watch)
    try:
        running.all_of(steps)
        mail.finish()  # in the try: a last message that fails fails the step too
    except RankFaultError:  # all ranks know it, and no message of theirs comes any more
        raise
    except Exception as error:
        if not isinstance(error, StageError) and guard.tell(error):
            raise
        text = None
        with suppress(Exception):  # what has happened first is raised, whatever else fails now
            text = _let_pass(steps, mail, watch, error, running.task)
        if text is not None and isinstance(error, StageError):
            raise StageError(text) from None
        raise
    # Every rank asks at the end of every step, also if all went well here: a rank whose part was
    # done early learns of the others' failures only so, and all of them raise in the same step.
    watch.note = note()
    text = watch.settle(None)
    if text is not None:
        raise StageError(text)


@dataclass(slots=True)
class _Running:
    """The steps of a rank, as they run.

    Attributes:
        task: The one that began last, or has failed.
    """

    mail: Mail
    perform: Callable[[Task], None]
    watch: Watch
    task: Task | None = None

    def all_of(self, steps: Iterable[Step]) -> None:
        """Begin and run all steps."""
        for messages, task in steps:
            self.task = task
            if messages:
                self.mail.start(messages)
            if task is not None:
                if task.needs is not None:
                    self.mail.wait(task.needs)
                self.watch.look()
                self.perform(task)


def _let_pass(
    steps: Sequence[Step], mail: Mail, watch: Watch, error: Exception, task: Task | None
) -> str | None:
    """Let the messages that are left pass; return the message of the first rank that failed."""
    with suppress(Exception):  # the others wait for messages, whether they can be told or not
        where = "its last messages" if task is None else f"{task.action} of this step"
        watch.report(error, where)
    # Those that have begun are under way as they are; all later ones pass empty, in their order,
    # so that sends and receives still pair on both sides.
    mail.skip([message for step in steps for message in step.messages][mail.begun :])
    mail.finish()
    return watch.settle(error)


class Watch:
    """The word of a step's failure, passed among the ranks of a pipeline.

    Args:
        group: The pipeline; None in one process.
        step: A name of the step that all its ranks know, and no other step has.

    Attributes:
        note: Something that this rank tells the others at the end; then whether any rank told it.
    """

    def __init__(self, group: ProcessGroup | None, step: str) -> None:
        # Another copy of this package, vendored under its own name, may number its steps alike.
        self._group, self._key = group, f"{__name__}/{step}"
        self._store = None if group is None else _store()
        # Ranks of one stage in several pipelines hear of a failure at different tasks: one that
        # left there would miss from the calls among them, for which the others wait.
        self._alone = group is not None and get_world_size(group) == get_world_size()
        self._looked = time.monotonic()
        self._own: str | None = None
        self.note = False

    def look(self) -> None:
        """Raise if another rank has failed; they are asked at most every `PERIOD` seconds.

        Beside other pipelines nobody is asked, and `settle` tells.

        Raises:
            StageError: One has; the message is its own.
        """
        if not self._alone or time.monotonic() - self._looked < PERIOD:
            return
        self._looked = time.monotonic()
        first = self._first()
        if first is not None:
            raise StageError(first)

    def report(self, error: Exception, where: str) -> None:
        """Tell the others; the first one to do so is heard."""
        if isinstance(error, StageError):
            return
        self._own = _text(error, where)
        first = self._ask(lambda store: store.compare_set(self._key, "", self._own).decode())
        if first not in (None, self._own):  # it may have come of that, by what was missing then
            error.add_note(f"Before that, {first}")

    def settle(self, error: Exception | None) -> str | None:
        """End the step, on all ranks; return the message of the first that failed, or None."""
        if self._group is None:
            return None
        told = torch.tensor([error is not None, self.note])  # on the CPU: no queue is waited for
        failed, noted = torch.stack(all_gather(told, group=self._group)).any(0).tolist()
        self.note = noted
        if not failed:
            return None
        texts = [t for t in all_gather_object(self._own, group=self._group) if t is not None]
        return self._first() or texts[0]

    def _first(self) -> str | None:
        """Return the message of the first rank that failed, or None."""
        return self._ask(lambda s: s.get(self._key).decode() if s.check([self._key]) else None)

    def _ask(self, question: Callable[[Any], str | None]) -> str | None:
        """Ask the store; None if it does not answer, now and for the rest of the step."""
        answers: list[str | None] = []

        def ask(store: Any) -> None:
            with suppress(Exception):
                answers.append(question(store))

        if self._store is not None:
            thread = threading.Thread(target=ask, args=(self._store,), daemon=True)
            thread.start()
            thread.join(ANSWER)
            if not answers:
                self._store = None
        return answers[0] if answers else None


def _text(error: Exception, where: str) -> str:
    """Say who failed where, with the type and the message of the error from the first line on."""
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = f"{describe_rank()} failed in {where}: {name}: {error}{notes}"
    return text.encode(errors="backslashreplace").decode()  # a store takes UTF-8 alone


def _store() -> Any:
    """Return the store where all ranks meet, or None under MPI."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError:
        return None
