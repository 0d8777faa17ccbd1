"""Where a plain module is cut: its description, how it is inferred, and who gets which layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from ...dist.errors import InvalidArgumentError

LAYER_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Split:
    """Which modules a pipeline cuts, by dotted names; all others stay on every stage.

    Args:
        first: modules before the layers (the embedding): on the first stage alone.
        layers: the list of layers that is spread over the stages.
        last: modules after the layers (norm, head): on the last stage alone.

    Example:
        >>> Split(first=("embed_tokens",), layers="layers", last=("norm", "lm_head"))
        Split(first=('embed_tokens',), layers='layers', last=('norm', 'lm_head'))
    """

    first: tuple[str, ...] = ()
    layers: str = "layers"
    last: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in ("first", "last"):
            names = getattr(self, part)
            object.__setattr__(self, part, (names,) if isinstance(names, str) else tuple(names))


@dataclass(frozen=True, slots=True)
class Placement:
    """A split applied to a number of stages.

    Attributes:
        split: where the model is cut.
        layers: full names of the layers, in order.
        ranges: each stage's layers, as indices into ``layers``.
    """

    split: Split
    layers: tuple[str, ...]
    ranges: tuple[range, ...]

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Stages that hold the module or parameter of this dotted name."""
        for module, stage in self.homes():
            if within(name, module):
                return (stage,)
        return tuple(range(len(self.ranges)))

    def homes(self) -> Iterator[tuple[str, int]]:
        """Each module that has one stage, and that stage."""
        yield from ((name, 0) for name in self.split.first)
        for stage, indices in enumerate(self.ranges):
            yield from ((self.layers[index], stage) for index in indices)
        yield from ((name, len(self.ranges) - 1) for name in self.split.last)


def distribute_layers(num_layers: int, pp_size: int) -> list[range]:
    """Spread layers over stages in order; none is lost.

    Where they do not divide, earlier stages get one more: the last one has the head and the loss.

    Args:
        num_layers: layers of the model.
        pp_size: stages of the pipeline.

    Returns:
        Each stage's layer indices.

    Raises:
        InvalidArgumentError: a stage would have no layer.

    Example:
        >>> distribute_layers(8, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    if not 1 <= pp_size <= num_layers:
        raise InvalidArgumentError(
            f"{num_layers} layers cannot be spread over {pp_size} stages: every stage needs a "
            f"layer, so the pipeline size must be from 1 to {num_layers}"
        )
    size, more = divmod(num_layers, pp_size)
    starts = [stage * size + min(stage, more) for stage in range(pp_size + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def place(model: nn.Module, split: Split | None, num_stages: int) -> Placement:
    """Check or infer where ``model`` is cut, and spread its layers over the stages.

    Raises:
        InvalidArgumentError: names that do not fit the model, a model whose layers cannot be told,
            or more stages than layers.
    """
    if split is not None and not isinstance(split, Split):
        message = f"config must be a Split or None, got {type(split).__name__}"
        raise InvalidArgumentError(message)
    if split is None and num_stages == 1:  # nothing is cut, whatever the model is like
        return Placement(Split(), (), (range(0),))
    split = infer_split(model) if split is None else checked_split(model, split)
    names = tuple(f"{split.layers}.{key}" for key in model.get_submodule(split.layers)._modules)
    return Placement(split, names, tuple(distribute_layers(len(names), num_stages)))


def infer_split(model: nn.Module) -> Split:
    """Find the layers of a plain module and what stands before and after them.

    The layers are its one outermost `nn.ModuleList` with parameters. Their siblings, and those of
    each module around them, belong to the first stage if registered before and to the last stage if
    after, when they have parameters or are one of torch's own layers (dropout, a norm without
    weights). Any other module without parameters, such as a rotary embedding, stays on all stages.

    Raises:
        InvalidArgumentError: no such list, or several.
    """
    lists = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList) and _has_parameters(module)
    ]
    outer = [name for name in lists if not any(within(name, o) for o in lists if o != name)]
    if len(outer) != 1:
        raise InvalidArgumentError(
            "cannot tell which modules are the layers: expected one nn.ModuleList with parameters, "
            f"and {type(model).__name__} has {_listing(outer) or 'none'}; pass "
            "Split(first=(...), layers='...', last=(...)) with names out of "
            f"{_listing(name for name, _ in model.named_children())}"
        )
    first: list[str] = []
    last: list[str] = []
    path = outer[0].split(".")
    for depth, child in enumerate(path):
        before, after = _siblings(model, path[:depth], child)
        first += before
        last = after + last  # what encloses the layers comes after what is beside them
    return Split(tuple(first), outer[0], tuple(last))


def checked_split(model: nn.Module, split: Split) -> Split:
    """Return ``split`` if it fits ``model``.

    Raises:
        InvalidArgumentError: an unknown name, a module named twice, layers that are no container,
            or a module with parameters that is named nowhere.
    """
    names = (*split.first, split.layers, *split.last)
    for name in names:
        _check_name(model, name)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            if within(name, other) or within(other, name):
                message = f"Split names a module twice: {name!r} and {other!r}"
                raise InvalidArgumentError(message)
    layers = model.get_submodule(split.layers)
    if not isinstance(layers, LAYER_CONTAINERS):
        raise InvalidArgumentError(
            f"Split(layers={split.layers!r}) must name an nn.ModuleList, nn.Sequential or "
            f"nn.ModuleDict of layers, and it is a {type(layers).__name__}"
        )
    missing = _unnamed(model, names, split.layers)
    if missing:
        raise InvalidArgumentError(
            f"modules with parameters that Split does not name: {_listing(missing)}; add each to "
            "first or last"
        )
    return split


def within(name: str, module: str) -> bool:
    """Tell whether a dotted name is ``module`` itself or inside it."""
    return name == module or name.startswith(f"{module}.")


def _siblings(model: nn.Module, parent: list[str], child: str) -> tuple[list[str], list[str]]:
    prefix = "".join(f"{part}." for part in parent)
    children = model.get_submodule(".".join(parent))._modules
    position = list(children).index(child)
    before: list[str] = []
    after: list[str] = []
    for index, (name, module) in enumerate(children.items()):
        if name != child and module is not None and _is_placed(module):
            (before if index < position else after).append(prefix + name)
    return before, after


def _is_placed(module: nn.Module) -> bool:
    of_torch = type(module).__module__.startswith("torch.nn.") and not module._modules
    return of_torch or _has_parameters(module)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _check_name(model: nn.Module, name: str) -> None:
    parent, module = "", model
    for part in name.split("."):
        if part not in module._modules:
            known = _listing(f"{parent}{child}" for child, _ in module.named_children())
            message = f"Split names {name!r}, which the model does not have; it has {known}"
            raise InvalidArgumentError(message)
        parent, module = f"{parent}{part}.", module.get_submodule(part)


def _unnamed(model: nn.Module, names: Iterable[str], layers: str) -> list[str]:
    """Modules with parameters outside all named ones; those around the layers may have some."""
    names = tuple(names)
    named = model.named_parameters(remove_duplicate=False)
    holders = {name.rpartition(".")[0] for name, _ in named}
    return sorted(
        holder
        for holder in holders
        if holder and not within(layers, holder) and not any(within(holder, n) for n in names)
    )


def _listing(names: Iterable[str]) -> str:
    return ", ".join(names)
