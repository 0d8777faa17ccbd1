"""A model family: names of modules, and the plan for models that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Family:
    """A plan for every model whose modules have these names.

    Args:
        name: What messages call it.
        plan: Patterns and styles.
        may_lack: Patterns that need not match.
        complete: Patterns of modules in which every parameter must be the plan's: one that is
            not (a router) would get a part of its gradient only.
        foreign: Attributes or submodules, unless they are `False`, by which a module of `heads` or
            `complete` says that it computes otherwise.
        heads: Pattern of a module -> its projections, whose outputs are cut at head borders.
            What sums gradients in it must be of the size of one head.
    """

    name: str
    plan: Plan
    may_lack: frozenset[str] = frozenset()
    complete: tuple[str, ...] = ()
    foreign: frozenset[str] = frozenset()
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
