"""What models add to scores, which they make of this rank's shard: made of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .settings import refusal


@dataclass(frozen=True, slots=True)
class Biases:
    """Makes biases of whole sequences.

    Attributes:
        name: Of the module that is given them, for messages.
        shard: Rows and positions of a shard.
        whole: Rows and positions of the whole sequences that this rank computes.
    """

    name: str
    shard: tuple[int, int]
    whole: tuple[int, int]

    def alibi(self, x: Tensor, make: Callable[..., Tensor] | None, heads: int) -> Tensor:
        """Return ALiBi of the same heads, [rows * heads, 1, positions].

        Args:
            x: That of the shard.
            make: Makes them of a mask, a number of heads and a dtype.
            heads: How many the model has.

        Raises:
            InvalidArgumentError: They are not those that the model makes without padding.
        """
        (rows, length), (own, positions) = self.shard, self.whole
        if make is None or x.ndim != 3 or x.shape[2] != length or x.shape[0] % rows:
            raise refusal(f"{self.name} is given biases {list(x.shape)} that it cannot make whole")
        ones = torch.ones(1, max(positions, length), dtype=torch.long, device=x.device)
        made = make(ones, heads, x.dtype)
        # Some of the heads may be another rank's: those that are here begin as those given.
        same = (x[: x.shape[0] // rows, None, 0] == made[None, :, 0, :length]).all(-1)
        if not same.any(1).all():
            raise refusal(f"{self.name} is given biases for padding, which cannot be made whole")
        return made[same.int().argmax(1), :, :positions].repeat(own, 1, 1)

    def distance(self, x: Tensor) -> Tensor:
        """Return how far each query is behind each key, [positions, positions].

        Raises:
            InvalidArgumentError: That of the shard is not so.
        """
        length, positions = self.shard[1], self.whole[1]
        at = torch.arange(max(positions, length), device=x.device, dtype=x.dtype)
        apart = at[:, None] - at[None]
        if x.shape != (length, length) or not torch.equal(x, apart[:length, :length]):
            raise refusal(f"{self.name} is given distances of positions that cannot be made whole")
        return apart[:positions, :positions]
