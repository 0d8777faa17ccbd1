"""What the actions of a step give each other: on one rank, and by messages between ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .forms import (
    HEADER_BYTES,
    NOTHING,
    Form,
    Hidden,
    contained,
    form_of,
    from_header,
    tensors_in,
    to_header,
)
from .posts import Parcel, Posts
from .schedules.messages import Receive, Send

Forms = dict[tuple[int, Hashable], Form]


class Key(NamedTuple):
    """What an action made: the stage that made it, of which micro-batch, a gradient or not."""

    stage: int
    micro_batch: int
    gradient: bool


class Mail:
    """What was made and not used yet, in one step.

    The first message of a form (from one stage, for micro-batches of one signature) comes after a
    header that tells it; from then on both sides know it. A gradient has the form of that which it
    is the gradient of.

    Args:
        posts: How tensors travel.
        signatures: For each micro-batch what its forms depend on.
        forms: The forms known so far, kept from step to step.
    """

    def __init__(self, posts: Posts, signatures: Sequence[Hashable], forms: Forms) -> None:
        self._posts, self._signatures, self._forms = posts, signatures, forms
        self._made: dict[Key, Hidden] = {}
        self._coming: dict[Key, Parcel] = {}
        self._void: set[tuple[int, Hashable]] = set()  # there is none to come: their stage failed
        self.begun = 0  # messages so far, in the order of the program

    def knows(self, stages: Iterable[int]) -> bool:
        """Tell whether the forms of all that these stages pass on are known."""
        keys = ((stage, each) for each in set(self._signatures) for stage in stages)
        return all(key in self._forms for key in keys)

    def put(self, key: Key, value: Hidden) -> None:
        """Keep what an action made until it is sent, or another stage of this rank takes it."""
        self._made[key] = value

    def start(self, messages: Sequence[Send | Receive]) -> None:
        """Begin to send and receive; where a form is not known yet, wait for its header.

        Raises:
            InvalidArgumentError: What is to be sent has another form than last time.
        """
        for message in messages:
            key = Key(message.stage, message.micro_batch, message.gradient)
            if isinstance(message, Receive):
                self._receive(key, message.peer)
            else:
                self._send(key, message.peer)
            self.begun += 1
        self._posts.flush()

    def skip(self, messages: Sequence[Send | Receive]) -> None:
        """Let the messages of a step that has failed pass: zeros, or word that there are none."""
        for message in messages:
            key = Key(message.stage, message.micro_batch, message.gradient)
            if isinstance(message, Receive):
                self._receive(key, message.peer)
            else:
                self._send_nothing(key, message.peer)
        self._posts.flush()

    def wait(self, key: Key) -> None:
        """Wait until what another action made is here."""
        if key in self._coming:
            works = self._coming[key].works
            while works:
                works.pop().wait()

    def finish(self) -> None:
        """Wait for all that is under way, wanted or not."""
        for key in list(self._coming):
            self.wait(key)
        self._posts.finish()

    def take_hidden(self, key: Key) -> Hidden:
        """Return what the stage before passed on: leaves that require grad where it did."""
        parcel = self._coming.pop(key, None)
        if parcel is None:
            made = self._made.pop(key)
            form, tensors = form_of(made), [tensor.detach() for tensor in tensors_in(made)]
        else:
            form, tensors = self._forms[self._form_key(key)], parcel.tensors
        if torch.is_grad_enabled():
            for tensor, each in zip(tensors, form.tensors, strict=True):
                tensor.requires_grad_(each.requires_grad)
        return contained(tensors, form)

    def take_gradients(self, key: Key) -> list[Tensor]:
        """Return what the stage behind made: gradients of all that requires one, in order."""
        parcel = self._coming.pop(key, None)
        return tensors_in(self._made.pop(key)) if parcel is None else parcel.tensors

    def _send(self, key: Key, peer: int) -> None:
        made = self._made.pop(key)
        if not key.gradient:
            self._tell(key, form_of(made), peer)
        for tensor in tensors_in(made):
            self._posts.send(tensor, peer)

    def _send_nothing(self, key: Key, peer: int) -> None:
        form_key = self._form_key(key)
        if form_key not in self._forms and form_key not in self._void:
            self._void.add(form_key)
            self._posts.send(to_header(None).to(self._posts.device), peer)
        for tensor in self._buffers(key):
            self._posts.send(tensor.zero_(), peer)

    def _receive(self, key: Key, peer: int) -> None:
        if not key.gradient:
            self._learn(self._form_key(key), peer)
        self._coming[key] = self._posts.receive(self._buffers(key), peer)

    def _learn(self, form_key: tuple[int, Hashable], peer: int) -> None:
        if form_key in self._forms or form_key in self._void:
            return
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._posts.device)
        parcel = self._posts.receive([header], peer)
        self._posts.flush()
        for work in parcel.works:
            work.wait()
        form = from_header(header)
        if form is None:
            self._void.add(form_key)
        else:
            self._forms[form_key] = form

    def _tell(self, key: Key, form: Form, peer: int) -> None:
        known = self._forms.setdefault(self._form_key(key), form)
        if known is form:
            self._posts.send(to_header(form).to(self._posts.device), peer)
        elif known != form:
            raise InvalidArgumentError(
                f"{describe_rank()}: stage {key.stage} passes on {form}, and passed on {known} for "
                "an earlier micro-batch whose entries had the same shapes; what it passes on may "
                "depend on the shapes and dtypes of a micro-batch's entries alone"
            )

    def _form_key(self, key: Key) -> tuple[int, Hashable]:
        return key.stage - key.gradient, self._signatures[key.micro_batch]

    def _buffers(self, key: Key) -> list[Tensor]:
        form = self._forms.get(self._form_key(key), NOTHING)
        forms = form.gradients if key.gradient else form.tensors
        return [torch.empty(f.shape, dtype=f.dtype, device=self._posts.device) for f in forms]
