"""Attention modules whose own parameters have something for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.distributed import ProcessGroup

from ....dist import get_world_size
from ..cuts.cut import Cut, require_shares, share_cut
from ..cuts.per_head import PerHead
from ..regions.surround import Surrounded, surround
from .base import Memo, TensorParallelLayer


class HeadParameters(TensorParallelLayer, Surrounded):
    """An attention module, before whose own class this comes: its parameters are of its heads.

    Its forward stays its own; that its projections are of this rank's heads is others' doing.
    """

    plain_class = nn.Module
    sharded_size = "heads"
    shard_dims: ClassVar[Mapping[str, int]] = {}  # each module has its own
    options: ClassVar[dict[str, Any]] = {"per_head": None}

    @classmethod
    def convert(
        cls,
        module: nn.Module,
        group: ProcessGroup | None,
        memo: Memo,
        cut: Cut | None = None,
        **options: Any,
    ) -> Any:
        """Turn a module itself into this rank's shard, which stays an instance of its class."""
        style: PerHead = options["per_head"]
        heads, tp_size = style.heads(module), get_world_size(group)
        require_shares(f"{cls.__name__}: {cls.sharded_size}", heads, tp_size)
        vars(module)["shard_dims"] = dict.fromkeys(style.names, 0)
        layer: Any = surround(module, cls, group)
        layer._shard(group, memo, options, cut or share_cut(heads, tp_size))
        return layer
