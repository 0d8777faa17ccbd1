"""Check how a module splits a rank's shard of the features into heads.

A module that computes `q.view(b, n, self.num_heads, -1)` with the number of heads of the whole
model makes all heads, each of half the length, on both of two ranks, and nothing fails. So the
first forward of a module follows the outputs of its column-parallel layers; when they are split, a
head must be as long as in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly, runs_compiled
from ..cuts.cut import Cut
from .surround import Surrounded, cannot_surround, own_class, own_code, surround
from .uncompiled import around_compiled, warn_unlooked

WAY_OUT = (
    "Write -1 for the number of heads and give their length, x.view(*x.shape[:-1], -1, head_dim), "
    "or divide the number in the plan: {'name of the module': Divide('num_heads')}"
)


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """The numbers of heads of the whole model that a module can read.

    Attributes:
        name: The module's name in the model.
        counts: Number -> the attribute that holds it, on modules and configs of all levels.
        near: The numbers of the nearest level that has any.
        lengths: Lengths of a head.
        groups: Numbers of groups of its group norms.
    """

    name: str
    counts: Mapping[int, str] = field(default_factory=dict)
    near: Collection[int] = ()
    lengths: Collection[int] = ()
    groups: Collection[int] = ()


class Features(NamedTuple):
    """Features of a layer that a rank has its share of.

    Attributes:
        parts: Length on this rank and in the whole; of each packed part if the layer is fused.
        layer: What messages call them.
    """

    parts: tuple[tuple[int, int], ...]
    layer: str

    @property
    def size(self) -> int:
        """Length of all on this rank."""
        return sum(local for local, _ in self.parts)

    def find(self, size: int) -> Features | None:
        """Return the neighbouring parts that are of this length together, or None."""
        count = len(self.parts)
        for first in range(count):
            for end in range(first + 1, count + 1):
                if sum(local for local, _ in self.parts[first:end]) == size:
                    return Features(self.parts[first:end], self.layer)
        return None

    def heads(self, counts: Collection[int], lengths: Collection[int] = ()) -> set[int]:
        """Return the lengths that heads have in the whole."""
        wholes = {whole // n for _, whole in self.parts for n in counts if whole % n == 0}
        return wholes | {*lengths}

    def shrunk(self, counts: Mapping[int, str]) -> dict[int, int]:
        """Return the lengths of heads if this rank's features were as many -> their number."""
        return {local // n: n for local, _ in self.parts for n in counts if local % n == 0}


def features_of(cut: Cut, rank: int, layer: str) -> Features:
    """Return the features that a layer with this cut returns, or takes, on `rank`."""
    return Features(tuple((part.sizes[rank], part.whole) for part in cut.packed), layer)


# The mode of the innermost `SplitsHeads` that looks; None outside of any.
_looking: ContextVar[_Splits | None] = ContextVar("_looking", default=None)


def note_features(x: Tensor, cut: Cut, rank: int) -> None:
    """Tell the module that looks, if any, that `x` is what a layer with this cut returned."""
    looking = _looking.get()
    if looking is not None:
        looking.note(x, features_of(cut, rank, "a column-parallel layer"))


class SplitsHeads(Surrounded):
    """A module that holds column- and row-parallel layers, whose first forward is looked at."""

    _head_counts: HeadCounts | None = None  # a slice of an nn.Sequential has none

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; refuse one that splits shares as if they were the whole."""
        if self._head_counts is not None and runs_compiled():
            warn_unlooked(f"'{self._head_counts.name}'", "whether it splits features between heads")
            del self._head_counts
        if self._head_counts is None:
            return super().forward(*args, **kwargs)
        rows: Any = (m for m in self.modules() if getattr(m, "input_is_parallel", False))
        ends = [features_of(m.cut, m.tp_rank, "a row-parallel layer") for m in rows]
        splits = _Splits(own_class(self).__name__, self._head_counts, ends)
        token = _looking.set(splits)
        try:
            with eagerly(), splits:  # compiled code calls no modes
                out = super().forward(*args, **kwargs)
        finally:
            _looking.reset(token)
        del self._head_counts  # looked at once
        return out


def look_at_splits(found: Mapping[nn.Module, HeadCounts], group: ProcessGroup | None) -> None:
    """Let modules look at how they split features, each in its first forward.

    One whose forward was replaced on the instance cannot, and a warning names it.
    """
    for module, counts in found.items():
        reason = cannot_surround(module, SplitsHeads)
        if isinstance(module, SplitsHeads):  # divided before, perhaps in part
            vars(module)["_head_counts"] = counts
        elif reason is None:
            vars(surround(module, SplitsHeads, group))["_head_counts"] = counts
        else:
            warnings.warn(
                f"'{counts.name}' ({own_class(module).__name__}) holds sharded layers, and whether "
                "it splits their features at the borders of heads was not checked: "
                f"{reason}. {WAY_OUT}",
                RuntimeWarning,
                stacklevel=2,
            )


class _Splits(TorchFunctionMode):
    """Follow features to the calls that split them, while it is on."""

    def __init__(self, kind: str, counts: HeadCounts, ends: Sequence[Features]) -> None:
        super().__init__()
        self._kind, self._counts, self._ends = kind, counts, ends
        self._told: set[tuple[int, ...]] = set()
        # Tensor -> its features, and which of its dims they are.
        self.features: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, x: Tensor, features: Features, dim: int = -1) -> None:
        """Note that a dim of `x` are features."""
        self.features[x] = features, dim % x.ndim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, and look at what it made of features."""
        kwargs = kwargs or {}
        skipped = own_code(1)  # communication has reshapes of its own
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if func in (F.group_norm, torch.group_norm):
            self._check_groups(given[0], args[1] if len(args) > 1 else kwargs["num_groups"], given)
        shapes = [tuple(x.shape) for x in given]  # some functions work in place
        out = func(*args, **kwargs)
        if not given or skipped:
            return out
        known = [(x, shape) for x, shape in zip(given, shapes, strict=True) if x in self.features]
        reshapes = getattr(func, "__name__", "") in _RESHAPES
        for made in tensors_in(out):
            if known and made.numel():
                self._follow(*known[0], made, _sizes((args[1:], kwargs)) if reshapes else None)
            elif reshapes and made.numel():
                self._merge(shapes[0], made)
        return out

    def _merge(self, before: tuple[int, ...], made: Tensor) -> None:
        """Note that heads became features again, as a row-parallel layer takes them."""
        after = tuple(made.shape)
        end = next((each for each in self._ends if after[-1:] == (each.size,)), None)
        if end is not None and len(_group(after, before, len(after) - 1)[0]) > 1:
            self.note(made, end)

    def _follow(
        self,
        x: Tensor,
        before: tuple[int, ...],
        made: Tensor,
        sizes: Sequence[int] | None,
    ) -> None:
        """Note what became of features; `sizes` are the integers that a reshape was given."""
        features, dim = self.features[x]
        after, size = tuple(made.shape), features.size
        if sizes is not None:
            self._reshaped(features, before, dim, made, sizes)
        elif _is_piece(before, after, dim) and _shares_memory(x, made):
            self._piece(features, dim, made)
        else:
            found = [place for place, length in enumerate(after) if length == size]
            if len(found) > 1 and _shares_memory(x, made):  # perhaps transposed
                found = [place for place in found if made.stride(place) == x.stride(dim)] or found
            if found:
                same = dim + len(after) - len(before)
                self.note(made, features, same if same in found else found[-1])

    def _reshaped(
        self,
        features: Features,
        before: tuple[int, ...],
        dim: int,
        made: Tensor,
        sizes: Sequence[int],
    ) -> None:
        split, alone, end = _group(before, tuple(made.shape), dim)
        part = features.find(split[-1]) if len(features.parts) > 1 else None
        if split[-1] == features.size and max(split[:-1], default=1) == 1:
            # One head, or as before: perhaps with a dim for broadcasting.
            one = len(split) > 1 and features.size in self._lengths(features)
            if not one:
                self.note(made, features, end - 1)
        elif part is not None and len(split) == 2:
            self.note(made, part, end - 1)
        elif len(split) > 1:
            self._check(features, split, sizes if alone else ())

    def _piece(self, features: Features, dim: int, made: Tensor) -> None:
        size = made.shape[dim]
        part = features.find(size)
        if part is not None:
            self.note(made, part, dim)
        else:
            self._check(features, (features.size // size, size), ())

    def _lengths(self, features: Features) -> set[int]:
        return features.heads(self._counts.near, self._counts.lengths)

    def _check(self, features: Features, split: tuple[int, ...], sizes: Sequence[int]) -> None:
        """Refuse a split after which a head has another length than in the whole.

        Args:
            features: What is split.
            split: Into what.
            sizes: The sizes that the call was given, of which one may be -1; none tells nothing.
        """
        lengths, shrunk = self._lengths(features), features.shrunk(self._counts.counts)
        if split[-1] in lengths:
            return
        if split[-1] in shrunk:
            number = shrunk[split[-1]]
            self._refuse(
                features, split, f"{self._counts.counts[number]} = {number} is the whole's"
            )
        packed = len(features.parts) > 1 and split[0] == len(features.parts)
        given = split[1:-1] if packed else split[:-1]
        if sizes and sizes[-1] == -1 and prod(given) > 1:
            self._refuse(features, split, f"the number {max(given)} that it gives is the whole's")
        within = {prod(split[place:]) for place in range(1, len(split))} & lengths
        if sizes and -1 not in sizes and not within and split not in self._told:
            self._told.add(split)
            self._warn(features, split)

    def _check_groups(self, x: Tensor, groups: int, given: Sequence[Tensor]) -> None:
        """Refuse a group norm over this rank's features in as many groups as those of the whole."""
        channels = x.shape[1]
        known = [self.features[x][0]] if x in self.features else []
        if not known and len(given) < 2:  # of features behind heads, unless it has a weight
            known = [*self._ends]
        features = next((each for each in known if each.size == channels), None)
        if features is None or channels % groups:
            return
        length, counts = channels // groups, (*self._counts.near, *self._counts.groups)
        if length not in features.heads(counts, self._counts.lengths):
            self._refuse(features, (groups, length), f"num_groups = {groups} is the whole's")

    def _refuse(self, features: Features, split: tuple[int, ...], why: str) -> None:
        raise InvalidArgumentError(f"{self._splits(features, split)}: {why}. {WAY_OUT}")

    def _warn(self, features: Features, split: tuple[int, ...]) -> None:
        text = (
            f"{self._splits(features, split)}, and no attribute of it or of the model that "
            "contains it tells how long a head is, so that it was not checked. If the first of "
            f"these numbers is the whole's, the result is wrong. {WAY_OUT}"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _splits(self, features: Features, split: tuple[int, ...]) -> str:
        whole = sum(each for _, each in features.parts)
        into = " x ".join(map(str, split))
        return (
            f"{describe_rank()}: '{self._counts.name}' ({self._kind}) splits this rank's "
            f"{features.size} of {whole} features of {features.layer} into {into}"
        )


_RESHAPES = frozenset({"view", "reshape", "unflatten", "flatten", "view_as", "reshape_as"})


def _group(
    before: Sequence[int], after: Sequence[int], dim: int
) -> tuple[tuple[int, ...], bool, int]:
    """Return which dims a reshape made of one and what that is joined with.

    And whether that is nothing, and where the dims end.
    """
    i = j = 0
    while True:
        first, start = i, j
        ours, theirs = before[i], after[j] if j < len(after) else 1
        i, j = i + 1, j + 1
        while ours != theirs:
            if ours < theirs:
                ours, i = ours * before[i], i + 1
            else:
                theirs, j = theirs * after[j], j + 1
        if i > dim:
            while after[j : j + 1] == (1,):
                j += 1
            return tuple(after[start:j]), i - first == 1, j


def _is_piece(before: Sequence[int], after: Sequence[int], dim: int) -> bool:
    """Return whether a tensor is a part of another along one dim."""
    same = len(before) == len(after) and before[:dim] == after[:dim]
    return same and before[dim + 1 :] == after[dim + 1 :] and after[dim] < before[dim]


def _sizes(given: Any) -> tuple[int, ...]:
    """Return the integers among arguments, in their order."""
    if isinstance(given, dict):
        return _sizes(tuple(given.values()))
    if isinstance(given, tuple | list):
        return tuple(size for each in given for size in _sizes(each))
    return (given,) if type(given) is int else ()


def _shares_memory(x: Tensor, made: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()
