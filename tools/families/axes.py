"""The columns of the table: layouts, with their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Axis:
    """One layout.

    Attributes:
        sizes: Sizes of the grid.
        options: Options of `parallelize`.
        micro_batches: Micro-batches of each data-parallel rank.
        zero: Stage of the sharded optimizer; 0 for none.
    """

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks; ep ranks are among those of the other axes."""
        return prod(size for name, size in self.sizes.items() if name != "ep_size")


AXES: Mapping[str, Axis] = {
    "tp": Axis({"tp_size": 2}),
    "sp": Axis({"tp_size": 2}, {"sequence_parallel": True}),
    "cp": Axis({"cp_size": 2}),
    "pp": Axis({"pp_size": 2}, micro_batches=2),
    "dp": Axis({"dp_size": 2}, zero=1),
    "ep": Axis({"dp_size": 2, "ep_size": 2}),
    "tp-cp": Axis({"tp_size": 2, "cp_size": 2}),
    "tp-pp": Axis({"tp_size": 2, "pp_size": 2}, micro_batches=2),
    "tp-dp": Axis({"tp_size": 2, "dp_size": 2}, zero=1),
    "cp-pp": Axis({"cp_size": 2, "pp_size": 2}, micro_batches=2),
    "cp-dp": Axis({"cp_size": 2, "dp_size": 2}, zero=1),
    "pp-dp": Axis({"pp_size": 2, "dp_size": 2}, micro_batches=2, zero=1),
}
SINGLE = tuple(name for name, axis in AXES.items() if axis.ranks == 2)
