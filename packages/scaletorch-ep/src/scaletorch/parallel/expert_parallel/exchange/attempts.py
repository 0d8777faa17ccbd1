"""Code of users that runs between exchanges: its errors wait until the other ranks know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from ....dist.building import all_to_all_flat
from .routes import Route
from .travel import landed


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Return what a call returns and no error, or None and the error that it raises."""
    try:
        return call(*args), None
    except _StopRecomputationError:  # torch's checkpoints end so, on all ranks at the same place
        raise
    except Exception as error:  # of whatever kind: the others would wait for this rank
        return None, error


@dataclass(slots=True)
class Outcome:
    """How experts have fared, which travels with their results.

    Attributes:
        here: Whether all is well with those of this rank.
        everywhere: Whether it is with those of every rank, once results are here.
    """

    here: bool
    everywhere: bool = True


def send_back_with(outcome: Outcome, rows: Tensor, route: Route) -> Tensor:
    """Send results [R, H] back, and to each rank a number more; return [S, H].

    The number is in the results' own message, so that no rank waits for another one, and is read at
    once: where the host would have to wait for a device, that costs more than it is worth.
    """
    width, number = rows.shape[1], rows.new_full((1,), outcome.here)
    parts = rows.reshape(-1).split_with_sizes([n * width for n in route.receives])
    pieces = [each for part in parts for each in (part, number)]
    sends, comes = ([n * width + 1 for n in each] for each in (route.receives, route.sends))
    (back,) = landed([all_to_all_flat(torch.cat(pieces), sends, comes, route.group)])
    came = back.split_with_sizes([each for size in comes for each in (size - 1, 1)])
    outcome.everywhere = all(map(bool, came[1::2]))
    return torch.cat(came[::2]).view(-1, width)
