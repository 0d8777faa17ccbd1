"""Modules that one strategy has divided, which the others leave as they are."""

from __future__ import annotations

from torch import nn

_MARK = "_scaletorch_divided"


def mark_divided(module: nn.Module) -> None:
    """Say of a module that its parameters, and those of modules in it, are divided already.

    Whoever does so sends what the module needs, and says over which ranks gradients are summed.
    """
    vars(module)[_MARK] = True


def divided_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that are marked so, and all in them."""
    marked = [module for module in model.modules() if _MARK in vars(module)]
    return {inner for module in marked for inner in module.modules()}
