"""Layers that run in a loop: a pipeline goes through its stages once, so one stage has them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from .modules import listing

# Returns the names of modules in the order in which a forward calls them; none if it cannot tell.
Visits = Callable[[nn.Module, Sequence[str]], Sequence[str]]


def units_of(layers: Sequence[Sequence[str]], visits: Sequence[str]) -> list[range]:
    """Return the least ranges of layers between which a model may be cut.

    It may between two layers if no layer up to there is called after one from there on.

    Args:
        layers: The names of the modules of each layer.
        visits: Names of modules in the order of their calls.
    """
    index_of = {name: index for index, layer in enumerate(layers) for name in layer}
    order = [index_of[name] for name in visits if name in index_of]
    first = {index: place for place, index in reversed([*enumerate(order)])}
    last = {index: place for place, index in enumerate(order)}
    cuts = [
        cut
        for cut in range(1, len(layers))
        if max((last[i] for i in last if i < cut), default=-1)
        < min((first[i] for i in first if i >= cut), default=len(order))
    ]
    return [range(*pair) for pair in pairwise([0, *cuts, len(layers)])]


def too_few(layers: Sequence[Sequence[str]], units: Sequence[range], num_stages: int) -> str:
    """Say that layers in loops leave too few places to cut at."""
    loops = [f"{layers[unit[0]][0]} to {layers[unit[-1]][-1]}" for unit in units if len(unit) > 1]
    return (
        f"{len(layers)} layers cannot be spread over {num_stages} stages: the model's forward runs "
        f"{listing(loops)} in a loop, and a pipeline goes through its stages once, so one stage "
        f"has all of these, and at most {len(units)} stages have layers: take no more stages "
        "(pp_size=1 is no pipeline), or give a stage what is before or behind the layers alone by "
        "Split(points=(...))"
    )
