"""A copy of the plain model from before sharding, without memory for weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..dist.errors import InvalidArgumentError
from ..parallel.pipeline_parallel.building import PassThrough


class Plain:
    """A plain model that gets the weights of one unit at a time; its parameters have no memory."""

    def __init__(self, model: nn.Module) -> None:
        """Copy a model; fail if a forward was replaced by a function that holds it."""
        for name, module in model.named_modules():
            if _holds_module(vars(module).get("forward")):
                raise InvalidArgumentError(
                    f"the forward of {name or 'the model'} was replaced by a function that holds it"
                )
        named = model.named_parameters()
        self.hooks = {n: [*p._backward_hooks.values()] for n, p in named if p._backward_hooks}
        memo: dict[int, Any] = {}
        for p in model.parameters():
            empty = torch.empty_like(p, device="meta", requires_grad=False)
            memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
        memo |= {id(b): b.detach().clone() for b in model.buffers()}
        self.model = copy.deepcopy(model, memo)
        self.units = units_of(self.model)
        self.names: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.names.setdefault(first.setdefault(id(parameter), name), []).append(name)
        self._within: set[str] = set()  # units that are running
        own = {name: [*unit.modules()] for name, unit in self.units.items()}
        within = {module for modules in own.values() for module in modules}
        own = {"": [m for m in self.model.modules() if m not in within], **own}
        self._places = {
            name: [
                (module, attribute, first[id(parameter)])
                for module in modules
                for attribute, parameter in module._parameters.items()
                if parameter is not None
            ]
            for name, modules in own.items()
        }
        self.owners = {n: list(dict.fromkeys(p for *_, p in at)) for n, at in self._places.items()}

    def follow(self, stage: nn.Module, device: torch.device) -> None:
        """Move buffers to a device, and copy `training` flags from this rank's stage."""
        there = dict(stage.named_modules(remove_duplicate=False))
        for name, module in self.model.named_modules(remove_duplicate=False):
            if name in there and not isinstance(there[name], PassThrough):
                module.training = there[name].training
            for own, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[own] = buffer.to(device)

    def join_units(self) -> None:
        """Make the whole model the root, for models whose root reads weights of layers."""
        own = [place for places in self._places.values() for place in places]
        self.units, self._places = {}, {"": own}
        self.owners = {"": list(self.names)}

    @contextmanager
    def lent(self, owner: str, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Give a unit, or the root "", its weights by first name for a while."""
        before = [(m, name, m._parameters[name]) for m, name, _ in self._places[owner]]
        for module, attribute, name in self._places[owner]:
            setattr(module, attribute, weights[name])
        try:
            yield
        finally:
            for module, attribute, parameter in before:
                setattr(module, attribute, parameter)

    @contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """Let calls of a unit run normally for a while, as a checkpoint in backward needs."""
        self._within.add(unit)
        try:
            yield
        finally:
            self._within.discard(unit)

    @contextmanager
    def replaced(self, call: Callable[[str, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
        """Replace calls of units for a while, by `call(name, unit's own call, args, kwargs)`."""
        kinds = {unit: type(unit) for unit in self.units.values()}
        for name, unit in self.units.items():
            unit.__class__ = self._answered(type(unit), partial(call, name), name)
        try:
            yield
        finally:
            for unit, kind in kinds.items():
                unit.__class__ = kind

    def _answered(
        self, kind: type[nn.Module], answer: Callable[..., Any], name: str
    ) -> type[nn.Module]:
        """Return a subclass that sends calls to `answer`, except those within the unit."""

        def answered(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if name in self._within:
                return run(*args, **kwargs)
            return answer(self.within(name)(run), args, kwargs)

        def call(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return answered(partial(kind.__call__, unit), args, kwargs)

        def forward(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return answered(partial(kind.forward, unit), args, kwargs)

        return type(kind.__name__, (kind,), {"__call__": call, "forward": forward})


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members, with parameters, of the outermost lists of several, by first name."""
    found: dict[nn.Module, str] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if isinstance(module, nn.ModuleDict):
            is_list = len(module) > 1 and len({type(child) for child in module.children()}) == 1
        for name, child in module.named_children():
            full = f"{prefix}.{name}".lstrip(".")
            if is_list and next(child.parameters(), None) is not None:
                found.setdefault(child, full)
            else:
                visit(full, child)

    visit("", model)
    return {name: module for module, name in found.items()}


def _holds_module(value: Any) -> bool:
    """Return whether a function's closure or defaults hold a module or a module's method."""
    if isinstance(value, partial):  # its arguments are copied
        value = value.func
    if not isinstance(value, FunctionType):
        return False
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return any(
        isinstance(getattr(each, "__self__", each), nn.Module) or _holds_module(each)
        for each in held
    )


def base_of(model: nn.Module) -> nn.Module:
    """Return the model within peft's wrappers, which pass all arguments on; else the model."""
    held = getattr(model, "get_base_model", None)
    while callable(held) and (inner := held()) is not model:
        model, held = inner, getattr(inner, "get_base_model", None)
    return model
