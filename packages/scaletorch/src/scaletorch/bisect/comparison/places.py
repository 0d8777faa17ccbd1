"""Places of ranks' shards in the full tensor, and the full tensor assembled from them.

Recordings describe the places. If they leave a place open, sizes decide; if several places fit,
values decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from ..recording.descriptions import indices_of
from ..recording.folder import Line, Recording, first_name

GIVEN, WHOLE, ALIKE = "given", "whole", "all alike"
INNER, OUTER = "equal shards of near ranks", "equal shards of far ranks"  # if not described
_PAIRS = (("rows", "positions"), ("rows", "shares"))
_TRIED = 16  # combinations of places that are tried by value
_COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's tensor of a micro-batch."""

    recording: Recording
    number: int
    micro_batch: int

    @property
    def line(self) -> Line:
        """Its line in the recording; for a second name of a tensor, the first name's line."""
        lines = self.recording.lines
        return lines[first_name(lines, self.number)]

    @property
    def is_second_name(self) -> bool:
        """True if the tensor was recorded before under another name."""
        return self.recording.lines[self.number].same >= 0

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything that its place depends on, as a key for caches."""
        line = self.line
        return self.recording.number, self.micro_batch, tuple(line.shape), repr(line.place)

    def place(self, dim: int) -> list[Any] | None:
        """Return the recorded place of a dim, see `Line.place`."""
        return None if self.line.place is None else self.line.place[dim]

    @property
    def tensor(self) -> Tensor:
        """Its values, read from the recording."""
        return self.recording.tensor(self.number)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of a tensor's dim: along an axis of length `total`."""

    name: str
    total: int


def shardings(held: Sequence[Held]) -> list[tuple[Sharding, ...]]:
    """Return the possible shardings of the dims of both runs' tensors, likeliest first."""
    key = "shardings", tuple(each.form for each in held)
    return held[0].recording.cached(key, lambda: _find_shardings(held))


def _find_shardings(held: Sequence[Held]) -> list[tuple[Sharding, ...]]:
    dims = {len(each.line.shape) for each in held}
    if len(dims) != 1:
        return []
    choices = [_choices(held, dim) for dim in range(dims.pop())]
    return sorted(islice(product(*choices), _TRIED), key=_reuses)


def _reuses(dims: tuple[Sharding, ...]) -> int:
    """Return the number of dims whose axis also shards an earlier dim; rare in practice."""
    named = [dim.name for dim in dims if dim.name not in (GIVEN, WHOLE, ALIKE)]
    return len(named) - len(set(named))


def _choices(held: Sequence[Held], dim: int) -> list[Sharding]:
    """Return the shardings of a dim that fit all shards, one of those with the same indices.

    A recorded place leaves no choice.
    """
    places = [place for each in held if (place := each.place(dim)) is not None]
    found: dict[tuple[Any, ...], Sharding] = {}
    for sharding in [Sharding(GIVEN, int(places[0][0]))] if places else _named(held, dim):
        indices = [tuple(index(each, dim, sharding).tolist()) for each in held]
        if [*map(len, indices)] == [each.line.shape[dim] for each in held]:
            found.setdefault((sharding.total, *indices), sharding)
    return list(found.values())


def _named(held: Sequence[Held], dim: int) -> Iterator[Sharding]:
    """Yield a dim's shardings by all axes that a rank describes, and without a description."""
    axes: dict[str, int] = {}
    for each in held:
        axes |= {name: total for name, (total, _) in each.recording.header["axes"].items()}
    named = [Sharding(name, total) for name, total in axes.items()]
    yield from (each for each in named if not each.name.startswith(_COLUMNS))
    for pair in _PAIRS:
        if all(name in axes for name in pair):
            yield Sharding(" x ".join(pair), axes[pair[0]] * axes[pair[1]])
    yield from (each for each in named if each.name.startswith(_COLUMNS))
    largest = max(each.line.shape[dim] for each in held)
    yield Sharding(WHOLE, largest)
    if largest > 1 and any(each.line.shape[dim] == 1 for each in held):
        yield Sharding(ALIKE, 1)
    yield from (Sharding(name, largest) for name in (INNER, OUTER))


def index(held: Held, dim: int, sharding: Sharding) -> Tensor:
    """Return a rank's indices in the full tensor along a dim; from its total on is padding."""
    key = "index", held.form, dim, sharding
    return held.recording.cached(key, lambda: _index(held, dim, sharding))


