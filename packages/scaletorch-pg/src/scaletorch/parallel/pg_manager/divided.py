"""Modules that one strategy has divided, which the others leave as they are."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from ...dist import group_ranks

_MARK = "_scaletorch_divided"


def mark_divided(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Say of a module that its parameters, and those of modules in it, are divided already.

    Whoever does so sends what the module needs, and says over which ranks gradients are summed.

    Args:
        module: The module.
        group: The ranks that have the others; None leaves them unsaid.
    """
    vars(module)[_MARK] = () if group is None else tuple(group_ranks(group))


def divided_modules(model: nn.Module, over: ProcessGroup | None = None) -> set[nn.Module]:
    """Return the modules that are marked so, and all in them.

    Args:
        model: Any module.
        over: Leave out what is divided over ranks of which this group has this one alone.
    """
    ranks = None if over is None else {*group_ranks(over)}
    marked = [module for module in model.modules() if _is_divided(module, ranks)]
    return {inner for module in marked for inner in module.modules()}


def _is_divided(module: nn.Module, ranks: set[int] | None) -> bool:
    of = vars(module).get(_MARK)
    return of is not None and (ranks is None or not of or len(ranks.intersection(of)) > 1)
