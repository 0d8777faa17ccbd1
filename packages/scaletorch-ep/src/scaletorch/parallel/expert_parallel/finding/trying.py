"""How experts are called that take rows sorted by expert, found by trying."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..calls import ALL, ROUTED, SORTED, takes
from .numbering import Number

_PLAIN = (bool, int, float, str)
_MARKED = 1  # the expert whose weights are no numbers


# Of a class, by its experts, the shapes of its tensors and its settings: layers are alike.
_known: WeakKeyDictionary[type, dict[Any, str | None]] = WeakKeyDictionary()


def find_way(module: nn.Module, number: Number) -> str | None:
    """Return how a module of experts is called, or None if it is called otherwise.

    A routing is known by its three arguments. One or two could mean anything, so a copy of the
    module is called, on this host and with nothing drawn at random: with weights of zeros, but for
    one expert whose weights are not a number. If exactly the rows meant for that one are no
    numbers then, each row is computed by the expert that it is meant for.

    Args:
        module: The whole module; it is not changed, and its values do not matter.
        number: Its experts.
    """
    if takes(module, 3):
        return ROUTED
    if number.experts <= _MARKED or number.beyond:
        return None
    shapes = tuple((name, each.shape) for name, each in module.state_dict().items())
    settings = (f"{name} {value}" for name, value in vars(module).items() if type(value) in _PLAIN)
    key, known = (number, shapes, *settings), _known.setdefault(type(module), {})
    if key not in known:
        known[key] = _try(module, number)
    return known[key]


def _try(module: nn.Module, number: Number) -> str | None:
    """Return the first way that the module understands, or None."""
    tries = (SORTED, _sizes(number.experts)), (ALL, [2] * number.experts)
    for way, sizes in tries:
        given = (sizes,) if way == SORTED else ()
        if takes(module, 1 + len(given)) and _marks(module, number, sizes, given):
            return way
    return None


def _sizes(experts: int) -> list[int]:
    return [1 + (expert % 3) for expert in range(experts)]


def _marks(module: nn.Module, number: Number, sizes: list[int], given: tuple[Any, ...]) -> bool:
    """Return whether the marked expert's rows are marked, and no others."""
    twin = _twin(module, number)
    own = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) == _MARKED
    for width in _widths(module, number):
        results = _answer(twin, torch.ones(sum(sizes), width), given)
        if isinstance(results, Tensor) and results.dim() == 2 and len(results) == len(own):
            marked = results.isnan()
            return bool(torch.equal(marked.all(1), own) and torch.equal(marked.any(1), own))
    return False


def _answer(twin: nn.Module, rows: Tensor, given: tuple[Any, ...]) -> Any:
    """Return what the module's own forward does, or None if it fails, as with rows too wide."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            return type(twin).forward(twin, rows, *given)
        except Exception:  # whatever its code raises
            return None


def _widths(module: nn.Module, number: Number) -> Iterator[int]:
    """Yield how wide rows may be: the sizes of stacked parameters, each once."""
    shapes = (each.shape for name, each in module.named_parameters() if name in number.stacked)
    yield from dict.fromkeys(size for shape in shapes for size in shape[1:])


def _twin(module: nn.Module, number: Number) -> nn.Module:
    """Return a copy with zeros, which take no memory until they are written to, and one mark."""
    memo: dict[int, Any] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    for name, tensor in named:
        kind = tensor.dtype if not tensor.is_floating_point() else torch.float32
        values = torch.zeros(tensor.shape, dtype=kind)
        if name in number.stacked and values.is_floating_point():
            rows = len(values) // number.experts
            values[_MARKED * rows : (_MARKED + 1) * rows] = torch.nan
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(values, requires_grad=False) if parameter else values
    twin = copy.deepcopy(module, memo)
    return twin.eval()