def _index(held: Held, dim: int, sharding: Sharding) -> Tensor:
    name, total = sharding.name, sharding.total
    if name == ALIKE:
        return torch.zeros(held.line.shape[dim], dtype=torch.int64)
    if name == GIVEN:
        place = held.place(dim)
        return torch.arange(total) if place is None else indices_of(place[1:])
    if name in (INNER, OUTER):
        return _equal_shard(held, held.line.shape[dim], sharding)
    axes = [_axis(held, axis) for axis in name.split(" x ")]
    described = [axis for axis in axes if axis is not None]
    if not described:
        return torch.arange(total)
    if len(axes) == 1:
        return described[0][1]
    rest = total // described[0][0]  # length of the other axis, if only one is described
    (_, rows), (length, inner) = (axis or (rest, torch.arange(rest)) for axis in axes)
    # Row-major index of (row, position). Padding positions get an index from `total` on.
    return (rows[:, None] * length + inner.where(inner < length, total)).flatten()


def _equal_shard(held: Held, length: int, sharding: Sharding) -> Tensor:
    """Return the indices of a rank's equal shard of a dim; shards are in rank order."""
    ranks, total = int(held.recording.header["world_size"]), sharding.total
    shards = total // length if length else 1
    if shards * length != total or ranks % shards:
        return torch.empty(0, dtype=torch.int64)
    rank = held.recording.rank
    shard = rank % shards if sharding.name == INNER else rank // (ranks // shards)
    return torch.arange(shard * length, (shard + 1) * length)


def _axis(held: Held, name: str) -> tuple[int, Tensor] | None:
    """Return the length of an axis and a rank's indices of it; None if it is not described."""
    axis = held.recording.header["axes"].get(name)
    if axis is None:
        return None
    total, shards = axis
    return int(total), indices_of(shards[held.micro_batch if len(shards) > 1 else 0])


def in_terms(held: Sequence[Held], dims: Sequence[Sharding]) -> bool:
    """Return whether gradients with this sharding are terms, which add up over several ranks."""
    named = {dim.name for dim in dims}
    return any(named & set(each.recording.header["shared"]) for each in held)


@dataclass(frozen=True, slots=True)
class Piece:
    """The shard of a tensor on one rank."""

    rank: int  # global rank
    micro_batch: int  # 0-based
    tensor: Tensor  # the shard's values
    index: tuple[Tensor, ...]  # for each dim its indices in the full tensor, int64 [size]


def pieces_of(
    held: Sequence[Held], dims: Sequence[Sharding], *, weighed: bool = False
) -> list[Piece]:
    """Return the ranks' shards with their indices, without padding; weighted if `weighed`."""
    found = []
    for each in held:
        tensor, places = each.tensor, []
        if weighed and (weight := each.recording.header["weight"]) not in (None, 1):
            tensor = tensor * weight
        for dim, sharding in enumerate(dims):
            place = index(each, dim, sharding)
            real = place < sharding.total
            if not bool(real.all()):
                tensor, place = tensor.index_select(dim, real.nonzero().flatten()), place[real]
            places.append(place)
        found.append(Piece(each.recording.rank, each.micro_batch, tensor, tuple(places)))
    return found


def assemble(pieces: Sequence[Piece], dims: Sequence[Sharding], *, sums: bool = False) -> Tensor:
    """Return the full tensor, NaN where no rank has it; `sums` adds up shards of the same place."""
    shape = [sharding.total for sharding in dims]
    first = pieces[0].tensor
    dtype = torch.float64 if first.is_floating_point() else first.dtype
    if len(pieces) == 1 and list(first.shape) == shape and not sums:
        return first.to(dtype)
    whole = torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point and not sums:
        whole.fill_(torch.nan)
    for piece in pieces:
        grid, values = _grid(piece), piece.tensor.to(dtype)
        if not sums:
            whole[grid] = values
        elif grid:
            whole.index_put_(grid, values, accumulate=True)
        else:
            whole += values
    return whole


def shard_at(whole: Tensor, piece: Piece) -> Tensor:
    """Return the values of the full tensor in the place of a shard."""
    return whole[_grid(piece)]


def _grid(piece: Piece) -> tuple[Tensor, ...]:
    dims = len(piece.index)
    return tuple(
        place.view([-1 if dim == own else 1 for dim in range(dims)])
        for own, place in enumerate(piece.index)
    )


def norm(tensor: Tensor) -> float:
    """Return the 2-norm of all elements."""
    return float(torch.linalg.vector_norm(tensor))
