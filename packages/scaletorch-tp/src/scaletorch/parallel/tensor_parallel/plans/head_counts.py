"""Find the numbers and lengths of heads in the attributes of modules and of their configs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ..layers.base import TensorParallelLayer
from ..regions.head_splits import HeadCounts
from .plan import Matches

# Names of integers. A name of both kinds, as `head_dim`, is a length.
_LENGTH = re.compile(
    r"head.*(dim|size|width|len|channel|feature)|(dim|size|width|channel|feature).*head"
    r"|^d_?(head|[hkqv]|kv|qk)$|^h(ead)?_?d$",
    re.IGNORECASE,
)
_COUNT = re.compile(r"head|^n?_?h$", re.IGNORECASE)

_DEPTH = 3  # of configs within configs
_MOST = 512  # entries of a config; what has more is none


def find_splitters(model: nn.Module, matches: Matches) -> dict[nn.Module, HeadCounts]:
    """Return the smallest modules that hold column- and row-parallel layers, with their heads.

    Args:
        model: The plain model, with numbers of the whole.
        matches: What of it is sharded.
    """
    names = {module: name for name, module in model.named_modules()}
    above = {child: parent for parent in names for child in parent.children()}
    rows = {module for module, match in matches.items() if match.is_row}
    found: dict[nn.Module, HeadCounts] = {}
    told: _Told = {}
    for column in (module for module, match in matches.items() if match.is_column):
        path = [column]
        while path[-1] in above:
            path.append(above[path[-1]])
        called = [each for each in path[1:] if type(each).forward is not nn.Module.forward]
        holds = (each for each in called if not rows.isdisjoint(each.modules()))
        owner = next(holds, called[-1] if called else None)
        if owner is not None and owner not in found:
            found[owner] = _counts(owner, path[path.index(owner) + 1 :], names, told)
    return found


# What has been looked at, such as a config that all modules share, and the integers in it.
_Told = dict[tuple[int, int], tuple[Any, list[tuple[str, int]]]]


def _counts(
    owner: nn.Module, above: Collection[nn.Module], names: Mapping[nn.Module, str], told: _Told
) -> HeadCounts:
    counts: dict[int, str] = {}
    near: set[int] = set()
    lengths: set[int] = set()
    for level in ([*owner.modules()], *([each] for each in above)):
        own, own_lengths = dict[int, str](), set[int]()
        for module in level:
            for place, value in _integers(module, told):
                name = place.rpartition(".")[2]
                if _LENGTH.search(name):
                    own_lengths.add(value)
                elif _COUNT.search(name) and value > 1:
                    own.setdefault(value, f"{names[module] or type(module).__name__}.{place}")
        if not near and not lengths:
            near, lengths = {*own}, own_lengths
        counts = {**own, **counts}
    groups = {m.num_groups for m in owner.modules() if isinstance(m, nn.GroupNorm)}
    return HeadCounts(names[owner] or type(owner).__name__, counts, near, lengths, groups)


def _integers(holder: Any, told: _Told, depth: int = _DEPTH) -> list[tuple[str, int]]:
    """Return the integers that a module, or a config, has by name, and those of its configs."""
    if isinstance(holder, TensorParallelLayer):
        return []
    key = id(holder), depth
    if key not in told:
        found: list[tuple[str, int]] = []
        for name, value in _attributes(holder).items():
            several = value if isinstance(value, list | tuple) else (value,)
            found += [(name, each) for each in several if type(each) is int and each > 0]
            if depth and not name.startswith("_") and not isinstance(value, _NO_CONFIG):
                found += [(f"{name}.{n}", each) for n, each in _integers(value, told, depth - 1)]
        told[key] = holder, found
    return told[key][1]


_NO_CONFIG = (
    nn.Module,
    Tensor,
    str,
    bytes,
    int,
    float,
    complex,
    list,
    tuple,
    set,
    type,
    type(None),
)


def _attributes(holder: Any) -> Mapping[str, Any]:
    """Return what a module or a config has by name; nothing of what is neither."""
    found: dict[Any, Any] = {}
    if isinstance(holder, Mapping):
        found.update(holder)
    else:
        kinds = [kind for kind in type(holder).__mro__ if not kind.__module__.startswith("torch.")]
        for kind in reversed(kinds):
            found.update(vars(kind))
        found.update({name: getattr(holder, name, None) for name in found.get("__slots__", ())})
        found.update(getattr(holder, "__dict__", {}))
    if len(found) > _MOST:
        return {}
    return {name: value for name, value in found.items() if isinstance(name, str)}
