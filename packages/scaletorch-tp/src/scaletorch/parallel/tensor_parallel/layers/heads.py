"""Attention modules whose own parameters have something for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ....dist import get_world_size
from ..cuts.cut import Cut, require_shares
from ..cuts.per_head import PerHead
from ..regions.surround import Surrounded, surround
from .base import Group, Options, TensorParallelLayer


class HeadParameters(TensorParallelLayer, Surrounded):
    """An attention module, before whose own class this comes: its parameters are of its heads.

    Its forward stays its own; that its projections are of this rank's heads is others' doing.
    """

    plain_class = nn.Module
    sharded_size = "heads"
    shard_dims: ClassVar[Mapping[str, int]] = {}  # each module has its own
    options: ClassVar[dict[str, Any]] = {"per_head": None}

    @classmethod
    def _taken(
        cls, module: nn.Module, group: Group, cut: Cut | None, options: Options
    ) -> tuple[Any, int]:
        """Return a module, which stays an instance of its class, and how many heads it has."""
        style: PerHead = options["per_head"]
        heads = style.heads(module)
        require_shares(f"{cls.__name__}: {cls.sharded_size}", heads, get_world_size(group))
        vars(module)["shard_dims"] = dict.fromkeys(style.names, 0)
        return surround(module, cls, group), heads
