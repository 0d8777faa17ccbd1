"""What is new on this rank since it last told the monitor."""

from __future__ import annotations

import time
from typing import Any

from .recorder import Recorder, Track


class News:
    """Makes the words that a rank tells.

    Args:
        recorder: what this process does.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told: dict[str, int] = {}  # channel → calls that the monitor knows of
        self._marked: dict[str, int] = {}  # channel → the last mark that it knows
        self._step = -1
        self._shown: list[int] = []  # numbers of the waits that it knows

    def waits_changed(self) -> bool:
        """Tell whether this rank waits in anything else than was told."""
        return [number for number, _, _ in list(self._recorder.waits.values())] != self._shown

    def lease(self) -> dict[str, Any]:
        """Return what is new, and take it for told.

        Waits are read before all else, so that whatever they need is in what is read after them:
        the channel that a wait is in, and the calls that were made before it.
        """
        waits = self._recorder.waits.copy()
        free, foreign = self._recorder.free_threads(waits)
        steps = [step for step in list(self._recorder.steps) if step[0] > self._step]
        tracks = list(self._recorder.tracks.values())
        fresh = [track for track in tracks if track.key not in self._told]
        counts = {
            track.key: track.count for track in tracks if track.count != self._told.get(track.key)
        }
        marks = {track.key: found for track in tracks if (found := self._new_marks(track))}
        self._step = steps[-1][0] if steps else self._step
        self._shown = [number for number, _, _ in waits.values()]
        self._told |= counts
        self._marked |= {key: found[-1][0] for key, found in marks.items()}
        now = time.monotonic()
        return {
            "is": "lease",
            "channels": {
                t.key: [t.channel.label, t.channel.members, t.channel.message] for t in fresh
            },
            "counts": counts,
            "marks": marks,
            "steps": steps,
            "waits": [
                [number, note.track.key, note.seq, round(now - begun, 2)]
                for number, note, begun in waits.values()
            ],
            "free": free,
            "foreign": foreign,
        }

    def _new_marks(self, track: Track) -> list[tuple[int, int, int]]:
        known = self._marked.get(track.key, 0)
        if not track.marks or track.marks[-1][0] <= known:
            return []
        return [mark for mark in list(track.marks) if mark[0] > known]
