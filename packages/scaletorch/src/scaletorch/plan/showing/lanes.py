"""The schedule of a pipeline as a time line."""

from __future__ import annotations

from inspect import signature
from xml.etree import ElementTree as Xml

from ...parallel.pipeline_parallel import SCHEDULES, Costs, Timeline, simulate
from ...parallel.pipeline_parallel.building import drawn
from ..estimate import Estimate

BOXES = 1500  # in a picture


def lanes(estimate: Estimate, timeline: Timeline | None = None) -> Xml.Element:
    """Draw what each rank of the pipeline computes when.

    Args:
        estimate: A layout's.
        timeline: As it is timed; None draws stages that are equal, with backwards twice as long.
    """
    timeline = timeline or plain(estimate)
    layout, schedule = estimate.layout, timeline.schedule
    title = f"{layout.schedule}, {layout.grid.pp} ranks, "
    if schedule.num_micro_batches < layout.micro_batches:
        title += f"the first {schedule.num_micro_batches} of "
    return drawn([timeline], [f"{title}{layout.micro_batches} micro-batches"])


def plain(estimate: Estimate) -> Timeline:
    """Return the schedule's time line of as many micro-batches as a picture has room for."""
    layout = estimate.layout
    ranks, chunks = layout.grid.pp, layout.chunks
    room = max(BOXES // (6 * ranks * chunks), 1) * 2 * ranks
    build = SCHEDULES[layout.schedule]
    more = {"num_chunks": chunks} if "num_chunks" in signature(build).parameters else {}
    return simulate(build(ranks, min(layout.micro_batches, room), **more), Costs())
