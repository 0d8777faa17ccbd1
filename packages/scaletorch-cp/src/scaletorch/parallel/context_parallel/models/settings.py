"""How the attention of one context-parallel model works; each of its modules keeps the same.

It lies on the modules, so a deep copy of the model gets settings of its own, and it is not
bound to a thread: recomputation may run in another than the forward did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..attention import Asked, attend
from ..cp_comms import Ring
from ..layouts.layout import Layout, named_layout
from ..layouts.sharding import is_padded, note_order, order_of_shards
from ..masks.documents import Documents

_OUTSIDE = -1  # the id of no backward
_CALL = "attention of a model that apply_context_parallel was given"
_NAME = "_scaletorch_context_parallel"


class Told(NamedTuple):
    """The batch that a model is told to attend by."""

    layout: Layout
    documents: Documents  # (0, length) if it is one


class Settings:
    """How one model attends.

    Attributes:
        said: The order of shards that was said for the model, a name of `LAYOUTS`, or None.
        method: Name of the method.
        ring: The ranks.
        told: The batch that holds at present, if a caller told one.
        must_attend: Whether a forward without attention is refused: nothing else finds one that
            the model computes itself, but for a rehearsal.
    """

    def __init__(self, said: str | None, method: str, ring: Ring) -> None:
        """Begin with no batch told."""
        self.said = said
        self.method = method
        self.ring = ring
        self.told: Told | None = None
        self.must_attend = True
        self._of_backward: tuple[int, Told | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        """Return the settings of a copy of the model: process groups are not copied."""
        return Settings(self.said, self.method, self.ring)

    @property
    def active(self) -> bool:
        """Whether attention is ours: on one rank the model's own is the same but for a batch."""
        return self.ring.size > 1 or self.told is not None

    @property
    def layout(self) -> str:
        """The order of the shards that the model is called with, compared with the said one.

        Raises:
            InvalidArgumentError: It is another one than was said, or cannot be known.
        """
        found = order_of_shards(self.said, self.ring, _CALL, takes=True, otherwise="contiguous")
        return str(found)

    def begin_backward(self, told: Told | None) -> None:
        """Note by which batch the forward attended whose backward begins."""
        self._of_backward = torch._C._current_graph_task_id(), told

    def require_told_alike(self) -> None:
        """Check that modules recomputed in backward attend by the batch of their forward.

        Raises:
            StateError: The backward runs outside of the `inside` that its forward ran in.
        """
        if self._of_backward is None:  # asked first: the compiler breaks its graph at the other
            return
        task = torch._C._current_graph_task_id()
        if task == _OUTSIDE:
            return
        noted, told = self._of_backward
        if noted == task and told != self.told:
            raise StateError(
                f"ShardedSequences.inside on {describe_rank()}: backward computes a part of the "
                "model again, and runs inside of other sequences than its forward, or of none; "
                "run backward within the same inside() as forward"
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        """Attend to the whole sequence as the model asks, by its method and in its order.

        Raises:
            InvalidArgumentError: Full attention over zigzag shards that may be padded, documents
                other than those told, and all that `attention` refuses.
        """
        documents: Any = asked.cu_seqlens
        if self.told is None:
            self._require_causal(asked.causal)
            layout = self._layout_of(documents, q.shape[-2])
        elif documents in (None, self.told.documents):
            layout, documents = self.told
        else:
            raise refusal(
                f"this call's cu_seq_lens_q are {documents}, and the sequences that it runs "
                f"inside of have {self.told.documents}"
            )
        asked = asked._replace(
            cu_seqlens=documents, layout=layout, method=self.method, call=_CALL,
            otherwise="contiguous",
        )  # fmt: skip
        return attend(q, k, v, asked, self.ring)

    def _layout_of(self, documents: Documents | None, part: int) -> Layout | str | None:
        """Return the order of shards of `part` positions; behind the last document is padding."""
        if documents is None:
            return self.said
        layout = named_layout(self.layout, documents[-1], self.ring.size)
        if layout.local_length != part:
            raise refusal(
                f"cu_seq_lens_q must end with the length of the whole sequence, without padding "
                f"at most {part * self.ring.size}; it ends with {documents[-1]}"
            )
        return layout

    def _require_causal(self, causal: bool) -> None:
        if not causal and self.said == "zigzag" and is_padded("zigzag", self.ring):
            raise refusal(
                "full attention would see the padding behind a sequence's end, which zigzag shards "
                f"may have. Take a length that 2 x {self.ring.size} divides, or "
                "layout='contiguous' (in parallelize cp_layout='contiguous'), or run the model "
                "within ShardedSequences.inside, which knows the padding"
            )


def note_backward(output: Any, settings: Settings) -> None:
    """Let the backward of a model's output know by which batch its forward attended."""
    if not torch.is_grad_enabled():
        return
    begun = partial(_begun, settings, settings.told)
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begun)  # a hook of the tensor could change gradients


