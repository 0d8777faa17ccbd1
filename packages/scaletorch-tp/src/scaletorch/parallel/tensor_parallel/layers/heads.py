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

_SET = ("group", "tp_size", "tp_rank", "cut", "shard_sizes", "shard_dims")  # by `convert`


class HeadParameters(TensorParallelLayer, Surrounded):
    """An attention module, before whose own class this comes: its parameters are of its heads.

    Its forward stays its own; that its projections are of this rank's heads is others' doing.
    """

    plain_class = nn.Module
    sharded_size = "heads"
    shard_dims: ClassVar[Mapping[str, int]] = {}  # each module has its own
    options: ClassVar[dict[str, Any]] = {"per_head": None}

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become one, or None: names of its own that shards need."""
        bases = type(module).__mro__
        own = {name for kind in bases[: bases.index(nn.Module)] for name in vars(kind)}
        own |= {*vars(module), *module._modules, *module._buffers}
        wanted = {*_SET, *vars(TensorParallelLayer)} - {*vars(nn.Module)}
        taken = sorted(name for name in own & wanted if not name.startswith("__"))
        if taken:
            return f"it has a {taken[0]!r} of its own, a name that a shard needs: rename it"
        return None

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
