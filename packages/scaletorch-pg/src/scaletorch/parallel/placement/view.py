"""The modules and parameters of a model, read once."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class ModelView:
    """The modules of a model, and the owners of each parameter.

    It is not updated: create a new one after a change to the model.

    Args:
        model: Any module.

    Attributes:
        model: The module.
        names: Each module of the model and its first name, in the model's order.
        owners: Each parameter and its owners, as pairs of a module and the name in it. A tied
            parameter has several.

    Example:
        >>> view = ModelView(model)
        >>> tied = [owners for owners in view.owners.values() if len(owners) > 1]
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.names:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners.setdefault(parameter, []).append((module, name))


def modules_within(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules and all their submodules."""
    return {inner for module in modules for inner in module.modules()}
