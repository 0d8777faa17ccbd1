"""Divide lengths over the ranks: those of attention at head boundaries, others evenly."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import Cut, ModelView, fuse, modules_within, shard_sizes, share_cut
from ..layers.base import TensorParallelLayer
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import Bounded, HeadParameters
from ..regions.surround import own_class
from ..styles import Divide
from .plan import Match, Matches, children_of

_HEAD_LENGTHS = ("head_dim", "head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_GROUPS = "num_key_value_groups"  # query heads per key/value head
_LATENT = "kv_lora_rank"
SHARED_KEYS = "qk_rope_head_dim"  # in latent attention: length of the key that all heads share

# Names of attention modules, and substrings of their class names.
_NAMES = ("attn", "attention", "self_attn", "self_attention", "cross_attn", "linear_attn")
_OF_CLASSES = ("attention", "attn")
_OF_LAYERS = "attentionresidual"  # attends over earlier layers' outputs of the same token


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module with column-parallel projections and a row-parallel output."""

    name: str
    module: nn.Module
    head_dim: int
    query: int  # number of query heads
    key_value: int  # number of key/value heads
    lengths: Mapping[nn.Module, tuple[int, ...]]  # divided lengths of packed projections
    gated: bool = False  # one projection is a gate with one feature for each query head
    per_head: tuple[nn.Module, ...] = ()  # children with one element for each query head

    def cuts(self, tp_size: int) -> dict[nn.Module, Cut]:
        """Return the cut of each projection, and of the module's own per-head parameters."""
        query, key_value = head_cuts(self.query, self.key_value, tp_size)

        def cut(length: int) -> Cut:
            gate = self.gated and length == self.query
            if length == self.key_value * self.head_dim and not gate:
                return key_value.times(self.head_dim)
            return query.times(length // self.query)  # head lengths may differ between projections

        cuts = {layer: fuse([*map(cut, lengths)]) for layer, lengths in self.lengths.items()}
        return {**cuts, **dict.fromkeys((self.module, *self.per_head), query)}

    def share(self, attribute: str, value: int, tp_size: int) -> tuple[int, ...] | None:
        """Return each rank's value of an integer attribute, or None if it counts no heads."""
        query, key_value = (cut.sizes for cut in head_cuts(self.query, self.key_value, tp_size))
        if attribute == _GROUPS:
            return tuple(q // kv for q, kv in zip(query, key_value, strict=True))
        # The value may be a number of heads or their total length, depending on the name.
        units = (1, self.head_dim) if "head" in attribute else (self.head_dim, 1)
        for unit in units:
            for count, shares in ((self.query, query), (self.key_value, key_value)):
                if value == count * unit:
                    return tuple(share * unit for share in shares)
        return None


def head_cuts(query: int, key_value: int, size: int) -> tuple[Cut, Cut]:
    """Cut query and key/value heads so that each rank gets the key/value heads it uses."""
    groups = query // key_value
    if key_value >= size:
        key_values = share_cut(key_value, size)
        return key_values.times(groups), key_values
    replicas = shard_sizes(size, key_value)  # each rank holds one key/value head
    queries = tuple(share for number in replicas for share in shard_sizes(groups, number))
    ranks = tuple(head for head, number in enumerate(replicas) for _ in range(number))
    return Cut.of(queries), Cut.of((1,) * key_value, ranks)


def find_attentions(
    view: ModelView, matches: Matches, named: Collection[nn.Module]
) -> dict[nn.Module, Attention]:
    """Return the modules whose sharded children fit together as attention projections."""
    found = (_attention(n, m, matches, m in named) for m, n in view.names.items())
    return {attention.module: attention for attention in found if attention is not None}


def has_heads(module: nn.Module) -> bool:
    """Return whether a module has an attribute that is a head length or a number of heads."""
    return not vars(module).keys().isdisjoint((*_HEAD_LENGTHS, *_HEAD_COUNTS))


def head_length(attention: nn.Module, query_size: int, *, by_config: bool = True) -> int:
    """Return the length of a head, or 0 if it is unknown."""
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


def find_whole(view: ModelView, regions: Collection[nn.Module]) -> list[nn.Module]:
    """Return outermost attention and convolutions over tokens, with no region in or around them."""
    inside = modules_within(regions)
    found: list[nn.Module] = []
    for module, name in view.names.items():
        mixes = _attends(name, module) or _convolves(module)
        if module in inside or module is view.model or not mixes:
            continue
        inner = {*module.modules()}
        if not inside & inner:
            found.append(module)
            inside |= inner
    return found


def _attends(name: str, module: nn.Module) -> bool:
    """Return whether a module is attention by its attributes, its name or its class."""
    if isinstance(module, TensorParallelLayer):
        return False
    if next(module.children(), None) is None or next(module.parameters(), None) is None:
        return False  # a norm or dropout
    if own_class(module).forward is nn.Module.forward:  # a module list, which is never called
        return False
    kind = own_class(module).__name__.lower()
    if _OF_LAYERS in kind:
        return False
    named = name.rpartition(".")[2] in _NAMES or any(text in kind for text in _OF_CLASSES)
    return has_heads(module) or named


def _convolves(module: nn.Module) -> bool:
    """Return whether a module has a depthwise Conv1d, as state-space layers have."""
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    return any(c.kernel_size[0] > 1 and c.groups == c.in_channels > 1 for c in convolutions)


def _attention(name: str, module: nn.Module, matches: Matches, by_config: bool) -> Attention | None:
    layers = children_of(module, matches)
    rows = [match for match in layers if match.is_row]
    columns = [match for match in layers if match.is_column]
    packed = module in matches and matches[module].becomes(ParallelMultiheadAttention)
    bounded = [match for match in layers if match.becomes(Bounded)]
    if len(rows) != 1 or len(layers) > 1 + len(columns) + len(bounded) or not (columns or packed):
        return None
    total = sum(rows[0].lengths)
    sizes = [length for match in columns for length in match.lengths]
    lengths = {match.module: match.lengths for match in (*columns, rows[0])}
    numbers = (vars(module)[name] for name in _HEAD_COUNTS if name in vars(module))
    latent = next((n for n in numbers if isinstance(n, int) and n > 0), 0)
    is_latent = latent > 0 and isinstance(vars(module).get(_LATENT), int)
    if is_latent and not any(size % latent or not size for size in (total, *sizes)):
        return Attention(name, module, total // latent, latent, latent, lengths)
    length = head_length(module, total, by_config=by_config)
    if length < 1 or total < length or total % length or not all(sizes):
        return None
    query = total // length
    if any(size % length and size != query for size in sizes):  # a gate has one feature per head
        return None
    # A projection with one feature per query head is a gate if it has three or more siblings.
    gated = sizes.count(query) == 1 and len(sizes) > 3
    counts = {size // length for size in sizes if not (size % length or (gated and size == query))}
    # With grouped queries the shortest projections are keys and values.
    key_value = min(counts | {query})
    # All others are keys or values, or queries (possibly several vectors for each head).
    if query % key_value or any(c != key_value and c % query for c in counts):
        return None
    per_head = tuple(match.module for match in bounded if match.lengths == (query,))
    return Attention(name, module, length, query, key_value, lengths, gated, per_head)


# A size that is divided over the ranks: its description and its length.
Length = tuple[str, int]
Attentions = Mapping[nn.Module, Attention]


def find_lengths(
    view: ModelView,
    matches: Matches,
    attentions: Attentions,
    named: Mapping[str, nn.Module],
    tp_size: int,
) -> tuple[list[Length], list[Length]]:
    """Return the lengths that tp must divide, and the lengths that must be at least tp."""
    by_heads = {layer for a in attentions.values() for layer in (*a.lengths, *a.per_head)}
    # Layers with heads of unknown length: an uneven division might split a head.
    attending = [module for module in view.names if has_heads(module)]
    children = [match for module in attending for match in children_of(module, matches)]
    whole = {m.module for m in children if m.is_column or m.is_row} - by_heads
    divided: list[Length] = []
    shared = [(f"query heads of {a.name}", a.query) for a in attentions.values()]
    for match in matches.values():
        if match.module in by_heads:
            continue
        if match.layer is Bounded:
            [length], slices = match.lengths, match.options["own_style"].sharded.items()
            divided += [(f"{match.name}.{n}".lstrip("."), length * s.unit) for n, s in slices]
        elif match.layer is not None:
            where = f"{match.name}.{match.layer.sharded_size}".lstrip(".")
            kind = divided if match.module in whole else shared
            kind.extend((where, length) for length in match.lengths)
    unknown = [name for name, module in named.items() if module not in attentions]
    for name in unknown if tp_size > 1 else ():
        raise InvalidArgumentError(
            f"the features of the projections of '{name}' are not understood as heads: expected a "
            "head_dim, or a number of heads, on the module or its config, and query heads that are "
            "a multiple of key/value heads; pass a plan of your own"
        )
    return divided, shared


def check_lengths(divided: Sequence[Length], shared: Sequence[Length], tp_size: int) -> None:
    """Refuse a tp size that does not fit the lengths, and name sizes that do."""
    wrong = [f"{where} = {length}" for where, length in divided if length % tp_size]
    wrong += [f"{where} = {length}" for where, length in shared if length < tp_size]
    if not wrong:
        return
    most = min(length for _, length in [*shared, *divided])
    common = math.gcd(*(length for _, length in divided))
    divisors = f" that divide {common}" if common else ""
    rest = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    raise InvalidArgumentError(
        f"tp = {tp_size} does not fit {', '.join(wrong[:4])}{rest}; for this model and plan tp "
        f"sizes up to {most}{divisors} are legal"
    )


def with_cuts(matches: Matches, attentions: Attentions, tp_size: int) -> dict[nn.Module, Match]:
    """Return the matches with their cuts: at head boundaries, or as even as possible."""
    cuts = {layer: cut for a in attentions.values() for layer, cut in a.cuts(tp_size).items()}
    result = dict(matches)
    for match in (m for m in matches.values() if m.layer is not None):
        cut = cuts.get(match.module) or fuse([share_cut(n, tp_size) for n in match.lengths])
        if match.becomes(HeadParameters) or match.becomes(ParallelMultiheadAttention):
            # Their parameters may have several elements for each head.
            cut = cut.times(match.lengths[0] // cut.whole)
        result[match.module] = replace(match, cut=cut)
        # A layer that sums the ranks' outputs would count replicated heads twice.
        if cut.shared and match.layer is not None and not match.layer.replicable:
            most = min(map(len, cut.shared.values()))
            raise InvalidArgumentError(
                f"tp = {tp_size} leaves ranks without a shard of the heads of {match.place}: one "
                f"of its projections has {most} heads, which are not replicated, since the layer "
                f"sums its outputs over the ranks; tp sizes up to {most} are legal"
            )
    return result


def local_attributes(
    matches: Iterable[Match], attentions: Attentions, tp_size: int
) -> tuple[dict[nn.Module, dict[str, tuple[int, ...]]], list[Length]]:
    """Return each rank's values of changed attributes, and the values that tp must divide."""
    grouped = [a for a in attentions.values() if type(vars(a.module).get(_GROUPS)) is int]
    found = {a.module: {_GROUPS: a.share(_GROUPS, 0, tp_size) or ()} for a in grouped}
    divided: list[Length] = []
    for match in (m for m in matches if isinstance(m.style, Divide)):
        attention = attentions.get(match.module)
        shares = found.setdefault(match.module, {})
        for name in match.style.attributes:  # type: ignore[union-attr]
            value = vars(match.module)[name]
            share = attention and attention.share(name, value, tp_size)
            shares[name] = share or (value // tp_size,) * tp_size
            if share is None:  # it counts no heads
                divided.append((f"{match.name}.{name}".lstrip("."), value))
    return found, divided


def check_ties(view: ModelView, matches: Matches) -> None:
    """Refuse a tied parameter that the plan shards differently in its modules."""
    for owners in view.owners.values():
        cuts: dict[str, tuple[int | None, Cut | None]] = {}
        for module, name in owners:
            match = matches.get(module)
            cut = (None, None) if match is None else (match.dims.get(name), match.cut_of(name))
            cuts[f"{view.names[module]}.{name}".lstrip(".")] = cut
        (first, cut), *others = cuts.items()
        for name, other in others:
            if other != cut:
                raise InvalidArgumentError(
                    f"'{first}' and '{name}' are one tied parameter, but the plan "
                    f"{_sharding(*cut)} the first and {_sharding(*other)} the second; give both "
                    "modules styles that agree"
                )


def _sharding(dim: int | None, cut: Cut | None) -> str:
    sizes = "" if cut is None else f" into {', '.join(map(str, cut.sizes[:8]))}"
    return "replicates" if dim is None else f"shards along dim {dim}{sizes}"
