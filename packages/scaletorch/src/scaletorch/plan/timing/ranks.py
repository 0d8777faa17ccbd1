"""What each rank of a pipeline takes for a micro-batch, and after the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..clusters import Cluster
from ..description import Parameter
from ..holding import Holdings, places
from ..holding.stages import holders_of
from ..layout import Layout
from .gradients import Ended, ended, held
from .kinds import Kind, summed
from .messages import Route
from .pipelines import Stage
from .tied import summed_ties, tied_here


class Rank(NamedTuple):
    """A rank of the pipeline, for a micro-batch."""

    stages: list[Stage]
    kinds: list[tuple[Kind, int]]
    end: Ended

    @property
    def computing(self) -> float:
        """Without messages."""
        return sum(n * (k.forward.computing + k.backward.computing) for k, n in self.kinds)


Known = dict[tuple[int, int, Route, Route], dict[int, Rank]]


def ranks_of(
    holdings: Holdings, layout: Layout, cluster: Cluster, kinds: list[Kind],
    ways: Mapping[str, Route], known: Known,
) -> list[Rank]:  # fmt: skip
    """Return what the ranks of the pipeline take; equal ones are worked out once.

    Args:
        holdings: Of the model.
        layout: The layout.
        cluster: The cluster.
        kinds: What its blocks take in the layout.
        ways: By axis.
        known: Ranks of other layouts with the same `kinds`, to which these are added.
    """
    description, numbers = holdings.description, holdings.numbers(layout)
    rounds = layout.micro_batches if layout.zero >= 2 else 1
    key = layout.zero, rounds, ways["cp_dp"], ways["edp"]
    same = known.setdefault(key, {})
    for number in {*numbers} - same.keys():
        same[number] = _rank(holdings, layout, cluster, kinds, number, ways)
    ranks = [same[number] for number in numbers]
    if not description.tied or layout.grid.pp == 1:
        return ranks
    holders = holders_of(description, places(description, layout))
    waits = [
        summed_ties(description, layout, rank, holders, cluster, ways["pp"])
        for rank in range(len(ranks))
    ]
    return [
        _with_ties(rank, wait) if wait else rank for rank, wait in zip(ranks, waits, strict=True)
    ]


def _with_ties(rank: Rank, waited: float) -> Rank:
    exposed = summed([(rank.end.exposed, 1), ({"pp": waited}, 1)])
    return rank._replace(end=rank.end._replace(exposed=exposed))


def _rank(
    holdings: Holdings, layout: Layout, cluster: Cluster, kinds: list[Kind], number: int,
    ways: Mapping[str, Route],
) -> Rank:  # fmt: skip
    stages = [
        Stage(
            sum(n * kinds[kind].forward.total for kind, n in chunk.items()),
            sum(n * kinds[kind].backward.total for kind, n in chunk.items()),
            sum(n * kinds[kind].weights for kind, n in chunk.items()),
        )
        for chunk in holdings.chunks(number)
    ]
    own = [(kinds[kind], n) for kind, n in holdings.kinds(number).items()]
    forward = sum(n * kind.forward.computing for kind, n in own)
    backward = sum(n * kind.backward.computing for kind, n in own)
    key = layout.cut, number
    if key not in holdings.owned:
        holdings.owned[key] = held(_parameters(holdings, layout, number))
    last = ended(holdings.owned[key], layout, forward, backward, cluster, ways)
    return Rank(stages, own, last)


def _parameters(holdings: Holdings, layout: Layout, number: int) -> Iterator[tuple[Parameter, int]]:
    """Yield a rank's parameters, tied ones once, and how many blocks have each."""
    description, kinds = holdings.description, holdings.kinds(number)
    behaviours, tied = description.behaviours(layout.cut), tied_here(description, kinds)
    for kind, times in kinds.items():
        for each in behaviours[kind].parameters:
            if f"{kind}.{each.name}" not in tied:
                yield each, times
