"""How a parallelized model wants to be called, and what was seen of it so far."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_PASSING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(slots=True)
class Terms:
    """What a training step has to know of a model.

    Attributes:
        name: The class of the plain model.
        arguments: Of its forward, by name; whether each has to be given.
        takes_any: Its forward takes arguments of any name.
        cp_layout: Which positions each cp rank has; None where `parallelize` did not say.
        shares_sequences: Each tp rank holds a share of every sequence between layers.
        counts_otherwise: Its own positions, where sequences are divided, are not 0, 1, 2, ...
        seen: Its first step has been looked at.
    """

    name: str
    arguments: Mapping[str, bool]
    takes_any: bool
    cp_layout: str | None = None
    shares_sequences: bool = False
    counts_otherwise: bool = False
    seen: bool = False

    def takes(self, argument: str) -> bool:
        """Tell whether the forward can be given this argument by keyword."""
        return self.takes_any or argument in self.arguments

    def needs(self, argument: str) -> bool:
        """Tell whether the forward cannot be called without it."""
        return self.arguments.get(argument, False)


_known: WeakKeyDictionary[nn.Module, Terms] = WeakKeyDictionary()


def read_terms(model: nn.Module) -> Terms:
    """Read how a plain module wants to be called from its forward's signature."""
    parameters = _signature(model)
    arguments = {
        name: parameter.default is parameter.empty
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return Terms(type(model).__name__, arguments, takes_any)


def keep_terms(model: nn.Module, terms: Terms) -> None:
    """Remember the terms of a parallelized model."""
    _known[model] = terms


def terms_of(model: nn.Module) -> Terms:
    """Return the terms of a parallelized model; of one that was put together by hand, its own."""
    if model not in _known:
        plain: Any = model
        while isinstance(getattr(plain, "module", None), nn.Module):
            plain = plain.module
        _known[model] = read_terms(plain)
    return _known[model]


def _signature(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of forward, also where subclasses pass all on to it."""
    own = [vars(model)["forward"]] if "forward" in vars(model) else []
    bases = [base for base in type(model).__mro__ if "forward" in vars(base)]
    forwards = [*own, *(MethodType(vars(base)["forward"], model) for base in bases)]
    parameters: Mapping[str, inspect.Parameter] = {}
    for forward in forwards:
        parameters = inspect.signature(forward).parameters
        if not {parameter.kind for parameter in parameters.values()} >= _PASSING:
            break
    return parameters
