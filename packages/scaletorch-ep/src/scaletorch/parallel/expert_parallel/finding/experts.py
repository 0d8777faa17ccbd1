"""Find the experts of a module: its stacked parameters, and the number of experts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ..calls import ALL, ROUTED, SORTED, WAYS, takes
from .numbering import Number, count, numbers_of, shapes

_LISTS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
_PLAIN = (bool, int, float, str)
_MARKED = 1  # the expert whose weights are no numbers

# How a class is called, by its experts, the shapes of its tensors and its settings: layers are
# alike.
_known: WeakKeyDictionary[type, dict[Any, str | None]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Found:
    """The experts of one module.

    Attributes:
        name: The module's first name in the model.
        module: It is called as `way` says.
        experts: Their number, of those with weights.
        stacked: Names in the module of parameters with experts along dim 0, a row each or as many.
        buffers: The same of buffers.
        numbers: Where the number itself is kept: modules and names of their attributes.
        way: How it is called, of `WAYS`.
        beyond: How many experts without weights are numbered behind the others.
    """

    name: str
    module: nn.Module
    experts: int
    stacked: tuple[str, ...]
    buffers: tuple[str, ...]
    numbers: tuple[tuple[nn.Module, str], ...]
    way: str = ROUTED
    beyond: int = 0


def find_experts(name: str, module: nn.Module) -> Found:
    """Return what is to be divided of a module.

    Raises:
        InvalidArgumentError: It is not called as experts are, or it cannot be divided.
    """
    _check_lists(name, module)
    _check_call(name, module)
    tensors = dict(_tensors(module))
    number = count(name, module, tensors)
    experts = number.experts
    stacked = tuple(n for n in number.stacked if isinstance(tensors[n], nn.Parameter))
    buffers = tuple(n for n in number.stacked if n not in stacked)
    if not stacked:
        raise InvalidArgumentError(
            f"'{name}' has {experts} experts, but no parameter with as many rows along dim 0: "
            f"{shapes(tensors)}"
        )
    way = _find_way(module, number)
    if way is None:
        raise InvalidArgumentError(_called_otherwise(name, module))
    kept = {experts, experts + number.beyond}
    numbers = tuple(at for at, value in numbers_of(module) if value in kept)
    return Found(name, module, experts, stacked, buffers, numbers, way, number.beyond)


def takes_sorted(module: nn.Module) -> bool:
    """Return whether a module has stacks of experts, and takes rows sorted by expert."""
    numbered = any(at[0] is module for at, _ in numbers_of(module))
    if not (numbered and module._parameters and takes(module, 2)) or takes(module, 1):
        return False
    try:
        return find_experts("", module).way == SORTED
    except InvalidArgumentError:
        return False


def find_list(module: nn.Module) -> tuple[str, int] | None:
    """Return where a module has its experts in a list or dict, and their number; None if nowhere.

    It is one without a forward of its own, or has some inside as long as the number of experts.
    """
    bare = isinstance(module, _LISTS) and not _has_forward(module)
    numbers = {number for _, number in numbers_of(module)}
    numbers = numbers or {len(each) for _, each in _tensors(module) if each.dim() > 2}
    for inner, each in module.named_modules():
        fits = isinstance(each, _LISTS) and (bare or not numbers or len(each) in numbers)
        if fits and any(True for _ in each.parameters()):
            return inner, len(each)
    return None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # torch's own raises


def _check_lists(name: str, module: nn.Module) -> None:
    found = find_list(module)
    if found is not None:
        inner, experts = found
        place = ".".join(part for part in (name, inner) if part)
        raise InvalidArgumentError(
            f"the experts of '{name}' are in a list ('{place}', a "
            f"{type(module.get_submodule(inner)).__name__}), and experts in a list are not "
            f"divided: stack them in parameters [{experts}, ...], one for each weight, in a module "
            'called as experts(hidden, top_k_index, top_k_weights), as "Experts in a list" in '
            "docs/expert_parallel.md shows; with ep_size=1, and etp_size not given, they train as "
            "they are"
        )


def _check_call(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if not _has_forward(module):
        raise InvalidArgumentError(
            f"'{name}' is a {kind} without a forward of its own: put what is done with experts "
            "into a module that is called as experts(hidden, top_k_index, top_k_weights), and "
            "name that one"
        )
    if "forward" in vars(module):
        raise InvalidArgumentError(
            f"the forward of '{name}' was replaced on the instance: divide experts before that"
        )
    if not any(takes(module, len(way.kinds)) for way in WAYS.values()):
        raise InvalidArgumentError(_called_otherwise(name, module))


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


def _find_way(module: nn.Module, number: Number) -> str | None:
    """Return how a module of experts is called, or None if it is called otherwise.

    A routing is known by its three arguments. One or two could mean anything, so a copy of the
    module is called, on this host and with nothing drawn at random: with weights of zeros, but for
    one expert whose weights are not a number. If exactly the rows meant for that one are no
    numbers then, each row is computed by the expert that it is meant for.
    The module itself is not changed, and its values do not matter.
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
    sizes = [1 + (expert % 3) for expert in range(number.experts)]
    if takes(module, 2) and _marks(module, number, sizes, (sizes,)):
        return SORTED
    if takes(module, 1) and _marks(module, number, [2] * number.experts, ()):
        return ALL
    return None


def _marks(module: nn.Module, number: Number, sizes: list[int], given: tuple[Any, ...]) -> bool:
    """Return whether the marked expert's rows are marked, and no others."""
    twin = _twin(module, number)
    own = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) == _MARKED
    stacks = (each for name, each in module.named_parameters() if name in number.stacked)
    for width in dict.fromkeys(size for stack in stacks for size in stack.shape[1:]):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                results = type(twin).forward(twin, torch.ones(sum(sizes), width), *given)
            except Exception:  # whatever its code raises, as of rows too wide
                continue
        if isinstance(results, Tensor) and results.dim() == 2 and len(results) == len(own):
            marked = results.isnan()
            return bool(torch.equal(marked.all(1), own) and torch.equal(marked.any(1), own))
    return False


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
