"""Find the axis on which a layout differs from one process, by asking each division alone.

One process runs a unit on the shares that an axis would give its ranks, one after another. If it
then gives what the layout gave, that division is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...dist.building import map_tensors
from .calls import Call
from .joining import Joiner
from .judging import relative
from .recording import hidden_of

ROWS, POSITIONS, TOKENS, FEATURES = "rows", "positions", "tokens", "features"
STAGES = "stages"  # no division of what a unit computes
_ADVICE = {  # what may be wrong on each axis
    FEATURES: "tp divides features: what is computed from a share of them has to be named in the "
    "plan, or all that it is computed from left out of it",
    TOKENS: "sequence parallelism divides tokens between layers: style what mixes or counts them "
    "'sequence_whole', or the layers 'sequence_layer'",
    POSITIONS: "cp divides positions: mix them by F.scaled_dot_product_attention alone, and read "
    "the forward's argument position_ids rather than count them; positions that do not begin at 0 "
    "have to be in the batch as position_ids",
    ROWS: "dp and micro-batches divide rows: compute each from that row alone",
    STAGES: "pp hands hidden states and their gradients from stage to stage: what changes them "
    "between layers, as a hook does, has to be in a layer",
}


def axes_of(call: Call, ours: Tensor, joiner: Joiner, limit: float) -> tuple[str, ...]:
    """Return which divisions may be why a unit's output differs from one process's.

    Args:
        call: Of the unit, with hidden states [rows, positions, ...].
        ours: The layout's output, whole.
        joiner: Knows the shares of the ranks.
        limit: The largest relative error that rounding explains.

    Returns:
        The one that alone makes one process differ likewise. If there is none, all but rows if
        these could be asked: attention needs all positions and features, so that a share of these
        shows nothing.
    """
    left = [ROWS, POSITIONS, TOKENS, FEATURES]
    whole = joiner.rows, joiner.layout_of(ours.shape).length
    if any(x is None or x.shape[:2] != whole for x in (call.hidden, ours)):
        return tuple(left)  # of other dims, whose shares are not known
    for axis, dim, shares in divisions(joiner, ours.shape):
        try:
            found = _by_shares(call, ours, dim, shares)
        except Exception:  # of a module that is not ours, on sizes that it may not take
            continue
        if relative(ours, found) <= limit:
            return (axis,)
        if axis == ROWS:
            left.remove(ROWS)
    return tuple(left)


def advice(axes: Sequence[str] | None, divided: Sequence[str]) -> str:
    """Return what may be wrong.

    Args:
        axes: What `axes_of` returned; None if no unit's output was the first to differ.
        divided: What the layout divides.
    """
    found = [axis for axis in axes or divided if axis in divided] or divided
    text = "; ".join(_ADVICE[axis] for axis in found)
    if axes is not None and len(axes) == 1:
        return f"One process gives the same if {axes[0]} alone are divided so: {text}"
    return text


def divisions(joiner: Joiner, shape: torch.Size) -> Iterator[tuple[str, int, Sequence[Tensor]]]:
    """Yield each division of hidden states, the dim, and the indices of each share along it.

    Args:
        joiner: Knows the shares of the ranks.
        shape: Of the hidden states, [rows, positions, ...].
    """
    manager, layout, device = joiner.manager, joiner.layout_of(shape), joiner.device
    rows = torch.arange(joiner.rows, device=device).split(joiner.rows_of_a_part)
    if len(rows) > 1:
        yield ROWS, 0, rows
    positions = [layout.positions(rank, device) for rank in range(layout.size)]
    if layout.size > 1:
        yield POSITIONS, 1, [held[held < layout.length] for held in positions]
    if manager.tp_size > 1 and layout.local_length % manager.tp_size == 0:
        shares = [share for held in positions for share in held.chunk(manager.tp_size)]
        yield TOKENS, 1, [share[share < layout.length] for share in shares]


def _by_shares(call: Call, ours: Tensor, dim: int, shares: Sequence[Tensor]) -> Tensor:
    """Return a unit's output made share by share, whole."""
    found = torch.empty_like(ours)
    size = ours.shape[dim]
    for share in shares:

        def own(x: Tensor, share: Tensor = share) -> Tensor:
            divided = x.ndim > dim and x.shape[dim] == size
            return x.index_select(dim, share) if divided else x

        args, kwargs = map_tensors(own, (call.args, call.kwargs))
        part = replace(call, args=args, kwargs=kwargs, hidden=hidden_of((args, kwargs)))
        with torch.no_grad():
            made = part.again().outputs[0]
        found.index_copy_(dim, share, made.to(found.dtype))
    return found
