"""Modules that keep their class and forward but whose own parameters are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ....dist import get_world_size
from ...placement import Cut
from ..cuts.styles import PerHead, Stacked
from ..regions.surround import Surrounded, surround
from .base import Group, Options, TensorParallelLayer, require_shares

_SET = ("group", "tp_size", "tp_rank", "cut", "shard_sizes", "shard_dims")  # by `convert`


class OwnParameters(TensorParallelLayer, Surrounded):
    """Mixin put before a module's own class; the style says how to shard its parameters."""

    plain_class = nn.Module
    shard_dims: ClassVar[Mapping[str, int]] = {}  # each module has its own
    options: ClassVar[dict[str, Any]] = {"own_style": None}

    own_style: PerHead | Stacked

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become one, whatever its style, or None if it can."""
        return None

    @classmethod
    def _taken(
        cls, module: nn.Module, group: Group, cut: Cut | None, options: Options
    ) -> tuple[Any, int]:
        """Add this mixin to a module's class; return the module and the divided length."""
        style: PerHead | Stacked = options["own_style"]
        cls._refuse(style.misfit(module))
        length = style.length(module)
        require_shares(f"{cls.__name__}: {cls.sharded_size}", length, get_world_size(group))
        vars(module)["shard_dims"] = style.dims
        return surround(module, cls, group), length

    def cut_of(self, name: str) -> Cut:
        """Return the cut of the parameter `name` along its shard dim."""
        return self.own_style.cut_of(name, self.cut)


class HeadParameters(OwnParameters):
    """An attention module with per-head parameters.

    Its forward does not change; its projections are sharded at head boundaries by their own styles.
    """

    sharded_size = "heads"

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become one (a name of it collides with a shard's), or None."""
        bases = type(module).__mro__
        own = {name for kind in bases[: bases.index(nn.Module)] for name in vars(kind)}
        own |= {*vars(module), *module._modules, *module._buffers}
        wanted = {*_SET, *vars(TensorParallelLayer)} - {*vars(nn.Module)}
        taken = sorted(name for name in own & wanted if not name.startswith("__"))
        if taken:
            return f"it has a {taken[0]!r} of its own, a name that a shard needs: rename it"
        return None
