"""What needs all features between column- and row-parallel layers: a norm over all heads, say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..regions.head_splits import keep_features
from ..regions.surround import Surrounded, own_class
from ..regions.uncompiled import around_compiled, gather, split


class WholeFeatures(Surrounded):
    """A module that is called with this rank's features [..., H / tp], and sees all of them.

    It computes the same on every rank, so the gradients of its parameters are whole, and each rank
    keeps its features of what it returns.
    """

    feature_sizes: tuple[int, ...]

    @around_compiled
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module's own forward on all features."""
        sizes, group = self.feature_sizes, self._tp_group.group
        out = super().forward(gather(x, -1, group, sizes=sizes), *args, **kwargs)
        if not isinstance(out, Tensor) or out.shape[-1] != sum(sizes):
            came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InvalidArgumentError(
                f"{describe_rank()}: {own_class(self).__name__} must return as many features as it "
                f"is given, [..., {sum(sizes)}], and returned {came}"
            )
        own = split(out, -1, group, sizes=sizes)
        if not torch.compiler.is_compiling():
            keep_features(x, own)
        return own
