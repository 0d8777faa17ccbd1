"""What of a module is experts: stacked parameters, lists of modules, and their number."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from .asking import LoopedList

_NOT_A_NUMBER_OF_EXPERTS = ("per_", "top", "shared")  # parts of names such as num_experts_per_tok


@dataclass(frozen=True, slots=True)
class Found:
    """The experts of one module.

    Attributes:
        name: The module's first name in the model.
        module: It is called as `experts(hidden, top_k_index, top_k_weights)`, or is a bare list
            of experts that the block around it loops over.
        experts: Their number.
        stacked: Names in the module of parameters with an expert a row of dim 0.
        buffers: The same of buffers.
        lists: Names in the module of lists with a module an expert; "" is the module itself.
        numbers: Where the number itself is kept: modules and names of their attributes.
    """

    name: str
    module: nn.Module
    experts: int
    stacked: tuple[str, ...]
    buffers: tuple[str, ...]
    lists: tuple[str, ...]
    numbers: tuple[tuple[nn.Module, str], ...]


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
    experts = _number(name, module, lists, tensors)
    rows = [inner for inner, each in tensors.items() if each.shape[:1] == (experts,)]
    stacked = tuple(n for n in rows if isinstance(tensors[n], nn.Parameter))
    buffers = tuple(n for n in rows if n not in stacked)
    divided = tuple(inner for inner, each in lists.items() if len(each) == experts)
    if not stacked and not divided:
        raise InvalidArgumentError(
            f"'{name}' has {experts} experts, but no parameter with as many rows along dim 0 and "
            f"no list of as many modules: {_shapes(tensors)}"
        )
    numbers = tuple(at for at, number in _numbers(module) if number == experts)
    return Found(name, module, experts, stacked, buffers, divided, numbers)


def is_bare_list(module: nn.Module) -> TypeGuard[nn.ModuleList]:
    """Return whether a module is a list without a forward, whose block loops over its elements."""
    own = type(module).forward is not nn.Module.forward  # torch's own raises
    return isinstance(module, LoopedList) or (isinstance(module, nn.ModuleList) and not own)


def _check_call(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if type(module).forward is nn.Module.forward:  # torch's own, which raises
        raise InvalidArgumentError(
            f"'{name}' is a {kind} without a forward of its own, and no nn.ModuleList: put experts "
            "into one, or what is done with them into a module that is called as experts(hidden, "
            "top_k_index, top_k_weights), and name that one"
        )
    if "forward" in vars(module):
        raise InvalidArgumentError(
            f"the forward of '{name}' was replaced on the instance: divide experts before that"
        )
    if not takes_routing(module):
        raise InvalidArgumentError(
            f"'{name}' ({kind}) is called as {kind}{inspect.signature(module.forward)}, not as "
            "experts(hidden, top_k_index, top_k_weights): its routing is decided elsewhere, so "
            "tokens cannot be sent to its experts"
        )


def takes_routing(module: nn.Module) -> bool:
    """Return whether a module can be called with hidden states, indices and weights alone."""
    try:
        inspect.signature(module.forward).bind(None, None, None)
    except TypeError:
        return False
    return True


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _within(name: str, lists: dict[str, nn.ModuleList]) -> bool:
    return any(name.startswith(f"{each}." if each else each) for each in lists)


def _numbers(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], int]]:
    """Yield attributes that may hold the number of experts, of the module and of its parts."""
    for each in module.modules():
        for attribute, value in vars(each).items():
            excluded = any(part in attribute for part in _NOT_A_NUMBER_OF_EXPERTS)
            if type(value) is int and "experts" in attribute and not excluded:
                yield (each, attribute), value


def _number(
    name: str, module: nn.Module, lists: dict[str, nn.ModuleList], tensors: dict[str, Tensor]
) -> int:
    lengths = {len(each) for each in lists.values()}
    rows = {each.shape[0] for each in tensors.values() if each.dim()}
    numbers = {number for _, number in _numbers(module)}
    said = numbers & (lengths | rows)
    if not numbers:  # nothing tells the number: stacks of matrices do, or the only list
        said = {each.shape[0] for each in tensors.values() if each.dim() > 2} | lengths
    if len(said) != 1:
        raise InvalidArgumentError(
            f"the number of experts of '{name}' ({type(module).__name__}) is "
            f"{'one of ' + str(sorted(said)) if said else 'not to be seen'}: an attribute such as "
            "num_experts is to say it, and parameters to have as many rows along dim 0 (or a list "
            f"as many modules); it has {_shapes(tensors)}"
        )
    return said.pop()


def _shapes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{n} {tuple(t.shape)}" for n, t in tensors.items()) or "no parameters"
