"""Find the styles of one layer's linear layers: probe it with NaN, then try each rank's shards.

Two linear layers are sharded together, the first over its output features ("column") and the
second over its input features ("row"), if each half of the first one's outputs affects only the
same half of the second one's inputs. NaN values show this: half of the outputs are set to NaN, and
the inputs of all other layers are checked for NaN. The operations between the two layers need not
be known. Each proposal is then tried in this process: the shards of each rank, run on the same
inputs, must give the second layer that rank's slice of its inputs. Others stay replicated.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import restored
from ..layers.multihead import ParallelMultiheadAttention
from ..styles import Divide, Fused
from .plan import Style, look_up
from .resolve import Resolved, resolve

_MOST_TRIALS = 64  # subsets of integer attributes, which may count heads or features


class Linear(NamedTuple):
    """A module that can be a column or a row layer, and its numbers of features."""

    module: nn.Module
    taken: int  # input features
    out: int


def as_linear(name: str, module: nn.Module) -> Linear | None:
    """Return a linear layer with its sizes, or None for another module."""
    row, column = (look_up(name, module, name, style) for style in ("row", "column"))
    if column.misfit is not None:
        return None
    return Linear(module, row.lengths[0], column.lengths[0])


@dataclass
class Unit:
    """A layer of the model, or the whole model for modules outside layers, and its first call."""

    name: str
    module: nn.Module
    linears: dict[str, Linear] = field(default_factory=dict)  # name in the unit -> layer
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, module: nn.Module | None = None) -> list[Tensor]:
        """Run the unit, or a copy of it, on the inputs of its first call; return its outputs.

        Every run draws the same random numbers and leaves buffers and attributes unchanged.
        """
        module = self.module if module is None else module
        args, kwargs = copy.deepcopy((self.args or (), dict(self.kwargs)))
        with restored(module, every=True):
            random.seed(0)
            torch.manual_seed(0)
            return [*tensors_in(module(*args, **kwargs))]

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for interchangeable units: names, classes and shapes."""
        kinds = [(name, type(m)) for name, m in self.module.named_modules()]
        shapes = [(name, p.shape) for name, p in self.module.named_parameters()]
        return generic(self.name), tuple(kinds), tuple(shapes)


def generic(name: str, *, most: int = 0) -> str:
    """Return a name with `*` for its first `most` numbers; 0 means all."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name, count=most)


def styles_of(unit: Unit, tp_size: int) -> dict[str, Style]:
    """Return the styles of a unit's layers, by their names in the unit."""
    styles: dict[str, Style] = {
        name: "attention"
        for name, module in unit.module.named_modules()
        if ParallelMultiheadAttention.misfit(module) is None
    }
    for row, columns in _pairs(unit).items():
        proposal: dict[str, Style] = {**columns, row: "row"}
        taken, heads = unit.linears[row].taken, _counts(unit, row, columns)
        # `resolve` refuses more ranks than heads, with legal sizes in its message.
        ranks = tp_size if tp_size <= max(heads - {taken}, default=tp_size) else 2
        around = next(p for p in _parents(row) if all(p in _parents(name) for name in columns))
        # Its dropout acts on this rank's heads; `Divide` has that effect, too.
        sharded = {around: "sharded"} if around and min(heads) < taken else {}
        for divided in _trials(unit, proposal, heads):
            plan = {**proposal, **(divided or sharded)}
            if _computes_the_same(unit, plan, ranks):
                styles |= plan
                break
    return styles


def _pairs(unit: Unit) -> dict[str, dict[str, Style]]:
    """Return row layers, each with the column layers whose features it takes in order."""
    found: dict[str, dict[str, Style]] = {}
    mixed: set[str] = set()
    for name in unit.linears:
        if name in found:
            continue
        reached = [*_probe(unit, name, slice(None))]
        row = reached[0] if len(reached) == 1 else ""
        for style in _forms(unit, name, row) if row else ():
            masks = _probe(unit, name, _second_halves(unit.linears[name].out, style))
            half = unit.linears[row].taken // 2
            if {n: x.tolist() for n, x in masks.items()} == {row: [False] * half + [True] * half}:
                found.setdefault(row, {})[name] = style
                break
        else:
            mixed.update(reached)
    columns = {name for of_row in found.values() for name in of_row}
    return {row: of for row, of in found.items() if row not in mixed and row not in columns}


