"""A model cut at named points: each named module begins the next stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ....dist.errors import InvalidArgumentError
from .modules import called_modules, check_name, children, has_parameters, is_placed, listing


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    module: nn.Module
    opened: bool  # a point is inside: its children come next, in its place
    placed: bool


def cut_at(model: nn.Module, points: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return each stage's modules, in the order in which they are registered.

    A module that has a point inside is cut between its children. Placed are modules with
    parameters, torch's own layers, all children of an `nn.Sequential` that is cut (it calls each in
    turn) and the points themselves; any other module stays on all stages.

    Raises:
        InvalidArgumentError: Points that are unknown, named twice or out of order, or a stage
            without parameters.
    """
    for name in points:
        check_name(model, name)
    pieces = list(_pieces(model, "", points))
    _check_order(points, [piece.name for piece in pieces if piece.name in points])
    stages: list[list[_Piece]] = [[]]
    for piece in pieces:
        if piece.name in points:
            stages.append([])
        if piece.placed and not piece.opened:
            stages[-1].append(piece)
    for stage, placed in enumerate(stages):
        if not any(has_parameters(piece.module) for piece in placed):
            raise InvalidArgumentError(_empty(points, stage, placed))
    return tuple(
        tuple(name for piece in placed for name in called_modules(piece.name, piece.module))
        for placed in stages
    )


def _pieces(parent: nn.Module, prefix: str, points: tuple[str, ...]) -> Iterator[_Piece]:
    in_turn = type(parent).forward is nn.Sequential.forward
    for name, module in children(parent, prefix).items():
        opened = any(point.startswith(f"{name}.") for point in points)
        placed = in_turn or name in points or is_placed(module)
        yield _Piece(name, module, opened, placed)
        if opened:
            yield from _pieces(module, f"{name}.", points)


def _check_order(points: tuple[str, ...], registered: list[str]) -> None:
    twice = sorted({name for name in points if points.count(name) > 1})
    if twice:
        message = f"Split(points=...) names {listing(twice)} twice; name each module once"
        raise InvalidArgumentError(message)
    if list(points) != registered:
        raise InvalidArgumentError(
            "Split(points=...) must be in the order in which the model registers its modules, got "
            f"{listing(points)}; expected {listing(registered)}"
        )


def _empty(points: tuple[str, ...], stage: int, placed: list[_Piece]) -> str:
    begins = f"from {points[stage - 1]}" if stage else "from the beginning"
    ends = f"to {points[stage]}" if stage < len(points) else "to the end"
    found = listing(piece.name for piece in placed) or "no modules"
    return (
        f"Split(points={points}) leaves stage {stage}, {begins} {ends}, without parameters: every "
        f"stage needs a layer, and it has {found}; move the points apart or leave one out"
    )
