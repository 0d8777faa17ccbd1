"""Layers spread over stages: by count, or so that the most expensive stage is the cheapest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

from ....dist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch import nn


def distribute_layers(
    num_layers: int, pp_size: int, costs: Sequence[float] | None = None
) -> list[range]:
    """Spread layers over stages in order; every stage gets one, and none is lost.

    Without costs by count: if they do not divide, earlier stages get one more, since the last
    one has the head and the loss. With costs the largest stage's total is as small as can be; of
    all such ways the most even one (least sum of squared totals) is taken, and of these the one
    whose earlier stages have more layers. The sums are exact, so every rank finds the same.

    Args:
        num_layers: Layers of the model.
        pp_size: Stages of the pipeline.
        costs: Of all before the layers, of each layer, and of all after them: num_layers + 2 finite
            numbers from 0 of any one unit.

    Returns:
        Each stage's layer indices.

    Raises:
        InvalidArgumentError: A stage would have no layer, or costs that do not fit.

    Example:
        >>> distribute_layers(8, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
        >>> distribute_layers(8, 3, costs=[1, *[1] * 8, 3])  # the head costs three layers
        [range(0, 3), range(3, 7), range(7, 8)]
    """
    if not 1 <= pp_size <= num_layers:
        raise InvalidArgumentError(
            f"{num_layers} layers cannot be spread over {pp_size} stages: every stage needs a "
            f"layer, so the pipeline size must be from 1 to {num_layers}"
        )
    if costs is None:
        size, more = divmod(num_layers, pp_size)
        starts = [stage * size + min(stage, more) for stage in range(pp_size + 1)]
        return [range(*pair) for pair in pairwise(starts)]
    _check_costs(costs, num_layers)
    before, *layers, after = _whole(costs)
    layers[0] += before
    layers[-1] += after
    largest = _best(layers, pp_size, 0).largest
    return [range(*pair) for pair in pairwise((0, *_best(layers, pp_size, largest).ends))]


def parameter_costs(model: nn.Module, parts: Iterable[Iterable[str]]) -> tuple[float, ...]:
    """Return the number of parameters in each part, given by the names of its modules.

    A parameter counts once in each part that has it: tied parts on two stages both hold it, with
    its gradient and optimizer state, and both compute with it.
    """
    held = [{p for name in part for p in model.get_submodule(name).parameters()} for part in parts]
    return tuple(sum(p.numel() for p in parameters) for parameters in held)


class _Way(NamedTuple):
    """Stages for the layers from some layer on: compared by its first two, found by its ends."""

    largest: int
    squares: int
    ends: tuple[int, ...]


def _best(costs: Sequence[int], num_stages: int, enough: int) -> _Way:
    """Return the stages with the least (largest total, sum of squared totals).

    Totals up to `enough` count as equally large: with the largest total of the best way, that
    leaves the most even of the best ones.
    """
    upto = list(accumulate(costs, initial=0))
    end = len(costs)
    ways = {end: _Way(enough, 0, ())}
    for stage in reversed(range(num_stages)):
        starts = range(stage, end - (num_stages - 1 - stage)) if stage else range(1)
        ways = {
            start: min(
                (_add(upto[stop] - upto[start], stop, ways[stop]) for stop in ways if stop > start),
                key=lambda way: (way.largest, way.squares, -way.ends[0]),
            )
            for start in starts
        }
    return ways[0]


def _add(total: int, stop: int, rest: _Way) -> _Way:
    return _Way(max(total, rest.largest), rest.squares + total * total, (stop, *rest.ends))


def _whole(costs: Iterable[float]) -> list[int]:
    """Return the costs as whole numbers of one unit, small enough for all to be exact."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _check_costs(costs: Sequence[float], num_layers: int) -> None:
    if len(costs) != num_layers + 2:
        raise InvalidArgumentError(
            f"expected {num_layers + 2} costs: of what is before the layers, of each of the "
            f"{num_layers} layers, and of what is after them; got {len(costs)}. Use 0 for nothing"
        )
    for index, cost in enumerate(costs):
        if not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
            message = f"costs must be finite numbers from 0, and costs[{index}] is {cost!r}"
            raise InvalidArgumentError(message)