def _forms(unit: Unit, name: str, row: str) -> Iterator[Style]:
    """Yield the styles that fit the possible packings of a layer's output features."""
    yield "column"
    out, taken = unit.linears[name].out, unit.linears[row].taken
    yield from (Fused("column", parts) for parts in (2, 3) if out % (2 * parts) == 0)
    rest, odd = divmod(out - taken, 2)
    if rest > 0 and not odd and rest != taken:  # keys and values of fewer heads than queries
        yield Fused("column", (taken, rest, rest))


def _second_halves(out: int, style: Style) -> Tensor:
    """Return the indices of the second half of each packed projection of `out` features."""
    lengths = style.lengths(out) if isinstance(style, Fused) else (out,)
    return torch.cat([x[len(x) // 2 :] for x in torch.arange(out).split(lengths)])


def _probe(unit: Unit, name: str, features: Tensor | slice) -> dict[str, Tensor]:
    """Set output features of a layer to NaN; return the NaN masks [features] of reached inputs.

    A reached layer gets zeros instead of NaN. The key "" holds the mask of the unit's outputs.
    """
    reached: dict[str, Tensor] = {}

    def spoil(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        output = output.clone()
        output[..., features] = torch.nan
        return output

    def look(other: str, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *more = args
        mask = x.isnan().reshape(-1, x.shape[-1]).any(0).cpu()
        if mask.any():
            reached[other] = reached.get(other, False) | mask
        return (x.nan_to_num(), *more)

    with ExitStack() as hooks:
        for other, linear in unit.linears.items():
            hooks.callback(linear.module.register_forward_pre_hook(partial(look, other)).remove)
        hooks.callback(unit.linears[name].module.register_forward_hook(spoil).remove)
        try:
            returned = unit.run()
        except Exception:  # raised by model code that checks for NaN
            returned = [torch.tensor(torch.nan)]
    if has_nan(returned):
        reached[""] = torch.ones(1, dtype=torch.bool)
    return reached


def has_nan(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors has a NaN."""
    return any(x.is_floating_point() and bool(x.isnan().any()) for x in tensors)


def _counts(unit: Unit, row: str, columns: Mapping[str, Style]) -> set[int]:
    """Return the numbers of features or heads that an integer attribute may stand for."""
    taken = unit.linears[row].taken
    found = {taken}
    for name in columns:  # an output affects the inputs of its head, or of its key's heads
        reached = _probe(unit, name, slice(0, 1))
        if row in reached:
            found.add(taken // max(1, int(reached[row].sum())))
    return found


def _trials(
    unit: Unit, proposal: Mapping[str, Style], heads: set[int]
) -> Iterator[dict[str, Style]]:
    """Yield sets of integer attributes of enclosing modules to divide, the empty set first."""
    outs = {unit.linears[name].out for name in proposal}
    around = dict.fromkeys(place for name in proposal for place in _parents(name))
    attributes = [
        (place, name)
        for place in around
        for name, value in vars(unit.module.get_submodule(place)).items()
        if type(value) is int and value > 1 and value in heads | outs
    ]
    attributes.sort(key=lambda at: ("head" not in at[1], at[1]))
    numbers = range(len(attributes) + 1)
    subsets = chain.from_iterable(combinations(attributes, number) for number in numbers)
    for _, subset in zip(range(_MOST_TRIALS), subsets, strict=False):
        places = dict.fromkeys(place for place, _ in subset)
        yield {place: Divide(*(name for at, name in subset if at == place)) for place in places}


def _parents(name: str) -> Iterator[str]:
    """Yield the names of the enclosing modules, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _computes_the_same(unit: Unit, plan: Mapping[str, Style], tp_size: int) -> bool:
    """Return whether every rank's shards give the right inputs of row layers and unit outputs."""
    try:
        resolved = resolve(unit.module, plan, tp_size)
    except InvalidArgumentError:
        return False
    with ExitStack() as hooks:
        for match in resolved.matches.values():
            if match.is_column:
                hooks.callback(match.module.register_forward_pre_hook(_add_noise).remove)
        # Distinct values in buffers show a wrong slice. But with them in a mask such as
        # `w * b - 1e4 * (1 - b)` each token would attend to one other only, whichever head it uses.
        # So try once more with all tensors but parameters set to 1.
        if not _all_ranks_agree(unit, resolved, tp_size):
            return False
        with restored(unit.module, every=True):
            for module in unit.module.modules():
                for x in [*module._buffers.values(), *vars(module).values()]:
                    if isinstance(x, Tensor) and torch.can_cast(torch.float32, x.dtype):
                        x.fill_(1)
            return _all_ranks_agree(unit, resolved, tp_size)


def _add_noise(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the same noise to the input on all ranks; equal tokens would hide a wrong head order."""
    x, *more = args
    return (x + torch.randn_like(x), *more)


def _all_ranks_agree(unit: Unit, resolved: Resolved, tp_size: int) -> bool:
    rows = [match for match in resolved.matches.values() if match.is_row]
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {match.name: [] for match in rows}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        calls[name].append((args[0].clone(), output.clone()))

    with ExitStack() as hooks:
        for match in rows:
            hook = partial(keep, match.name)
            hooks.callback(match.module.register_forward_hook(hook).remove)
        expected = unit.run()
    agree = (_rank_agrees(unit, resolved, rank, calls, expected) for rank in range(tp_size))
    return all(calls.values()) and all(agree)  # a row layer without calls was not compared


def _rank_agrees(
    unit: Unit,
    resolved: Resolved,
    rank: int,
    calls: Mapping[str, Sequence[tuple[Tensor, Tensor]]],
    expected: Sequence[Tensor],
) -> bool:
    """Run a rank's shards, with the full unit's outputs of row layers, and compare it."""
    shard = _shard_of(unit.module, resolved, rank)
    left = {name: [*of_row] for name, of_row in calls.items()}  # remaining calls
    pairs: list[tuple[Tensor, Tensor]] = []  # inputs of row layers, found and expected

    def answer(name: str, cut: Any, x: Tensor) -> Tensor:
        given, output = left[name].pop(0)
        pairs.append((x.clone(), cut.take(given, given.dim() - 1, rank)))
        return output.clone()

    for match in resolved.matches.values():
        if match.is_row:
            row = shard.get_submodule(match.name)
            vars(row)["forward"] = partial(answer, match.name, match.cut)
    try:
        returned = unit.run(shard)
    except Exception:  # raised by model code for a shape it cannot take
        return False
    if any(left.values()) or len(returned) != len(expected):
        return False
    return all(starmap(_is_close, [*pairs, *zip(returned, expected, strict=True)]))


def _shard_of(module: nn.Module, resolved: Resolved, rank: int) -> nn.Module:
    """Return a copy of a module whose plain layers hold a rank's shards; others are shared."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    for match in resolved.matches.values():
        for name, dim in match.dims.items():
            whole, cut = match.module._parameters.get(name), match.cut_of(name)
            if whole is not None and cut is not None:
                memo[id(whole)] = nn.Parameter(cut.take(whole, dim, rank))
    shard = copy.deepcopy(module, memo)
    for match in resolved.matches.values():
        if match.layer is not None and match.cut is not None:
            layer = shard.get_submodule(match.name)
            setattr(layer, match.layer.sharded_size, match.cut.sizes[rank])
    for inner, values in resolved.attributes.items():
        local = {name: ranks[rank] for name, ranks in values.items()}
        vars(shard.get_submodule(resolved.view.names[inner])).update(local)
    return shard


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return bool(torch.equal(found, expected))
    bound = torch.finfo(found.dtype).eps ** 0.5 * expected.abs().max().clamp(min=1e-6)
    return bool(((found - expected).abs() <= bound).all())
