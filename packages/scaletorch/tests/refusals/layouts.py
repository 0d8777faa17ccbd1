"""The layouts of 2 and 4 ranks, with each option that changes what a rank computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEDULES = ("afab", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
TWO_CHUNKS = ("interleaved_1f1b", "zb_v", "dualpipe_v")
SHARED = {"sequence_parallel": True}


@dataclass(frozen=True)
class Layout:
    """One way to train."""

    axes: Mapping[str, int]  # the size of each
    options: Mapping[str, Any] = field(default_factory=dict)  # of `parallelize`
    micro_batches: int = 1  # of each data-parallel rank
    zero: int = 0  # the stage of ZeRO
    compiled: bool = False  # whether layers are

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {f"{axis}_size": size for axis, size in self.axes.items()}

    @property
    def depth(self) -> int:
        chunks = 2 if self.options.get("schedule") in TWO_CHUNKS else 1
        return max(2, self.axes.get("pp", 1) * chunks)

    @property
    def features(self) -> frozenset[str]:
        """What rows may be refused on."""
        found = {axis for axis, size in self.axes.items() if size > 1}
        found |= {name for name, on in self.options.items() if on and name != "schedule"}
        found |= {"several"} if self.micro_batches > 1 else set()
        found |= {"zero"} if self.zero else set()
        return frozenset(found)

    def __str__(self) -> str:
        words = [f"{axis}{size}" for axis, size in self.axes.items()]
        words += [str(on) if name == "schedule" else name for name, on in self.options.items()]
        words += [f"zero{self.zero}"] * bool(self.zero) + ["compiled"] * self.compiled
        words += [f"mb{self.micro_batches}"] * (self.micro_batches > 1)
        return " ".join(words)


LAYOUTS = [
    Layout({"tp": 2}),
    Layout({"tp": 2}, {"recompute": True}),
    Layout({"tp": 2}, micro_batches=2),
    Layout({"tp": 2}, SHARED),
    Layout({"tp": 2}, {**SHARED, "loss_parallel": True}, micro_batches=2),
    Layout({"cp": 2}),
    Layout({"cp": 2}, micro_batches=2),
    Layout({"cp": 2}, {"cp_layout": "contiguous", "cp_method": "ulysses"}),
    Layout({"cp": 2}, {"recompute": True}),
    Layout({"dp": 2}),
    Layout({"dp": 2}, micro_batches=2),
    Layout({"dp": 2}, {"recompute": True}),
    Layout({"dp": 2}, zero=1),
    Layout({"dp": 2}, zero=2, micro_batches=2),
    *[Layout({"pp": 2}, {"schedule": name}, 2) for name in SCHEDULES],
    Layout({"pp": 2}, {"schedule": "1f1b"}),
    Layout({"tp": 2}, compiled=True),
    Layout({"tp": 4}),
    Layout({"tp": 4}, SHARED),
    Layout({"cp": 4}),
    Layout({"dp": 2, "tp": 2}),
    Layout({"dp": 2, "tp": 2}, SHARED),
    Layout({"dp": 2, "cp": 2}),
    Layout({"cp": 2, "tp": 2}),
    Layout({"cp": 2, "tp": 2}, SHARED),
    Layout({"dp": 2, "cp": 2}, zero=2),
    *[Layout({"pp": 4}, {"schedule": name}, 2) for name in SCHEDULES],
    Layout({"dp": 2, "pp": 2}, {"schedule": "1f1b"}),
    Layout({"dp": 2, "pp": 2}, {"schedule": "zb_v"}, 2),
    Layout({"dp": 2, "pp": 2}, {"schedule": "1f1b"}, 2, zero=2),
    Layout({"pp": 2, "tp": 2}, {"schedule": "1f1b"}, 2),
    Layout({"pp": 2, "tp": 2}, {"schedule": "zb_h1", **SHARED}, 2),
    Layout({"pp": 2, "tp": 2}, {"schedule": "dualpipe_v"}, 2),
    Layout({"pp": 2, "cp": 2}, {"schedule": "zb_v"}, 2),
    Layout({"pp": 2, "cp": 2}, {"schedule": "1f1b"}),
    Layout({"dp": 2, "tp": 2}, SHARED, compiled=True),
    Layout({"cp": 2, "tp": 2}, compiled=True),
]
