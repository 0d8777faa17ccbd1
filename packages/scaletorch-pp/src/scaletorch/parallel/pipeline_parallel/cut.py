"""The cut itself: modules of other stages are replaced, in place, by ones that pass through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .split import Placement


class PassThrough(nn.Module):
    """Stands for a module of another stage: returns its first argument.

    An embedding that is given ids, not hidden states, returns zero: what a model adds to hidden
    states, such as embedded positions, was added on the first stage. Plain attributes of the
    module (numbers, strings) are kept, since forwards read them.

    Args:
        replaced: the module that it stands for; not kept.
        where: what it was and where it is, for messages.
    """

    def __init__(self, replaced: nn.Module, where: str) -> None:
        super().__init__()
        self.train(replaced.training)
        for name, value in vars(replaced).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | str):
                setattr(self, name, value)
        self._where = where
        self._embeds = hasattr(replaced, "num_embeddings")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first positional argument, or else the first keyword argument."""
        value = args[0] if args else next(iter(kwargs.values()))
        if self._embeds and isinstance(value, Tensor) and not value.is_floating_point():
            return torch.zeros((), device=value.device)
        return value

    def __getattr__(self, name: str) -> Any:
        """Say where the module is when something of it is missing here."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            where = self.__dict__.get("_where", "a module of another stage")
            message = f"{where}, and its attribute {name!r} is not available here"
            raise AttributeError(message) from error

    def extra_repr(self) -> str:
        """Name what it stands for."""
        return self._where


def cut(model: nn.Module, placement: Placement, stage: int) -> list[nn.Module]:
    """Leave only one stage's modules in ``model``; nothing keeps the others alive.

    Args:
        model: the whole model; changed in place, names stay.
        placement: which module belongs to which stage.
        stage: the stage to keep.

    Returns:
        The stage's layers, in order.
    """
    for name, home in placement.homes():
        if home != stage:
            _replace(model, name, home)
    return [model.get_submodule(placement.layers[i]) for i in placement.ranges[stage]]


def _replace(model: nn.Module, name: str, home: int) -> None:
    module = model.get_submodule(name)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # no forward of its own: index it instead
        for child in list(module._modules):
            _replace(model, f"{name}.{child}", home)
        return
    parent, _, leaf = name.rpartition(".")
    where = f"{name} is on stage {home} of the pipeline"
    model.get_submodule(parent)._modules[leaf] = PassThrough(module, where)
