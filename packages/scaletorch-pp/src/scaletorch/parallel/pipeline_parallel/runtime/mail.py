"""Execution of a rank's program of a step, and outputs on their way to another stage.

If a stage raises in the middle of a step, every rank of the pipeline learns why at the end of the
step. Until then each rank keeps making its calls, since the ranks of one stage may communicate
inside it (tensor parallelism, experts).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import Work, all_gather, all_gather_object, exchange, irecv, isend
from ....dist.building import map_tensors, tell_guard, tensors_in
from ....dist.errors import InvalidArgumentError, RankFaultError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import has_streams
from ..schedules.schedule import Key, Task
from ..schedules.simulate import Message, Program, Receive
from .forms import HEADER_BYTES, NOTHING, Form, Hidden, from_header, to_header

IN_FLIGHT = 8  # at most this many sends are under way, since their tensors stay in memory
Forms = dict[Hashable, dict[int, Form]]  # by signature and stage
Make = Callable[[tuple[Tensor, ...]], list[Tensor]]  # makes tensors of these forms


class StageError(ScaletorchError, RuntimeError):
    """A stage on another rank raised in the middle of a step; the message has that error.

    Attributes:
        kind: Name of that error's class, with its module if it is not built in; "" if unknown.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def execute(
    program: Program,
    mail: Mail,
    run: Callable[[Task], None],
    group: ProcessGroup | None,
    note: Callable[[], bool],
) -> bool:
    """Start messages, wait for the input of each task, and run it.

    If anything raises on any rank, all ranks raise. The remaining messages are still sent, without
    contents, so that no rank waits forever and none is left over for the next step. If a guard is
    on, it informs all ranks instead, also those outside the pipeline that wait for this one.

    Returns:
        Whether `note` returned true on any rank, once the step has ended.
    """
    rest = deque(program)
    try:
        while rest:
            operation = rest[0]
            if isinstance(operation, Message):
                mail.start(operation)
            else:
                mail.wait(operation.needs)
                run(operation)
            rest.popleft()
        mail.finish()  # inside the try, since the step fails if a last message does
    except RankFaultError:  # all ranks know of the fault, and no more messages will come
        raise
    except Exception as error:
        if isinstance(error, StageError) or not tell_guard(error):
            _report(error, rest, mail, group)
        raise
    # A collective: every rank calls it at the end of every step, whether it failed or not.
    noted, first = _gather_failures(group, failed=False, noted=note())
    if first is not None:
        raise StageError(first.text, first.kind)
    return noted


def goes_in_batches(group: ProcessGroup | None) -> bool:
    """Return whether a group's messages are batched, because a device stream runs them."""
    return group is not None and has_streams(group)


class Parcel(NamedTuple):
    """Tensors on their way to this rank, which have arrived once all works are done."""

    works: list[Work[None]]
    tensors: list[Tensor]

    def wait(self) -> None:
        """Wait until the tensors have arrived."""
        while self.works:
            self.works.pop().wait()


