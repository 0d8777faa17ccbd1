"""Modules of a plain model by their dotted names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ....dist.errors import InvalidArgumentError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def within(name: str, module: str) -> bool:
    """Tell whether a dotted name is ``module`` itself or inside it."""
    return name == module or name.startswith(f"{module}.")


def children(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the modules right inside one, by dotted name; one under two names comes twice."""
    return {prefix + key: child for key, child in module._modules.items() if child is not None}


def has_parameters(module: nn.Module) -> bool:
    """Tell whether there are parameters in a module or inside it."""
    return next(module.parameters(), None) is not None


def is_placed(module: nn.Module) -> bool:
    """Tell whether a module belongs to one stage, not to all, if nobody says so.

    It does if it has parameters or is one of torch's own layers (dropout, a norm without weights).
    """
    own_layer = type(module).__module__.startswith("torch.nn.") and not module._modules
    return has_parameters(module) or (own_layer and not isinstance(module, CONTAINERS))


def changes_nothing(module: nn.Module) -> bool:
    """Tell whether a module returns what it is given, such as a dropout that drops nothing."""
    drops = isinstance(module, _DropoutNd) and module.training and module.p
    return isinstance(module, nn.Identity | _DropoutNd) and not drops


def called_modules(name: str, module: nn.Module) -> Iterator[str]:
    """Yield ``name``, or what is inside where the module, such as a list, has no forward itself."""
    inside = children(module, f"{name}.")
    if not inside or module._parameters or type(module).forward is not nn.Module.forward:
        yield name
        return
    for child_name, child in inside.items():
        yield from called_modules(child_name, child)


def check_name(model: nn.Module, name: str) -> None:
    """Check that the model has a module of this dotted name.

    Raises:
        InvalidArgumentError: it has none.
    """
    parent, module = "", model
    for part in name.split("."):
        inside = children(module, parent)
        if parent + part not in inside:
            known = listing(inside) or f"no modules in {parent.rstrip('.')}"
            message = f"Split names {name!r}, which the model does not have; it has {known}"
            raise InvalidArgumentError(message)
        parent, module = f"{parent}{part}.", inside[parent + part]


def listing(names: Iterable[str]) -> str:
    """Return names for a message."""
    return ", ".join(names)
