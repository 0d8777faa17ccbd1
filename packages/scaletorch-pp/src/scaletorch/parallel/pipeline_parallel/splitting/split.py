"""`Split`, a description of where to cut a plain module, and `Placement`, each stage's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from torch import nn

from ....dist.errors import InvalidArgumentError
from .balance import distribute_layers, parameter_costs
from .modules import (
    Sections,
    called_modules,
    check_name,
    check_sections,
    children,
    find_sections,
    find_stacks,
    has_parameters,
    is_inside,
    is_placed,
)


@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """A description of how to cut a model, by dotted names; modules not named stay on every stage.

    Name either the model's sections (`first`, `layers`, `last`), whose layers are distributed over
    any number of stages, or the points to cut at. Fields left out are inferred: the layers are the
    only outermost `nn.ModuleList` with parameters (of several, the decoder's; without any, the only
    `nn.Sequential` of layers of one class), and other modules with parameters belong to the first
    stage if the forward calls them before the layers. Without any field, the layers of an encoder
    and of the decoder that attends to it are both distributed, and a model that is an
    `nn.Sequential` itself is cut between the children of its most common class.

    Args:
        first: Modules before the layers (the embedding), placed on the first stage.
        layers: The list of layers to distribute over the stages. None infers it, and `first` and
            `last` too if neither is given.
        last: Modules after the layers (norm, head), placed on the last stage.
        points: Instead of all these, the first modules of the second, third, ... stage, in the
            order in which the model registers them. A point inside a module cuts that module
            between its children, so the module must call them in this order and do nothing else.
        costs: The costs to balance. None distributes layers by count. Numbers, for all of `first`
            together, each layer, and all of `last` together, make the most expensive stage as cheap
            as possible. "parameters" takes the numbers of parameters, which balances memory. These
            are close to the time of layers and of a head, tied or not, but an embedding has many
            parameters and takes no time.

    Example:
        >>> Split(first=("embed_tokens",), layers="layers", last=("norm", "lm_head"))
        Split(first=('embed_tokens',), layers='layers', last=('norm', 'lm_head'))
        >>> Split(points=("layer2", "layer4.1"))
        Split(points=('layer2', 'layer4.1'))
    """

    first: tuple[str, ...] = ()
    layers: str | None = None
    last: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    costs: str | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("first", "last", "points"):
            names = getattr(self, field)
            object.__setattr__(self, field, (names,) if isinstance(names, str) else tuple(names))
        if self.costs is not None and not isinstance(self.costs, str):
            object.__setattr__(self, "costs", tuple(self.costs))

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (f"{f.name}={given[f.name]!r}" for f in fields(self) if given[f.name] != f.default)
        return f"Split({', '.join(shown)})"

    def describes(self) -> bool:
        """Return whether `first`, `layers` or `last` is given."""
        return bool(self.first or self.layers is not None or self.last)


@dataclass(frozen=True, slots=True)
class Placement:
    """A split applied to a number of stages."""

    split: Split  # with the names that were inferred
    # Each stage's modules, in forward order; on other stages a placeholder replaces them. No module
    # is inside another, and each has a forward.
    stages: tuple[tuple[str, ...], ...]

    def homes(self) -> Iterator[tuple[str, int]]:
        """Yield each module that is on a single stage, and that stage."""
        for stage, names in enumerate(self.stages):
            yield from ((name, stage) for name in names)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold the module or parameter of this dotted name."""
        for module, stage in self.homes():
            if is_inside(name, module):
                return (stage,)
        return tuple(range(len(self.stages)))

    def crossed(self) -> tuple[str, ...]:
        """Return the names of modules whose input and output are on different stages."""
        # A module that encloses the last module of a stage has its output on the next stage.
        ends = [names[-1] for names in self.stages[:-1]]
        around: dict[str, list[tuple[str, int]]] = {}
        for name, stage in self.homes():
            path = name.split(".")
            for depth in range(1, len(path)):
                around.setdefault(".".join(path[:depth]), []).append((name, stage))
        return "", *(
            holder
            for holder, inside in around.items()
            if inside[0][1] != inside[-1][1] or inside[-1][0] in ends
        )


def place(model: nn.Module, split: Split | None, num_stages: int) -> Placement:
    """Check the split of a whole model, or infer it if None, and place its modules on stages."""
    if split is not None and not isinstance(split, Split):
        message = f"config must be a Split or None, got {type(split).__name__}"
        raise InvalidArgumentError(message)
    split = split or Split()
    if split.points:
        return _place_by_points(model, split, num_stages)
    if num_stages == 1 and not split.describes():  # nothing to cut, so the layers do not matter
        return Placement(split, ((),))
    stacks = find_stacks(model) if not split.describes() and split.costs is None else []
    first, *layers, last = ((), *stacks, ()) if stacks else sections_of(model, split)
    costs = _costs(model, split, (first, *layers, last))
    ranges = distribute_layers(len(layers), num_stages, costs)
    stages = [[name for index in indices for name in layers[index]] for indices in ranges]
    stages[0] = [*first, *stages[0]]
    stages[-1] = [*stages[-1], *last]
    if not stacks and not _is_sequence(model, split):
        first, container, last = _sections(model, split)
        split = replace(split, first=first, layers=container, last=last)
    return Placement(split, tuple(_called(model, own) for own in stages))


