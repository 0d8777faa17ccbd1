"""The modules and parameters of a model, read once for all that look at them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class ModelView:
    """The modules of a model, and which of them own each parameter.

    It is read once and not kept up to date: take a new one after a change to the model.

    Args:
        model: Any module.

    Attributes:
        model: The module.
        names: Each module of the model and its first name, in the model's order.
        owners: Each parameter and its owners, as modules and names in these. A tied parameter has
            several.

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
    """Return modules and all modules inside of them."""
    return {inner for module in modules for inner in module.modules()}
