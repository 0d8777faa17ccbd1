"""Shards of a model's sequences on the tensor-parallel ranks, and the hidden states in a call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_rank, get_world_size
from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Invariant, Partial, Replicate, Shard, convert, shard_sizes
from .surround import own_class

DIM = -2  # the dim of tokens in [..., L, H]

_OF_SHAPES = re.compile(
    r"[Ss]izes? of tensor|shape '|view size|must match|equal size|split_sizes|"
    "shapes cannot be multiplied"
)


@dataclass(slots=True)
class SequenceShares:
    """The sharding of sequences in one list of layers; they all hold the same object."""

    group: ProcessGroup | None
    length: int | None = None  # tokens of a full sequence in the last forward; None: equal shards
    batch: int = 0  # sequences in the last forward, if known
    sharing: bool = True  # hidden states are shards now; False outside of the sequence layers

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceShares:
        return replace(self)  # process groups cannot be copied: share it

    @property
    def local(self) -> int | None:
        """This rank's tokens in the last forward, or None if the length is not known."""
        return None if self.length is None else self.sizes_of(self.length)[get_rank(self.group)]

    @uncompiled
    def recall(self, hidden: Tensor | None) -> None:
        """Note this call's length at its hidden states; in backward take the length noted there.

        By then other calls, such as those of other micro-batches, have had other lengths.
        """
        if hidden is None or not torch.is_grad_enabled():
            return
        if in_backward():
            now = self.length, self.batch
            self.length, self.batch = vars(hidden).get("_sequence_length", now)
        else:
            vars(hidden)["_sequence_length"] = self.length, self.batch

    @uncompiled
    def enter(self, x: Tensor) -> Tensor:
        """All-gather a sequence shard for sharded layers; backward reduce-scatters the gradient."""
        if self.in_rows(x, self.local):
            return self.enter(x.unflatten(0, (self.batch, -1))).flatten(0, 1)
        return convert(x, Shard(DIM, self.sizes(x)), Replicate(), self.group)

    @uncompiled
    def whole(self, x: Tensor, dim: int = DIM) -> Tensor:
        """All-gather a sequence shard whose gradient is the same on every rank."""
        return convert(x, Shard(dim, self.sizes(x, dim)), Invariant(), self.group)

    def sizes(self, x: Tensor, dim: int = DIM) -> tuple[int, ...]:
        """Return the number of tokens on each rank, given this rank's shard `x`."""
        sizes = self.sizes_of(self.length or x.shape[dim] * get_world_size(self.group))
        own = sizes[get_rank(self.group)]
        if x.shape[dim] == own:
            return sizes
        way_out = "style a module that needs the whole sequence 'sequence_whole'"
        if in_backward():
            way_out = "checkpoint the whole module (attention, MLP) or the layer around it"
        raise unfit(
            f"with sequence parallelism expected this rank's {own} of {sum(sizes)} "
            f"tokens, got a tensor of shape {tuple(x.shape)}: tokens were added or dropped between "
            "the layers, are in another dim, or are the whole sequence",
            way_out,
        )

    def is_share(self, x: Tensor) -> bool:
        """Return whether `x` [..., L, H], received by a pipeline stage, is a sequence shard."""
        shard, length = self.local, self.length
        if shard is None or shard == length or not x.is_floating_point() or x.ndim < 2:
            return False
        dims = {x.shape[DIM], x.shape[1]} if x.ndim > 2 else {x.shape[DIM]}
        return shard in dims or self.in_rows(x, shard)

    @uncompiled
    def leave(self, x: Tensor) -> Tensor:
        """Reduce-scatter partial results to this rank's sequence shard."""
        if self.in_rows(x, self.length):
            # Llama 4 adds to it in place, which a view of a custom function's output forbids.
            return self.leave(x.unflatten(0, (self.batch, -1))).flatten(0, 1).clone()
        return convert(x, Partial(), Shard(DIM, self.sizes_of(x.shape[DIM])), self.group)

    def in_rows(self, x: Tensor, tokens: int | None) -> bool:
        """Return whether `x` [rows, H] has `tokens` rows for each of several sequences."""
        return tokens is not None and self.batch > 1 and x.shape[:-1] == (self.batch * tokens,)

    @uncompiled
    def split(self, x: Tensor, dim: int = DIM) -> Tensor:
        """Return this rank's sequence shard of a replicated tensor."""
        return convert(x, Invariant(), Shard(dim, self.sizes_of(x.shape[dim])), self.group)

    def sizes_of(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens on each rank for a sequence of `length` tokens."""
        size = get_world_size(self.group)
        if length < size:
            raise InvalidArgumentError(
                f"{describe_rank()}: a sequence of {length} tokens leaves some of {size} ranks "
                f"without one; sequence parallelism needs at least {size}"
            )
        return shard_sizes(length, size)


def unfit(reason: str, way_out: str = "") -> InvalidArgumentError:
    """Return the error for a call that sequence parallelism does not fit."""
    remedy = f"{way_out}, or do without" if way_out else "do without"
    return InvalidArgumentError(f"{describe_rank()}: {reason}; {remedy} sequence parallelism")


def refuse_shard(x: Tensor, lists: Collection[SequenceShares]) -> None:
    """Refuse hidden states outside of the lists of layers that are this rank's shard in one."""
    for shares in lists:
        if shares.sharing and x.ndim > 2 and x.shape[DIM] == shares.local != shares.length:
            raise unfit(
                f"outside of its list of layers came this rank's {shares.local} of {shares.length} "
                f"tokens, of shape {tuple(x.shape)}: the list's last layer was not called before",
                "style only layers that are called in turn 'sequence_layer'",
            )


@contextmanager
@around_compiled
def shapes_explained(where: str, shares: SequenceShares) -> Iterator[None]:
    """Explain shape errors of torch that sequence parallelism may have caused."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError or not _OF_SHAPES.search(str(error)):
            raise
        tokens = "" if shares.local is None else f" ({shares.local} of {shares.length})"
        reason = (
            f"something in {where} does not fit this rank's share of the tokens{tokens}, or in "
            f"attention and MLP modules of their features ({str(error).splitlines()[0]})"
        )
        way_out = "style what needs whole sequences 'sequence_whole', or what adds residuals around"
        raise unfit(reason, f"{way_out} the layers 'sequence_layer'") from error


def in_backward() -> bool:
    """Return whether autograd is running, as in activation recomputation."""
    return torch._C._current_graph_task_id() != -1


_RESIDUAL = "residual"


@cache
def _parameters(forward: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(forward).parameters][1:]


@uncompiled
def change_arguments(
    module: nn.Module,
    change: Callable[[str, Any], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the results of `change(name, value)` for the arguments of a module's own forward.

    Surplus positional ones have the name "".
    """
    by_place = map(change, chain(_parameters(own_class(module).forward), repeat("")), args)
    return tuple(by_place), {name: change(name, x) for name, x in kwargs.items()}


@uncompiled
def convert_hidden(
    module: nn.Module,
    shares: SequenceShares,
    change: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    widths: Collection[int] = (),
    join_residuals: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Convert the hidden states among a module's arguments, and count the full sequence's tokens.

    They are the first floating tensor [..., tokens, H] with H in `widths`, or any if it is empty.
    An argument called "residual" is a shard of the same sequence, converted if `join_residuals`.
    """
    kind = own_class(module).__name__
    given: list[Any] = []

    def note(name: str, x: Any) -> None:
        if name != _RESIDUAL:
            given.append(x)

    change_arguments(module, note, args, kwargs)
    floating = (x for x in given if isinstance(x, Tensor) and x.is_floating_point())
    sequences = (x for x in floating if x.ndim > 1)
    hidden = next((x for x in sequences if not widths or x.shape[-1] in widths), None)
    if hidden is None:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in((args, kwargs))) or "none"
        width = " or ".join(map(str, sorted({*widths}))) or "H"
        raise unfit(
            f"with sequence parallelism {kind} must be called with its hidden states, a floating "
            f"tensor [..., tokens, {width}], and got tensors of shapes {shapes}"
        )
    shares.recall(hidden)
    rows = shares.in_rows(hidden, shares.local)
    length = (shares.length or 0) if rows else sum(shares.sizes(hidden))
    for other in tensors_in(given):
        if other is not hidden:
            _refuse_second(kind, other, hidden, widths or {hidden.shape[-1]}, length)
    whole = change(hidden)

    def converted(name: str, x: Any) -> Any:
        if name == _RESIDUAL and not join_residuals:
            return x
        if x is hidden:
            return whole
        return change(x) if name == _RESIDUAL and isinstance(x, Tensor) else x

    return *change_arguments(module, converted, args, kwargs), length


def _refuse_second(
    kind: str, other: Tensor, hidden: Tensor, widths: Collection[int], length: int
) -> None:
    """Refuse a tensor that may be a second sequence."""
    alike = other.is_floating_point() and other.ndim == hidden.ndim
    # A full table (such as positions) without a gradient is safe.
    harmless = alike and other.shape[-2] == length and not other.requires_grad
    if alike and other.shape[-1] in widths and not harmless:
        raise unfit(
            f"{kind} was called with two sequences, of shapes {tuple(hidden.shape)} and "
            f"{tuple(other.shape)}, and the second may be whole or this rank's shard of it"
        )
