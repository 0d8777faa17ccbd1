"""The attention settings of one context-parallel model; each of its modules holds the same object.

The settings are stored on the modules, so a deep copy of the model gets its own. They are not bound
to a thread: recomputation may run in another thread than the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..attention import Request, attend, require_agreement
from ..cp_comms import Ring
from ..layouts import Layout, named_layout
from ..masks import Documents
from ..sharding import may_be_padded, record_layout, record_padding, resolve_layout

_CALL = "attention of a model that apply_context_parallel was given"
_NAME = "_scaletorch_context_parallel"


class ActiveBatch(NamedTuple):
    """The batch that a model is running on."""

    layout: Layout
    documents: Documents  # (0, length) if there is one document


@dataclass(eq=False)
class Settings:
    """The attention settings of one model."""

    requested_layout: str | None  # a name of `LAYOUTS`
    method: str
    ring: Ring
    entered: ActiveBatch | None = None  # the batch of the innermost `inside`
    # Whether a forward without attention is refused. Only this and a rehearsal find attention that
    # a model computes itself.
    must_attend: bool = True
    _backward: tuple[int, ActiveBatch | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        """Return the settings for a copy of the model: process groups are not copied."""
        return Settings(self.requested_layout, self.method, self.ring)

    @property
    def batch(self) -> ActiveBatch | None:
        """The batch that the model is running on; that of the forward, if backward recomputes."""
        if self._backward is not None:  # checked first: the compiler breaks its graph at the call
            task, batch = self._backward
            if task == torch._C._current_graph_task_id():
                return batch
        return self.entered

    @property
    def active(self) -> bool:
        """True if attention is replaced: on one rank only inside of a batch."""
        return self.ring.size > 1 or self.batch is not None

    @property
    def layout(self) -> str:
        """The layout of the shards that the model is called with."""
        requested, ring = self.requested_layout, self.ring
        return str(resolve_layout(requested, ring, _CALL, consume=True, default="contiguous"))

    def begin_backward(self, batch: ActiveBatch | None, _grads: object) -> None:
        """Record the batch of the forward whose backward begins."""
        self._backward = torch._C._current_graph_task_id(), batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        """Attend to the whole sequence by the model's method and layout."""
        try:
            layout, documents = self._layout_and_documents(request, q.shape[-2])
        except Exception as error:  # perhaps on this rank only: the others compare their calls
            require_agreement((), q.device, self.ring, error)
            raise
        request = request._replace(
            cu_seqlens=documents, layout=layout, method=self.method, call=_CALL,
            default_layout="contiguous",
        )  # fmt: skip
        return attend(q, k, v, request, self.ring)

    def _layout_and_documents(self, request: Request, length: int) -> tuple[Any, Any]:
        """Return the layout and the documents of a call on shards of `length` positions."""
        documents: Any = request.cu_seqlens
        batch = self.batch
        if batch is not None:
            if documents in (None, batch.documents):
                return batch
            raise refusal(
                f"this call's cu_seq_lens_q are {documents}, and the sequences that the model runs "
                f"inside have {batch.documents}"
            )
        full = not request.causal and documents is None
        if full and may_be_padded(self.requested_layout, self.ring):
            raise refusal(
                "full attention would see the padding behind a sequence's end, which shards of "
                f"this group may have: take a length that 2 x {self.ring.size} divides "
                f"({self.ring.size} unless the layout is zigzag; parallelize takes "
                "cp_layout='contiguous'), or run the model within ShardedSequences.inside"
            )
        return self._shard_layout(documents, length), documents

    def _shard_layout(self, documents: Documents | None, length: int) -> Layout | str | None:
        """Return the layout of shards of `length` positions; padding follows the last document."""
        if documents is None:
            return self.requested_layout
        layout = named_layout(self.layout, documents[-1], self.ring.size)
        if layout.local_length != length:
            raise refusal(
                f"cu_seq_lens_q must end with the length of the whole sequence, without padding "
                f"at most {length * self.ring.size}; it ends with {documents[-1]}"
            )
        return layout


def note_backward(output: Any, settings: Settings) -> None:
    """Hook a model's output, so that its backward finds the batch of its forward."""
    if torch.is_grad_enabled():
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook of the tensor itself could change gradients
                tensor.grad_fn.register_prehook(partial(settings.begin_backward, settings.batch))


def settings_of(module: nn.Module) -> Settings | None:
    """Return the settings of the context-parallel model that holds `module`, or None."""
    found: Settings | None = module.__dict__.get(_NAME)
    return found


def expect_attention(model: nn.Module, expected: bool) -> None:
    """Set whether a forward of a context-parallel model that calls no attention is refused."""
    for settings in filter(None, map(settings_of, model.modules())):
        settings.must_attend = expected


def note_shards(model: nn.Module, layouts: Sequence[Layout]) -> None:
    """Record the layouts of the shards that a model is about to be called with."""
    settings = settings_of(model)
    if settings is not None:
        for layout in layouts:
            record_layout(layout, settings.ring)
        record_padding(settings.ring, any(x.padded_length > x.length for x in layouts))


def note_padding(model: nn.Module) -> None:
    """Take shards for padded, since those of other ranks are: all ranks then refuse the same."""
    settings = settings_of(model)
    if settings is not None:
        record_padding(settings.ring, True)


def require_unmarked(model: nn.Module) -> None:
    """Refuse a module that has settings already.

    Models may share a module without parameters, buffers and children, such as an activation.
    """
    for name, module in model.named_modules():
        empty = not (module._modules or module._parameters or module._buffers)
        if settings_of(module) is not None and not (name and empty):
            where = f"its submodule {name}" if name else "the model"
            raise StateError(
                f"apply_context_parallel on {describe_rank()}: {where} is context parallel "
                "already; apply it once, to the outermost model"
            )


def mark(model: nn.Module, settings: Settings) -> None:
    """Store the settings on every module of `model`."""
    for module in model.modules():
        setattr(module, _NAME, settings)


@contextmanager
def use_batch(model: nn.Module, batch: ActiveBatch, ring: Ring) -> Iterator[None]:
    """Make every context-parallel module of `model` attend within a batch in this context."""
    where = f"ShardedSequences.inside on {describe_rank()}: {type(model).__name__}"
    every = {id(found): found for each in model.modules() if (found := settings_of(each))}
    if not every:
        raise StateError(
            f"{where} is not context parallel; call apply_context_parallel(model) before"
        )
    for settings in every.values():
        if settings.entered not in (None, batch):
            raise StateError(f"{where} runs inside other sequences already; leave those first")
        if settings.ring.ranks != ring.ranks:
            raise InvalidArgumentError(
                f"{where} is context parallel over ranks {settings.ring.ranks}, and the sequences "
                f"are over {ring.ranks}; use the same group for both"
            )
    before = [settings.entered for settings in every.values()]
    try:
        for settings in every.values():
            settings.entered = batch
        yield
    finally:
        for settings, earlier in zip(every.values(), before, strict=True):
            settings.entered = earlier


def refusal(why: str) -> InvalidArgumentError:
    """Return the error for attention that cannot be computed over shards."""
    return InvalidArgumentError(f"context-parallel attention on {describe_rank()}: {why}")
