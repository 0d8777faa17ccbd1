"""What of a module is experts: stacked parameters, lists of modules, and their number."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ..calls import ROUTED, SORTED, WAYS, takes
from ..lists.standing import LoopedDict, LoopedList
from .numbering import count, numbers_of, shapes
from .trying import find_way

_APART = nn.ParameterList, nn.ParameterDict, nn.ModuleDict


@dataclass(frozen=True, slots=True)
class Found:
    """The experts of one module.

    Attributes:
        name: The module's first name in the model.
        module: It is called as `way` says, or is a bare list of experts that the block around it
            loops over.
        experts: Their number, of those with weights.
        stacked: Names in the module of parameters with experts along dim 0, a row each or as many.
        buffers: The same of buffers.
        lists: Names in the module of lists with a module an expert; "" is the module itself.
        numbers: Where the number itself is kept: modules and names of their attributes.
        way: How it is called, of `WAYS`.
        beyond: How many experts without weights are numbered behind the others.
    """

    name: str
    module: nn.Module
    experts: int
    stacked: tuple[str, ...]
    buffers: tuple[str, ...]
    lists: tuple[str, ...]
    numbers: tuple[tuple[nn.Module, str], ...]
    way: str = ROUTED
    beyond: int = 0


def find_experts(name: str, module: nn.Module) -> Found:
    """Return what is to be divided of a module.

    Raises:
        InvalidArgumentError: It is not called as experts are, or it cannot be divided.
    """
    if is_bare_list(module):
        return Found(name, module, len(module), (), (), ("",), ())
    _check_call(name, module)
    lists = {
        inner: each
        for inner, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, nn.ModuleList) and len(each)
    }
    tensors = {inner: each for inner, each in _tensors(module) if not _within(inner, lists)}
    number = count(name, module, lists, tensors)
    experts = number.experts
    stacked = tuple(n for n in number.stacked if isinstance(tensors[n], nn.Parameter))
    buffers = tuple(n for n in number.stacked if n not in stacked)
    divided = tuple(inner for inner, each in lists.items() if len(each) == experts)
    if not stacked and not divided:
        raise InvalidArgumentError(
            f"'{name}' has {experts} experts, but no parameter with as many rows along dim 0 and "
            f"no list of as many modules: {shapes(tensors)}"
        )
    _check_apart(name, module, experts, lists)
    way = find_way(module, number)
    if way is None:
        raise InvalidArgumentError(_called_otherwise(name, module))
    kept = {experts, experts + number.beyond}
    numbers = tuple(at for at, value in numbers_of(module) if value in kept)
    return Found(name, module, experts, stacked, buffers, divided, numbers, way, number.beyond)


def takes_sorted(module: nn.Module) -> bool:
    """Return whether a module has stacks of experts, and takes rows sorted by expert."""
    numbered = any(at[0] is module for at, _ in numbers_of(module))
    if not (numbered and module._parameters and takes(module, 2)) or takes(module, 1):
        return False
    try:
        return find_experts("", module).way == SORTED
    except InvalidArgumentError:
        return False


def is_bare_list(module: nn.Module) -> TypeGuard[nn.ModuleList | nn.ModuleDict]:
    """Return whether a module is a list or dict without a forward, which its block loops over."""
    own = type(module).forward is not nn.Module.forward  # torch's own raises
    plain = isinstance(module, nn.ModuleList | nn.ModuleDict) and not own
    return plain or isinstance(module, LoopedList | LoopedDict)


def _check_call(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if type(module).forward is nn.Module.forward:  # torch's own, which raises
        raise InvalidArgumentError(
            f"'{name}' is a {kind} without a forward of its own, and no nn.ModuleList or "
            "nn.ModuleDict: put experts into one, or what is done with them into a module that is "
            "called as experts(hidden, top_k_index, top_k_weights), and name that one"
        )
    if "forward" in vars(module):
        raise InvalidArgumentError(
            f"the forward of '{name}' was replaced on the instance: divide experts before that"
        )
    if not any(takes(module, len(way.kinds)) for way in WAYS.values()):
        raise InvalidArgumentError(_called_otherwise(name, module))


def _check_apart(
    name: str, module: nn.Module, experts: int, lists: dict[str, nn.ModuleList]
) -> None:
    """Refuse experts in what would stay whole while they are numbered anew."""
    for inner, each in module.named_modules():
        apart = isinstance(each, _APART) and len(each) == experts and not _within(inner, lists)
        if apart and any(True for _ in each.parameters()):
            raise InvalidArgumentError(
                f"'{name}' has a {type(each).__name__} '{inner}' of as many entries as experts, "
                f"which cannot be divided: stack them as one parameter [{experts}, ...], or take "
                "an nn.ModuleList of experts"
            )


def _called_otherwise(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return (
        f"'{name}' ({kind}) is called as {kind}{inspect.signature(module.forward)}, not as "
        f"{', nor as '.join(way.words for way in WAYS.values())}: its routing is decided "
        "elsewhere, so tokens cannot be sent to its experts"
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _within(name: str, lists: dict[str, nn.ModuleList]) -> bool:
    return any(name.startswith(f"{each}." if each else each) for each in lists)