class Posts:
    """Starts messages, and keeps sent tensors alive until the sends are complete.

    On the CPU each message is sent alone, and the order of receives among sends does not matter. On
    devices with streams the messages between two actions form a batch, in the order of the program,
    which is consistent over all ranks. `ranks` are the pipeline's global ranks, and tensors are
    received on `device`.
    """

    def __init__(
        self, ranks: Sequence[int], group: ProcessGroup | None, device: torch.device
    ) -> None:
        self.device = device
        self._ranks, self._group = ranks, group
        self.in_batches = goes_in_batches(group)
        self._in_flight: deque[Work[None]] = deque()  # each keeps its tensors alive
        self._batch: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]] = [], []
        self._waiting: list[Parcel] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start to send to a rank of the pipeline; in batches, the next `flush` starts it."""
        if self.in_batches:
            self._gather(0, tensor, peer)
        else:
            self._keep(isend(tensor, self._ranks[peer], self._group))

    def receive(self, tensors: list[Tensor], peer: int) -> Parcel:
        """Start to receive from a rank of the pipeline; in batches, the next `flush` starts it."""
        if not self.in_batches:
            source = self._ranks[peer]
            return Parcel([irecv(tensor, source, self._group) for tensor in tensors], tensors)
        parcel = Parcel([], tensors)
        for tensor in tensors:
            self._gather(1, tensor, peer)
            self._waiting.append(parcel)
        return parcel

    def flush(self) -> None:
        """Start the messages gathered for a batch."""
        sends, receives = self._batch
        if sends or receives:
            work = exchange(sends, receives, self._group, async_op=True)
            self._keep(work)
            for parcel in self._waiting:
                parcel.works.append(work)
            self._batch, self._waiting = ([], []), []

    def finish(self, most: int = 0) -> None:
        """Wait until at most `most` sends are under way."""
        while len(self._in_flight) > most:
            self._in_flight.popleft().wait()

    def _gather(self, side: int, tensor: Tensor, peer: int) -> None:
        """Add a message to the batch; start a new batch if this one has a message of that peer.

        Within a batch NCCL would run the second message to a rank after the first one from it,
        which may be an answer to the second: a deadlock.
        """
        if any(other == self._ranks[peer] for _, other in self._batch[side]):
            self.flush()
        self._batch[side].append((tensor, self._ranks[peer]))

    def _keep(self, work: Work[None]) -> None:
        self._in_flight.append(work)
        self.finish(IN_FLIGHT)


class Mail:
    """The outputs of one step that were made and not used yet.

    The first message from a stage for micro-batches of one signature follows a header with its
    form. From then on both sides know the form. A gradient has the form of its tensors.

    `signatures` are the facts that decide each micro-batch's forms, and `forms` those known so far,
    kept from step to step.
    """

    def __init__(self, posts: Posts, signatures: Sequence[Hashable], forms: Forms) -> None:
        self._posts = posts
        self._forms = [forms.setdefault(signature, {}) for signature in signatures]
        self._outputs: dict[Key, Hidden] = {}
        self._incoming: dict[Key, Parcel] = {}

    def may_receive_early(self, program: Program) -> bool:
        """Return whether receives may start before their turn.

        A receive of unknown form waits for a header, and a batch for the batches before it.
        """
        return not self._posts.in_batches and all(
            key.stage - key.gradient in self._forms[key.micro_batch]
            for key in (message.key for message in program if isinstance(message, Receive))
        )

    def put(self, key: Key, value: Hidden) -> None:
        """Keep an output until it is sent, or until another stage of this rank takes it."""
        known = None if key.gradient else self._forms[key.micro_batch].get(key.stage)
        if known is not None and not known.describes(value):
            raise InvalidArgumentError(
                f"{describe_rank()}: stage {key.stage} passes on {Form(value)}, and passed on "
                f"{known} for an earlier micro-batch whose entries had the same shapes; its "
                "output's form may depend only on the shapes and dtypes of a micro-batch's entries"
            )
        self._outputs[key] = value

    def start(self, message: Message) -> None:
        """Start to send or receive; in batches, the next `flush` starts it.

        A receive of unknown form first waits for the header.
        """
        if isinstance(message, Receive):
            self._receive(message.key, message.peer, self._empty)
        else:
            self._send(message.key, message.peer)

    def skip(self, messages: Iterable[Message]) -> None:
        """Complete the messages of a failed step: send zeros, or nothing if their form is new."""
        self._outputs.clear()
        # Tensors of one form share memory, since they are never read and memory may have run out.
        empty, zeros = cache(self._empty), cache(self._zeros)
        for message in messages:
            if isinstance(message, Receive):
                self._receive(message.key, message.peer, empty)
            else:
                self._outputs[message.key] = zeros(self._expected(message.key))
                self._send(message.key, message.peer)

    def wait(self, key: Key | None) -> None:
        """Start the messages gathered so far, and wait for this output if it is on its way."""
        self._posts.flush()
        if key in self._incoming:
            self._incoming[key].wait()

    def finish(self) -> None:
        """Wait for all messages under way, whether used or not."""
        self._posts.flush()
        for parcel in self._incoming.values():
            parcel.wait()
        self._posts.finish()
        for forms in self._forms:  # forget the form of a failed stage, so that it is sent again
            for stage in [stage for stage, form in forms.items() if not form.tensors]:
                del forms[stage]

    def take_hidden(self, key: Key) -> Hidden:
        """Return the previous stage's hidden states, as leaves that require grad if sent so."""
        parcel = self._incoming.pop(key, None)
        if parcel is None:
            like = self._outputs.pop(key)
            # From another stage of this rank: detached, so that each stage has its own backward.
            tensors = [tensor.detach() for tensor in tensors_in(like)]
        else:
            like, tensors = self._forms[key.micro_batch][key.stage].value, parcel.tensors
            if not tensors:
                raise StageError(f"{describe_rank()}: the previous stage has failed")
        left, grad = iter(tensors), torch.is_grad_enabled()
        hidden: Hidden = map_tensors(
            lambda known: next(left).requires_grad_(grad and known.requires_grad), like
        )
        return hidden

    def take_gradients(self, key: Key) -> list[Tensor]:
        """Return the next stage's gradients, one for each tensor that requires grad."""
        parcel = self._incoming.pop(key, None)
        return list(tensors_in(self._outputs.pop(key))) if parcel is None else parcel.tensors

    def _send(self, key: Key, peer: int) -> None:
        value, forms = self._outputs.pop(key), self._forms[key.micro_batch]
        # The receiver of a gradient knows its form: it made the tensor.
        if not key.gradient and key.stage not in forms:
            form = Form(value)
            self._posts.send(to_header(form).to(self._posts.device), peer)
            forms[key.stage] = form
        for tensor in tensors_in(value):
            self._posts.send(tensor, peer)

    def _receive(self, key: Key, peer: int, make: Make) -> None:
        forms = self._forms[key.micro_batch]
        if not key.gradient and key.stage not in forms:
            forms[key.stage] = self._header(peer)
        self._incoming[key] = self._posts.receive(make(self._expected(key)), peer)

    def _header(self, peer: int) -> Form:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._posts.device)
        parcel = self._posts.receive([header], peer)
        self._posts.flush()
        parcel.wait()
        return from_header(header)

    def _expected(self, key: Key) -> tuple[Tensor, ...]:
        # The gradient that stage s makes belongs to the output of stage s - 1.
        form = self._forms[key.micro_batch].get(key.stage - key.gradient, NOTHING)
        return form.gradients if key.gradient else form.tensors

    def _empty(self, forms: tuple[Tensor, ...]) -> list[Tensor]:
        device = self._posts.device
        return [torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms]

    def _zeros(self, forms: tuple[Tensor, ...]) -> list[Tensor]:
        return [tensor.zero_() for tensor in self._empty(forms)]