def _begun(settings: Settings, told: Told | None, _: object) -> None:
    settings.begin_backward(told)


def settings_of(module: nn.Module) -> Settings | None:
    """Return the settings of the context-parallel model that `module` is a part of, if any."""
    found: Settings | None = module.__dict__.get(_NAME)
    return found


def expect_attention(model: nn.Module, expected: bool) -> None:
    """Say whether a forward of a context-parallel model that calls no attention is refused."""
    for settings in filter(None, map(settings_of, model.modules())):
        settings.must_attend = expected


def note_shards(model: nn.Module, layout: Layout) -> None:
    """Note the layout of the shards that a model is about to be called with.

    For batches that know their order, if others may have been sharded since over the same group.
    """
    settings = settings_of(model)
    if settings is not None:
        note_order(layout, settings.ring, "shard_global_batch", used_next=True)


def mark(model: nn.Module, settings: Settings) -> None:
    """Remember the settings on every module of `model`.

    Raises:
        StateError: A module of it has some already. Models may share one that holds nothing, as
            the first GPT of transformers shares its activation.
    """
    for name, module in model.named_modules():
        if settings_of(module) is not None and not (name and _holds_nothing(module)):
            where = f"its submodule {name}" if name else "the model"
            message = (
                f"apply_context_parallel on {describe_rank()}: {where} is context parallel "
                "already; apply it once, to the outermost model"
            )
            raise StateError(message)
    for module in model.modules():
        setattr(module, _NAME, settings)


def _holds_nothing(module: nn.Module) -> bool:
    return not (module._modules or module._parameters or module._buffers)


def unmark(model: nn.Module) -> None:
    """Forget the settings on every module of `model`."""
    for module in model.modules():
        module.__dict__.pop(_NAME, None)


@contextmanager
def telling(model: nn.Module, told: Told, ring: Ring) -> Iterator[None]:
    """Let every context-parallel part of `model` attend by one batch for a while.

    Raises:
        StateError: No part of `model` is context parallel, or it attends by another batch.
        InvalidArgumentError: The model was made context parallel over other ranks.
    """
    parts = {id(found): found for part in model.modules() if (found := settings_of(part))}
    for settings in parts.values() or [None]:
        _require_ready(settings, model, told, ring)
    before = [settings.told for settings in parts.values()]
    try:
        for settings in parts.values():
            settings.told = told
        yield
    finally:
        for settings, earlier in zip(parts.values(), before, strict=True):
            settings.told = earlier


def _require_ready(settings: Settings | None, model: nn.Module, told: Told, ring: Ring) -> None:
    where = f"ShardedSequences.inside on {describe_rank()}: {type(model).__name__}"
    if settings is None:
        message = f"{where} is not context parallel; call apply_context_parallel(model) before"
        raise StateError(message)
    if settings.told not in (None, told):
        message = f"{where} runs inside other sequences already; leave those first"
        raise StateError(message)
    if settings.ring.ranks != ring.ranks:
        message = (
            f"{where} is context parallel over ranks {settings.ring.ranks}, and the sequences "
            f"are over {ring.ranks}; give both the same group"
        )
        raise InvalidArgumentError(message)


def refusal(why: str) -> InvalidArgumentError:
    """Return the error of attention that cannot be computed over shards."""
    return InvalidArgumentError(f"context-parallel attention on {describe_rank()}: {why}")
