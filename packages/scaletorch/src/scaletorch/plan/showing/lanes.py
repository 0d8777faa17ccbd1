"""The schedule of a pipeline as a time line."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as Xml

from ...parallel.pipeline_parallel import Timeline, simulate
from ...parallel.pipeline_parallel.drawing import to_text
from ..holding.stages import schedule_of
from ..layout import Layout
from .shown import Shown

WIDTH = 160  # columns
ACTIONS = 240  # of a rank in a picture, about


def lanes(shown: Shown, layout: Layout) -> Xml.Element:
    """Draw what each rank of the pipeline computes when, of as many micro-batches as have room.

    If times are not known, stages are drawn as equal, and backward twice as long as forward.
    """
    ranks = layout.grid.pp
    room = max(ACTIONS // (4 * ranks * layout.chunks), 1) * 2 * ranks
    short = replace(layout, micro_batches=min(layout.micro_batches, room))
    first = "" if short == layout else f"the first {room} of "
    title = f"{layout.schedule}, {ranks} ranks, {first}{layout.micro_batches} micro-batches"
    picture = Xml.Element("pre")
    picture.text = f"{title}\n{to_text((shown.timeline or plain)(short), WIDTH)}"
    return picture


def plain(layout: Layout) -> Timeline:
    """Return the time line of equal stages."""
    return simulate(schedule_of(layout))