def layers_of(model: nn.Module, split: Split | None = None) -> tuple[str, ...]:
    """Return the names of the layers of `model`, in order.

    Raises:
        InvalidArgumentError: The split does not fit, or names no layers and none can be inferred.
    """
    _, *layers, _ = sections_of(model, split)
    return tuple(name for layer in layers for name in layer)


def sections_of(model: nn.Module, split: Split | None = None) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules before the layers, of each layer, and of those after.

    Raises:
        InvalidArgumentError: As for `layers_of`.
    """
    split = split or Split()
    if _is_sequence(model, split):
        return _sections_of_sequence(model)
    first, layers, last = _sections(model, split)
    names = children(model.get_submodule(layers), f"{layers}.")
    return (first, *((name,) for name in names), last)


def _is_sequence(model: nn.Module, split: Split) -> bool:
    """Return whether the layers are inferred from a model that is an `nn.Sequential` itself."""
    return isinstance(model, nn.Sequential) and has_parameters(model) and not split.describes()


def _sections_of_sequence(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return sections of a sequence: each child of its most common class begins a layer."""
    named = children(model)
    kinds = [type(module) for module in named.values() if has_parameters(module)]
    common, names = max(kinds, key=kinds.count), tuple(named)
    starts = [index for index, module in enumerate(named.values()) if type(module) is common]
    end = starts[-1] + 1
    layers = (names[start:stop] for start, stop in pairwise([*starts, end]))
    return (names[: starts[0]], *layers, names[end:])


def _sections(model: nn.Module, split: Split) -> Sections:
    """Return the names before, of, and after the layers: as described, else as inferred."""
    first, layers, last = split.first, split.layers, split.last
    if layers is None:
        before, layers, after = find_sections(model)
        if not (first or last):
            first, last = before, after
    sections = (first, layers, last)
    check_sections(model, sections)
    return sections


def _costs(
    model: nn.Module, split: Split, sections: Iterable[Iterable[str]]
) -> tuple[float, ...] | None:
    if not isinstance(split.costs, str):
        return split.costs
    if split.costs != "parameters":
        raise InvalidArgumentError(
            f"Split(costs={split.costs!r}): costs must be None, 'parameters', or numbers for the "
            "modules before the layers, each layer, and the modules after them"
        )
    return parameter_costs(model, sections)


def _called(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(n for name in names for n in called_modules(name, model.get_submodule(name)))


def _place_by_points(model: nn.Module, split: Split, num_stages: int) -> Placement:
    if split.describes() or split.costs is not None:
        raise InvalidArgumentError(
            f"{split}: points define all stages, so first, layers, last and costs cannot be given "
            "with them; leave out the points or the others"
        )
    if len(split.points) + 1 != num_stages:
        raise InvalidArgumentError(
            f"{split} makes {len(split.points) + 1} stages and the pipeline has {num_stages}: "
            f"expected {num_stages - 1} points, each the module that begins the next stage"
        )
    return Placement(split, _cut_at(model, split.points))


_Piece = tuple[str, nn.Module, bool]  # the name, the module, and whether it is on one stage


def _cut_at(model: nn.Module, points: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return each stage's modules, in order of registration.

    A module with a point inside is cut between its children. A module is placed on one stage if it
    has parameters, is one of torch's own layers, is a point, or is a child of an `nn.Sequential`
    that is cut (it calls its children in turn). Any other module stays on all stages.
    """
    for name in points:
        check_name(model, name)
    pieces = list(_pieces(model, "", points))
    registered = [name for name, *_ in pieces if name in points]
    if list(points) != registered:
        raise InvalidArgumentError(
            "Split(points=...) must be in the order in which the model registers its modules, got "
            f"{', '.join(points)}; expected {', '.join(registered)}"
        )
    stages: list[dict[str, nn.Module]] = [{}]
    for name, module, placed in pieces:
        if name in points:
            stages.append({})
        if placed:
            stages[-1][name] = module
    for stage, modules in enumerate(stages):
        if not any(map(has_parameters, modules.values())):
            raise InvalidArgumentError(
                f"Split(points={points}) leaves stage {stage} without parameters: every stage "
                f"needs a layer, and it has {', '.join(modules) or 'no modules'}; move the points "
                "apart or leave one out"
            )
    return tuple(_called(model, modules) for modules in stages)


def _pieces(parent: nn.Module, prefix: str, points: tuple[str, ...]) -> Iterator[_Piece]:
    in_turn = type(parent).forward is nn.Sequential.forward
    for name, module in children(parent, prefix).items():
        opened = any(point.startswith(f"{name}.") for point in points)
        # The children of a module that is cut come next, in its place.
        yield name, module, not opened and (in_turn or name in points or is_placed(module))
        if opened:
            yield from _pieces(module, f"{name}.", points)
