"""How many experts a module has, and how their weights lie along dim 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError

_NOT_A_NUMBER_OF_EXPERTS = ("per_", "top", "shared")  # parts of names such as num_experts_per_tok

Tensors = Mapping[str, Tensor]


class Number(NamedTuple):
    """How many experts there are.

    Attributes:
        experts: Those with weights.
        beyond: Those numbered behind them, which have none and which every rank has.
        stacked: Names of tensors with the experts along dim 0: a row each, or as many.
    """

    experts: int
    beyond: int
    stacked: tuple[str, ...]


def count(name: str, module: nn.Module, tensors: Tensors) -> Number:
    """Return the number of a module's experts.

    Raises:
        InvalidArgumentError: It is not to be seen, or is one of several.
    """
    rows = {each.shape[0] for each in tensors.values() if each.dim()}
    numbers = {number for _, number in numbers_of(module)}
    said = numbers & rows
    if not numbers:  # nothing tells the number: stacks of matrices do
        said = {each.shape[0] for each in tensors.values() if each.dim() > 2}
    if not said and len(numbers) == 1 and _has_blocks(module, tensors, *numbers):
        return Number(numbers.pop(), 0, tuple(tensors))
    beyond = _beyond(module, said)
    if len(said) != 1 and not beyond:
        raise InvalidArgumentError(
            f"the number of experts of '{name}' ({type(module).__name__}) is "
            f"{'one of ' + str(sorted(said)) if said else 'not to be seen'}: an attribute such as "
            "num_experts is to say it, and parameters to have as many rows along dim 0; it has "
            f"{shapes(tensors)}"
        )
    stacked = (inner for inner, each in tensors.items() if each.dim() and each.shape[0] in said)
    return Number(min(said), beyond, tuple(stacked))


def numbers_of(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], int]]:
    """Yield attributes that may hold the number of experts, of the module and of its parts."""
    for each in module.modules():
        for attribute, value in vars(each).items():
            excluded = any(part in attribute for part in _NOT_A_NUMBER_OF_EXPERTS)
            if type(value) is int and "experts" in attribute and not excluded:
                yield (each, attribute), value


def shapes(tensors: Tensors) -> str:
    """Return names and shapes."""
    return ", ".join(f"{n} {tuple(t.shape)}" for n, t in tensors.items()) or "no parameters"


def _has_blocks(module: nn.Module, tensors: Tensors, experts: int) -> bool:
    """Return whether all tensors are matrices of as many rows for each expert as a size says."""
    for name, tensor in tensors.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        sizes = {value for value in vars(owner).values() if type(value) is int}
        rows, rest = divmod(tensor.shape[0] if tensor.dim() > 1 else 1, experts)
        if rest or rows not in sizes:
            return False
    return bool(tensors)


def _beyond(module: nn.Module, said: set[int]) -> int:
    """Return how many experts have no weights: what the larger of two numbers has more.

    An attribute such as `zero_expert_num` is to say that; 0 if none does.
    """
    if len(said) != 2:
        return 0
    more = max(said) - min(said)
    return more if more in _without_weights(module) else 0


def _without_weights(module: nn.Module) -> set[int]:
    return {
        value
        for attribute, value in vars(module).items()
        if type(value) is int and "expert" in attribute and "experts" not in attribute
    }
