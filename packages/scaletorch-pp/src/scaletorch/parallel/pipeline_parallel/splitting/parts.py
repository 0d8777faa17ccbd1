"""The parts of a plain model: its list of layers, what is before it, and what is after it."""

from __future__ import annotations

from torch import nn

from ....dist.errors import InvalidArgumentError
from .tree import CONTAINERS, check_name, children, has_parameters, is_placed, listing, within

Parts = tuple[tuple[str, ...], str, tuple[str, ...]]


def find_parts(model: nn.Module) -> Parts:
    """Find the layers of a plain module and what stands before and after them.

    Returns:
        The names before, the name of the list of layers, and the names after.

    Raises:
        InvalidArgumentError: no such list, or several.
    """
    lists = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList) and has_parameters(module)
    ]
    outer = [name for name in lists if not any(within(name, o) for o in lists if o != name)]
    if len(outer) != 1:
        raise InvalidArgumentError(
            "cannot tell which modules are the layers: expected one nn.ModuleList with parameters, "
            f"and {type(model).__name__} has {listing(outer) or 'none'}; pass "
            "Split(first=(...), layers='...', last=(...)), or Split(points=(...)) with the modules "
            f"that begin the next stages, with names out of {listing(children(model))}"
        )
    first: list[str] = []
    last: list[str] = []
    path = outer[0].split(".")
    for depth, child in enumerate(path):
        before, after = _siblings(model, path[:depth], child)
        first += before
        last = after + last  # what encloses the layers comes after what is beside them
    return tuple(first), outer[0], tuple(last)


def check_parts(model: nn.Module, parts: Parts) -> None:
    """Check that a description fits the model.

    Raises:
        InvalidArgumentError: an unknown name, a module named twice, layers that are no container,
            or a module with parameters that is named nowhere.
    """
    first, layers, last = parts
    names = (*first, layers, *last)
    for name in names:
        check_name(model, name)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            if within(name, other) or within(other, name):
                message = f"Split names a module twice: {name!r} and {other!r}; name it once"
                raise InvalidArgumentError(message)
    container = model.get_submodule(layers)
    if not isinstance(container, CONTAINERS):
        raise InvalidArgumentError(
            f"Split(layers={layers!r}) must name an nn.ModuleList, nn.Sequential or nn.ModuleDict "
            f"of layers, and it is a {type(container).__name__}; name the list that holds the "
            "layers, or cut by Split(points=(...))"
        )
    missing = _unnamed(model, names, layers)
    if missing:
        raise InvalidArgumentError(
            f"modules with parameters that Split does not name: {listing(missing)}; add each to "
            "first or last"
        )


def _siblings(model: nn.Module, parent: list[str], child: str) -> tuple[list[str], list[str]]:
    prefix = "".join(f"{part}." for part in parent)
    beside = children(model.get_submodule(".".join(parent)), prefix)
    position = list(beside).index(prefix + child)
    before: list[str] = []
    after: list[str] = []
    for index, (name, module) in enumerate(beside.items()):
        if index != position and is_placed(module):
            (before if index < position else after).append(name)
    return before, after


def _unnamed(model: nn.Module, names: tuple[str, ...], layers: str) -> list[str]:
    """Modules with parameters outside all named ones; those around the layers may have some."""
    named = model.named_parameters(remove_duplicate=False)
    holders = {name.rpartition(".")[0] for name, _ in named}
    return sorted(
        holder
        for holder in holders
        if holder and not within(layers, holder) and not any(within(holder, n) for n in names)
    )
