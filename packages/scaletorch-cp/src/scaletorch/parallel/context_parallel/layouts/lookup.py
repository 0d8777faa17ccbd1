"""The layout that a caller means by a name or an object, checked against what it is used on."""

from __future__ import annotations

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..cp_comms import Ring
from .layout import LAYOUTS, Layout


def layout_of_whole(layout: Layout | str, length: int, ring: Ring) -> Layout:
    """Return the layout of a whole sequence, which needs no padding any more.

    Args:
        layout: A layout, or a name of `LAYOUTS`.
        length: Length of the sequence, with the padding of a layout that has any.
        ring: The ranks.

    Raises:
        InvalidArgumentError: No such name, or a length that does not divide or does not fit.
    """
    if isinstance(layout, Layout):
        fits = (layout.size, layout.padded_length) == (ring.size, length)
        _require(fits, layout, f"the whole sequence has {length}, and the group {ring.size} ranks")
        return layout
    found = named_layout(layout, length, ring)
    if found.padded_length != length:
        unit = named_layout(layout, 1, ring).padded_length
        near = [n * unit for n in (length // unit, length // unit + 1) if n]
        message = (
            f"{describe_rank()}: a sequence of {length} positions does not divide over "
            f"{ring.size} context-parallel ranks in a {layout} layout; lengths near it that do: "
            f"{' and '.join(map(str, near))}"
        )
        raise InvalidArgumentError(message)
    return found


def layout_of_shards(layout: Layout | str, part: int, length: int | None, ring: Ring) -> Layout:
    """Return the layout under which every rank holds `part` positions.

    Args:
        layout: A layout, or a name of `LAYOUTS`.
        part: How many positions a rank holds, padding included.
        length: Length of the whole sequence without padding; None is that of a layout given,
            and of a name all that the ranks hold.
        ring: The ranks.

    Raises:
        InvalidArgumentError: No such name, or what does not fit together.
    """
    if isinstance(layout, Layout):
        found = layout
    else:
        found = named_layout(layout, part * ring.size if length is None else length, ring)
    whole = found.length if length is None else length
    fits = (found.size, found.local_length, found.length) == (ring.size, part, whole)
    _require(fits, found, f"each of {ring.size} ranks has {part}, of {whole} positions together")
    return found


def named_layout(name: str, length: int, ring: Ring) -> Layout:
    """Return the layout of that name, with what padding it needs.

    Raises:
        InvalidArgumentError: No such name, or a negative length.
    """
    if name not in LAYOUTS:
        message = f"layout must be a Layout or one of {', '.join(LAYOUTS)}; it is {name!r}"
        raise InvalidArgumentError(message)
    if length == 0:  # an empty sequence has empty shards
        return Layout(name, 0, ((range(0),),) * ring.size)
    return LAYOUTS[name](length, ring.size)


def _require(fits: bool, layout: Layout, came: str) -> None:
    if not fits:
        message = (
            f"{describe_rank()}: a {layout.name} layout of {layout.length} positions gives each of "
            f"{layout.size} ranks {layout.local_length}, {layout.padded_length} with padding; "
            f"{came}"
        )
        raise InvalidArgumentError(message)
