"""Outputs of a step's actions on their way to the next: on one rank, or by messages to another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from .forms import HEADER_BYTES, NOTHING, Form, Hidden, from_header, to_header
from .posts import Parcel, Posts

Forms = dict[Hashable, dict[int, Form]]  # by signature and stage
Make = Callable[[tuple[Tensor, ...]], list[Tensor]]  # of the forms of tensors


class StageError(ScaletorchError, RuntimeError):
    """A stage on another rank raised in the middle of a step; the message has that error."""


class Key(NamedTuple):
    """The name of an output: the stage that made it, its micro-batch, whether it is a gradient."""

    stage: int
    micro_batch: int
    gradient: bool


class Message(NamedTuple):
    """An output that travels to or from another rank of the pipeline."""

    key: Key
    peer: int
    receives: bool


class Mail:
    """The outputs of one step that were made and not used yet.

    The first message of a form (from one stage, for micro-batches of one signature) comes after a
    header that tells it; from then on both sides know it. A gradient has the form of the tensors
    that it belongs to.

    Args:
        posts: How tensors travel.
        signatures: For each micro-batch the facts that its forms depend on.
        forms: The forms known so far, kept from step to step.
    """

    def __init__(self, posts: Posts, signatures: Sequence[Hashable], forms: Forms) -> None:
        self._posts = posts
        self._forms = [forms.setdefault(signature, {}) for signature in signatures]
        self._made: dict[Key, Hidden] = {}
        self._coming: dict[Key, Parcel] = {}
        # Forms that this step noted as NOTHING because a stage failed: forgotten at its end, so
        # that the next step, which may go well, sends their headers.
        self._void: list[tuple[dict[int, Form], int]] = []
        self.begun = 0  # messages so far, in the order of the program

    def put(self, key: Key, value: Hidden) -> None:
        """Keep an output until it is sent, or another stage of this rank takes it.

        Raises:
            InvalidArgumentError: It has another form than last time.
        """
        known = None if key.gradient else self._forms[key.micro_batch].get(key.stage)
        if known is not None and known is not NOTHING and Form(value) != known:
            raise InvalidArgumentError(
                f"{describe_rank()}: stage {key.stage} passes on {Form(value)}, and passed on "
                f"{known} for an earlier micro-batch whose entries had the same shapes; what it "
                "passes on may depend on the shapes and dtypes of a micro-batch's entries alone"
            )
        self._made[key] = value

    def start(self, messages: Sequence[Message]) -> None:
        """Begin to send and receive; if a form is not known yet, wait for its header."""
        for key, peer, receives in messages:
            if receives:
                self._receive(key, peer, self._empty)
            else:
                self._send(key, peer)
            self.begun += 1
        self._posts.flush()

    def skip(self, messages: Sequence[Message]) -> None:
        """Let the messages of a step that has failed pass: zeros, or word that there are none."""
        self._made.clear()
        # One for all of a form, since nobody reads them: memory may be what the step failed for.
        empty, zeros = cache(self._empty), cache(self._zeros)
        for key, peer, receives in messages:
            if receives:
                self._receive(key, peer, empty)
            else:
                self._send_nothing(key, peer, zeros)
        self._posts.flush()

    def wait(self, key: Key) -> None:
        """Wait until the output of another action is here."""
        if key in self._coming:
            works = self._coming[key].works
            while works:
                works.pop().wait()

    def finish(self) -> None:
        """Wait for all that is under way, wanted or not."""
        for key in list(self._coming):
            self.wait(key)
        self._posts.finish()
        while self._void:
            forms, stage = self._void.pop()
            del forms[stage]

    def take_hidden(self, key: Key) -> Hidden:
        """Return the output of the stage before: leaves, which require grad if its tensors did.

        Raises:
            StageError: It has failed.
        """
        parcel = self._coming.pop(key, None)
        if parcel is None:
            made = self._made.pop(key)
            # Another stage of this rank: detached, so that each stage has a backward of its own.
            form, tensors = Form(made), [tensor.detach() for tensor in tensors_in(made)]
        else:
            form, tensors = self._forms[key.micro_batch][key.stage], parcel.tensors
            if form is NOTHING:
                raise StageError(f"{describe_rank()}: the stage before has failed")
        if torch.is_grad_enabled():
            for tensor, each in zip(tensors, form.tensors, strict=True):
                tensor.requires_grad_(each.requires_grad)
        hidden: Hidden = form.filled(tensors)
        return hidden

    def take_gradients(self, key: Key) -> list[Tensor]:
        """Return the output of the stage behind: a gradient of each tensor that requires one."""
        parcel = self._coming.pop(key, None)
        return list(tensors_in(self._made.pop(key))) if parcel is None else parcel.tensors

    def _send(self, key: Key, peer: int) -> None:
        made = self._made.pop(key)
        if not key.gradient:  # a gradient needs no header: the other side made its form
            self._tell(key, made, peer)
        for tensor in tensors_in(made):
            self._posts.send(tensor, peer)

    def _send_nothing(self, key: Key, peer: int, make: Make) -> None:
        forms = self._forms[key.micro_batch]
        if not key.gradient and key.stage not in forms:
            self._posts.send(to_header(None).to(self._posts.device), peer)
            self._avoid(forms, key.stage)
        for tensor in make(self._due(key)):
            self._posts.send(tensor, peer)

    def _receive(self, key: Key, peer: int, make: Make) -> None:
        forms = self._forms[key.micro_batch]
        if not key.gradient and key.stage not in forms:
            form = self._header(peer)
            if form is None:
                self._avoid(forms, key.stage)
            else:
                forms[key.stage] = form
        self._coming[key] = self._posts.receive(make(self._due(key)), peer)

    def _avoid(self, forms: dict[int, Form], stage: int) -> None:
        """Let nothing travel for the rest of this step between a stage and the next."""
        forms[stage] = NOTHING
        self._void.append((forms, stage))

    def _header(self, peer: int) -> Form | None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._posts.device)
        parcel = self._posts.receive([header], peer)
        self._posts.flush()
        for work in parcel.works:
            work.wait()
        return from_header(header)

    def _tell(self, key: Key, made: Hidden, peer: int) -> None:
        if key.stage not in self._forms[key.micro_batch]:
            form = Form(made)
            self._posts.send(to_header(form).to(self._posts.device), peer)
            self._forms[key.micro_batch][key.stage] = form

    def _due(self, key: Key) -> tuple[Tensor, ...]:
        # The gradient that stage s makes is that of the output of stage s - 1.
        form = self._forms[key.micro_batch].get(key.stage - key.gradient, NOTHING)
        return form.gradients if key.gradient else form.tensors

    def _empty(self, forms: tuple[Tensor, ...]) -> list[Tensor]:
        device = self._posts.device
        return [torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms]

    def _zeros(self, forms: tuple[Tensor, ...]) -> list[Tensor]:
        return [tensor.zero_() for tensor in self._empty(forms)]
