from __future__ import annotations
from dataclasses import dataclass
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    rank: int
    micro_batch: int
    tensor: Tensor
    index: tuple[Tensor, ...]


def explain(*a, **k):
    return []
