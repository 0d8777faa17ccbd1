"""Distribution of layers over stages: by count, or so that the largest stage costs least."""

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
    """Distribute all layers over stages in order; every stage gets at least one.

    Without costs, stages have the same number of layers; earlier stages get one more if they do not
    divide, since the last stage has the head and the loss. With costs, the largest stage's total is
    minimal. Ties are broken by the most even distribution (least sum of squared totals), then by
    more layers on earlier stages. The sums are exact, so every rank finds the same result.

    Args:
        num_layers: Number of layers of the model.
        pp_size: Number of stages of the pipeline.
        costs: The num_layers + 2 costs of everything before the layers, of each layer, and of
            everything after them: finite numbers from 0, in any common unit.

    Returns:
        Each stage's layer indices.

    Raises:
        InvalidArgumentError: A stage would have no layer, or the costs do not fit.

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


def parameter_costs(model: nn.Module, sections: Iterable[Iterable[str]]) -> tuple[float, ...]:
    """Return the number of parameters in each set of modules.

    A parameter counts once in each set that has it: a tied parameter is held, with its gradient and
    optimizer state, and used on both of its stages.

    Args:
        model: The whole model.
        sections: Sets of modules, each given by the modules' names.
    """
    held = [
        {p for name in names for p in model.get_submodule(name).parameters()} for names in sections
    ]
    return tuple(sum(p.numel() for p in parameters) for parameters in held)


class _Distribution(NamedTuple):
    """Stages for the last layers: the largest total, the sum of squared totals, and their ends."""

    largest: int
    squares: int
    ends: tuple[int, ...]


def _best(costs: Sequence[int], num_stages: int, enough: int) -> _Distribution:
    """Return the stages with the least (largest total, sum of squared totals).

    Totals up to `enough` count as equally large.
    """
    # Dynamic programming from the last stage to the first, over the layer at which a stage starts.
    upto = list(accumulate(costs, initial=0))
    end = len(costs)
    best = {end: _Distribution(enough, 0, ())}

    def with_stage(start: int, stop: int) -> _Distribution:
        total, rest = upto[stop] - upto[start], best[stop]
        largest = max(total, rest.largest)
        return _Distribution(largest, rest.squares + total * total, (stop, *rest.ends))

    for stage in reversed(range(num_stages)):
        starts = range(stage, end - (num_stages - 1 - stage)) if stage else range(1)
        best = {
            start: min(
                (with_stage(start, stop) for stop in best if stop > start),
                key=lambda one: (one.largest, one.squares, -one.ends[0]),
            )
            for start in starts
        }
    return best[0]


def _whole(costs: Iterable[float]) -> list[int]:
    """Return the costs as exact integers in a common unit."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _check_costs(costs: Sequence[float], num_layers: int) -> None:
    if len(costs) != num_layers + 2:
        raise InvalidArgumentError(
            f"expected {num_layers + 2} costs: of the modules before the layers, of each of the "
            f"{num_layers} layers, and of the modules after them; got {len(costs)}. Use 0 for none"
        )
    for index, cost in enumerate(costs):
        if not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
            message = f"costs must be finite numbers from 0, and costs[{index}] is {cost!r}"
            raise InvalidArgumentError(message)
