"""All layouts of a job, what each costs, and which is the best."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..dist.errors import InvalidArgumentError
from .clusters import Cluster
from .description import Description
from .estimate import Estimate, Time
from .holding import Holdings, Optimizer
from .later import Later
from .layout import Layout, Recompute
from .memory import Line, lines, peaks_of, ranks_hold
from .options import Options, Refused, ladder, legal
from .traffic import ranks_send

GIB = 2**30
Timer = Callable[[Description, Layout, Cluster], Time]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts of a job.

    Attributes:
        description: The model.
        cluster: What it would run on.
        optimizer: What is kept for each parameter.
        estimates: Of those that fit, the best first: by time if it is known, else by memory.
        refused: The others, and why.
    """

    description: Description
    cluster: Cluster
    optimizer: Optimizer
    estimates: tuple[Estimate, ...]
    refused: tuple[Refused, ...]

    def best(self) -> Estimate:
        """Return the first estimate.

        Raises:
            InvalidArgumentError: No layout is legal and fits; the message has some reasons.
        """
        if self.estimates:
            return self.estimates[0]
        reasons = dict.fromkeys(f"{each.grid}: {each.why}" for each in self.refused)
        raise InvalidArgumentError(
            f"no layout of {self.cluster.ranks} ranks can train {self.description.name}: "
            + "; ".join(list(reasons)[:3])
        )

    def explain(self, layout: Layout | None = None, rank: int | None = None) -> tuple[Line, ...]:
        """Return the memory of a rank line by line.

        Args:
            layout: Any of the model's; None is the best.
            rank: Of the pipeline; None is the fullest.

        Raises:
            InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
        """
        chosen = self.best().layout if layout is None else layout
        return lines(self.description, chosen, rank, self.optimizer)


def plan(
    description: Description,
    rows: int,
    cluster: Cluster,
    *,
    options: Options | None = None,
    optimizer: Optimizer | None = None,
    time: Timer | None = None,
) -> Plan:
    """Return what the layouts of a job cost, the best first.

    All sizes of the grid are tried that the model is described for. Of ZeRO's stages and of
    recomputation a layout has as little as lets it fit, since they cost time: a step further is
    tried only if no step before it fits. `Options` says what is tried of the rest.

    Args:
        description: The model.
        rows: Sequences of a step, of all ranks.
        cluster: Its ranks, and the memory of one.
        options: What is tried.
        optimizer: What is kept for each parameter; by default AdamW.
        time: `time(description, layout, cluster)`, by which they are ranked; None is by memory.

    Raises:
        InvalidArgumentError: No rows, or no ranks.
    """
    with _uncollected():
        return _plan(description, rows, cluster, options or Options(), optimizer, time)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no cycles meanwhile: a search makes none, and very many objects that stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _plan(
    description: Description,
    rows: int,
    cluster: Cluster,
    chosen: Options,
    optimizer: Optimizer | None,
    time: Timer | None,
) -> Plan:
    known = Holdings(description, optimizer)
    estimates: list[tuple[float, int, Estimate]] = []
    refused: list[Refused] = []
    for each in legal(description, rows, cluster.ranks, chosen):
        if isinstance(each, Refused):
            refused.append(each)
            continue
        for most, layout in _fitting(known, each, cluster, chosen, refused):
            seconds = None if time is None else time(description, layout, cluster)
            step = 0.0 if seconds is None else seconds.step
            held, sent = Later(ranks_hold, known, layout), Later(ranks_send, known, layout)
            estimates.append((step, most, Estimate(layout, held, sent, seconds)))
    estimates.sort(key=lambda each: each[:2])
    ranked = tuple(each for _, _, each in estimates)
    return Plan(description, cluster, known.optimizer, ranked, tuple(refused))


def _fitting(
    known: Holdings, layout: Layout, cluster: Cluster, options: Options, refused: list[Refused]
) -> Iterator[tuple[int, Layout]]:
    """Yield peak and layout, with the least of what saves memory to fit; or say that none does."""
    found: list[tuple[int, int]] = []
    least: tuple[int, Recompute, int] | None = None
    peak = peaks_of(known, layout)
    unknown = [
        each for each in options.recompute if not _described(known.description, layout, each)
    ]
    for step, recompute, zero in ladder(layout, options, found):
        if recompute in unknown:
            continue
        most = peak(recompute, zero)
        if most <= cluster.device.memory:
            found.append(step)
            yield most, replace(layout, recompute=recompute, zero=zero)
        elif least is None or most < least[0]:
            least = most, recompute, zero
    if not found and least is not None:
        most, recompute, zero = least
        why = f"needs {most / GIB:.3g} GiB of {cluster.device.memory / GIB:.3g}, "
        why += f"with zero {zero} and recompute {recompute}"
        refused.append(Refused(layout.grid, why, replace(layout, recompute=recompute, zero=zero)))


def _described(description: Description, layout: Layout, recompute: Recompute) -> bool:
    """Return whether a layout's cut is described: not each is with selective recomputation."""
    if (recompute == "selective") == (layout.recompute == "selective"):
        return True
    return replace(layout, recompute=recompute).cut in description.cuts