class _Failure(NamedTuple):
    """A rank's error: its time, the name of its class, and a text that names the failed task."""

    time: float
    kind: str
    text: str


def _report(error: Exception, rest: Program, mail: Mail, group: ProcessGroup | None) -> None:
    """Send and receive the remaining messages empty, and report an error to the other ranks.

    `rest` is the rest of the program, from the failed task or message.
    """
    own = None if isinstance(error, StageError) else _failure(error, rest)
    first = None
    with suppress(Exception):  # the first error is raised, whatever fails during the clean-up
        # Messages that have started finish as they are. All later ones pass empty, in their order,
        # so that sends and receives still match on both sides.
        mail.skip(message for message in rest if isinstance(message, Message))
        mail.finish()
        _, first = _gather_failures(group, failed=True, own=own)
    if first is None:
        return
    if own is None:
        raise StageError(first.text, first.kind) from None
    if first != own:  # the earlier failure may have caused this one
        error.add_note(f"Before that, {first.text}")


def _gather_failures(
    group: ProcessGroup | None,
    *,
    failed: bool,
    noted: bool = False,
    own: _Failure | None = None,
) -> tuple[bool, _Failure | None]:
    """Return whether `noted` on any rank, and the first failure or None; all ranks call it."""
    if group is None:
        return noted, None
    flags = torch.tensor([failed, noted])  # on the CPU, so that no device has to be waited for
    failed, noted = torch.stack(all_gather(flags, group=group)).any(0).tolist()
    if not failed:
        return noted, None
    failures = [one for one in all_gather_object(own, group=group) if one is not None]
    return noted, min(failures)


def _failure(error: Exception, rest: Program) -> _Failure:
    """Describe a failure: the rank, its task, and the type, message and notes of the error."""
    where = f"{rest[0]} of this step" if rest else "its last messages"
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = f"{describe_rank()} failed in {where}: {name}: {error}{notes}"
    # A message may hold characters that cannot be encoded, such as lone surrogates.
    return _Failure(time.time(), name, text.encode(errors="backslashreplace").decode())
