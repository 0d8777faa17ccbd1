"""Where attention is cut: at the borders of heads, with the key/value heads that queries use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..cuts.cut import Cut, head_cuts
from ..cuts.fused import fuse
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from .plan import Match

_HEAD_LENGTHS = ("head_dim", "head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_GROUPS = "num_key_value_groups"  # query heads of each key/value head


@dataclass(frozen=True, slots=True)
class Attention:
    """A module whose query, key and value projections are columns and whose output is a row.

    Args:
        name: The module's name.
        module: The module.
        head_dim: Length of a head.
        query: Number of query heads.
        key_value: Number of key/value heads.
        lengths: Projection -> the length that is cut, of each part where it is fused.
    """

    name: str
    module: nn.Module
    head_dim: int
    query: int
    key_value: int
    lengths: Mapping[nn.Module, tuple[int, ...]]

    def cuts(self, tp_size: int) -> dict[nn.Module, Cut]:
        """Return how each projection is cut over `tp_size` ranks."""
        query, key_value = head_cuts(self.query, self.key_value, tp_size)

        def cut(length: int) -> Cut:
            count = length // self.head_dim
            heads = query if count >= self.query else key_value
            return heads.times(self.head_dim * max(1, count // self.query))

        return {layer: fuse([cut(n) for n in parts]) for layer, parts in self.lengths.items()}

    def share(self, attribute: str, value: int, tp_size: int) -> tuple[int, ...] | None:
        """Return each rank's value of a counting attribute; None where it counts no heads."""
        query, key_value = (cut.sizes for cut in head_cuts(self.query, self.key_value, tp_size))
        if attribute == _GROUPS:
            return tuple(q // kv for q, kv in zip(query, key_value, strict=True))
        # A value may be a number of heads as well as their length together: the name tells.
        units = (1, self.head_dim) if "head" in attribute else (self.head_dim, 1)
        for unit in units:
            for count, shares in ((self.query, query), (self.key_value, key_value)):
                if value == count * unit:
                    return tuple(share * unit for share in shares)
        return None

    def groups(self, tp_size: int) -> dict[str, tuple[int, ...]]:
        """Return each rank's query heads per key/value head, where the module says how many."""
        own = vars(self.module).get(_GROUPS)
        return {_GROUPS: self.share(_GROUPS, own, tp_size) or ()} if type(own) is int else {}


def find_attentions(
    model: nn.Module, matches: Sequence[Match], named: Collection[nn.Module] = ()
) -> list[Attention]:
    """Find the modules whose sharded children fit together as projections of heads.

    Args:
        model: The whole model.
        matches: What of it is sharded; every style fits its module.
        named: Modules known to be attention, whose config may tell the head's length.
    """
    layers = sharded_layers(matches)
    found = [
        _attention(name, module, layers, module in named) for name, module in model.named_modules()
    ]
    return [attention for attention in found if attention is not None]


def has_heads(module: nn.Module) -> bool:
    """Tell whether a module itself says that it works on heads."""
    return not vars(module).keys().isdisjoint((*_HEAD_LENGTHS, *_HEAD_COUNTS))


def head_length(attention: nn.Module, query_size: int, *, by_config: bool = True) -> int:
    """Return the length of a head, 0 where nothing tells it.

    Args:
        attention: The module.
        query_size: Length of all query heads together.
        by_config: Ask the module's config where the module itself does not tell.
    """
    for place in (attention, getattr(attention, "config", None) if by_config else None):
        for name in _HEAD_LENGTHS:
            length = getattr(place, name, None)
            if isinstance(length, int):
                return length
        for name in _HEAD_COUNTS:
            count = getattr(place, name, None)
            if isinstance(count, int) and count > 0:
                return query_size // count
    return 0


def sharded_layers(matches: Sequence[Match]) -> dict[nn.Module, Match]:
    """Return what becomes a sharded layer."""
    return {match.module: match for match in matches if match.layer is not None}


def is_column(match: Match) -> bool:
    """Tell a column-parallel layer whose output is a shard."""
    kind, gathers = match.layer, match.options.get("gather_output")
    return kind is not None and issubclass(kind, ColumnParallelLinear) and not gathers


def is_row(match: Match) -> bool:
    """Tell a row-parallel layer whose input is a shard."""
    kind, takes_shards = match.layer, match.options.get("input_is_parallel", True)
    return kind is not None and issubclass(kind, RowParallelLinear) and bool(takes_shards)


def _attention(
    name: str, module: nn.Module, layers: Mapping[nn.Module, Match], by_config: bool
) -> Attention | None:
    mine = [layers[child] for child in module.children() if child in layers]
    rows = [match for match in mine if is_row(match)]
    columns = [match for match in mine if is_column(match)]
    if len(rows) != 1 or not columns or len(mine) > 1 + len(columns):
        return None
    total = sum(rows[0].lengths)
    parts = [length for match in columns for length in match.lengths]
    length = head_length(module, total, by_config=by_config)
    if length < 1 or any(size % length or not size for size in (total, *parts)):
        return None
    query = total // length
    counts = {size // length for size in parts}
    key_value = min(query, *counts)
    # All are queries (some of several vectors a head) or as many keys and values.
    if query % key_value or any(c != key_value and c % query for c in counts):
        return None
    lengths = {match.module: match.lengths for match in (*columns, rows[0])}
    return Attention(name, module, length, query, key_value, lengths)
