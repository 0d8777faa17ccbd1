"""Suggest a tensor parallel plan for a model without one, from one forward.

Two linear layers are sharded together, the first over its output features ("column") and the
second over its input features ("row"), if each half of the first one's outputs affects only the
same half of the second one's inputs. NaN values show this: half of the outputs are set to NaN, and
the inputs of all other layers are checked for NaN. The operations between the two layers need not
be known. Each proposal is then tried in this process: the shards of each rank, run on the same
inputs, must give the second layer that rank's slice of its inputs. Others stay replicated.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from ....dist import get_rank
from ...pg_manager.building import eagerly, matching, restored
from ...placement import modules_within
from ..layers.multihead import ParallelMultiheadAttention
from ..styles import Divide, Fused
from .plan import Plan, Style
from .resolve import Resolved, UnplannedError, resolve
from .trial import (
    Unit,
    call,
    computes_the_same,
    copied,
    examples,
    features,
    generic,
    is_linear,
    stand_in,
    structure,
    vocabulary_styles,
)

_MOST_TRIALS = 64  # subsets of integer attributes, which may count heads or features


def suggest_plan(
    model: nn.Module, example: Any, tp_size: int = 2, *, sequence_parallel: bool = False
) -> dict[str, Style]:
    """Return a tensor parallel plan for a model, found by running it and its layers.

    It shards pairs of linear layers that fit together (attention by heads), the vocabulary
    embedding and the head. All other modules stay replicated. The first step of a run compares the
    result with the plain model, as for any plan.

    Args:
        model: The whole model, with values or on the meta device. Only a copy with random values
            runs, with the model's hooks.
        example: The input of one forward: a mapping of arguments by name, a tuple of positional
            ones, or a single one. A short sequence is enough.
        tp_size: Number of ranks; each must get whole heads.
        sequence_parallel: Give the style "sequence_layer" to layers in the model's lists that take
            and return hidden states [B, L, H].

    Returns:
        Pattern of module names -> style; empty if nothing can be sharded.

    Example:
        >>> plan = suggest_plan(model, {"input_ids": torch.arange(8)[None]}, tp_size=2)
        >>> parallelize(model, manager, plan=plan)
    """
    styles: dict[str, Style] = {}
    with _disable_current_modes():
        model, example = stand_in(model, example)
    model.eval()
    device = next(model.parameters()).device
    with (
        _disable_current_modes(),
        device,
        restored(model, every=True),
        torch.no_grad(),
        eagerly(),
        sdpa_kernel(SDPBackend.MATH),  # other backends may treat NaN as masked
    ):
        units = _record(model, example)
        found: dict[tuple[Any, ...], dict[str, Style]] = {}
        for unit in sorted(units, key=lambda unit: unit.args is None):
            known = found.setdefault(unit.signature, {})
            if not known and unit.args is not None:
                known.update(_suggest(unit, tp_size))
            styles |= {f"{unit.name}.{name}".strip("."): style for name, style in known.items()}
        if styles:
            inside = {module for unit in units if unit.name for module in unit.module.modules()}
            planned = {model.get_submodule(name) for name in styles}
            styles |= vocabulary_styles(model, inside | planned, example)
        if sequence_parallel:
            styles = _sequence_layers(model, units, styles) | styles
    return _as_patterns(styles, model)


def _record(model: nn.Module, example: Any) -> list[Unit]:
    """Run the model; return its units with their linear layers and first calls."""
    modules = dict(model.named_modules())
    linears = {name: m for name, m in modules.items() if is_linear(name, m)}
    lists = {name: len(m) for name, m in modules.items() if isinstance(m, nn.ModuleList)}
    listed = [f"{name}.{i}".strip(".") for name, length in lists.items() for i in range(length)]
    units = {name: Unit(name, modules[name]) for name in ["", *listed] if name in modules}
    for unit in [*units.values()]:  # a single layer is no pair
        if unit.name and sum(name.startswith(f"{unit.name}.") for name in linears) < 2:
            del units[unit.name]
    for name, linear in linears.items():
        places = (n for n in units if not n or name.startswith(f"{n}."))
        unit = units[max(places, key=len)]
        unit.linears[name.removeprefix(unit.name).lstrip(".")] = linear

    def note(unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if unit.args is None:
            unit.args, unit.kwargs = copied((args, dict(kwargs)))

    def keep(unit: Unit, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit.returned = copied(output)

    firsts: dict[tuple[Any, ...], Unit] = {}
    with ExitStack() as hooks:
        for unit in units.values():
            first = firsts.setdefault(unit.signature, unit)
            if first is not unit:
                vars(unit.module)["forward"] = first.again
                continue
            hook = partial(note, unit)
            handle = unit.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            hooks.callback(handle.remove)
            hooks.callback(unit.module.register_forward_hook(partial(keep, unit)).remove)
        call(model, example)
    return [unit for unit in units.values() if unit.linears]


def _suggest(unit: Unit, tp_size: int) -> dict[str, Style]:
    """Return the styles of a unit's layers, by their names in the unit."""
    styles: dict[str, Style] = {
        name: "attention"
        for name, module in unit.module.named_modules()
        if ParallelMultiheadAttention.misfit(module) is None
    }
    for row, columns in _pairs(unit).items():
        proposal: dict[str, Style] = {**columns, row: "row"}
        heads = _counts(unit, row, columns)
        of_heads = max(heads - {features(unit.linears[row])[0]}, default=tp_size)
        # `resolve` refuses more ranks than heads, with legal sizes in its message.
        ranks = tp_size if tp_size <= of_heads else 2
        for divided in _trials(unit, proposal, heads):
            if computes_the_same(unit, {**proposal, **divided}, ranks):
                styles |= {**proposal, **divided}
                if not divided and min(heads) < features(unit.linears[row])[0]:
                    around = next(
                        place
                        for place in _parents(row)
                        if all(not place or name.startswith(f"{place}.") for name in columns)
                    )
                    styles |= {around: "sharded"} if around else {}  # its dropout acts on shards
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
        for style in _forms(unit, name, reached[0]) if len(reached) == 1 and reached[0] else ():
            halves = _probe(unit, name, _second_halves(unit.linears[name], style))
            if [*halves] == reached and _is_second_half(halves[reached[0]]):
                found.setdefault(reached[0], {})[name] = style
                break
        else:
            mixed.update(reached)
    columns = {name for of_row in found.values() for name in of_row}
    return {row: of for row, of in found.items() if row not in mixed and row not in columns}


def _forms(unit: Unit, name: str, row: str) -> Iterator[Style]:
    """Yield the styles that fit the possible packings of a layer's output features."""
    yield "column"
    out, taken = features(unit.linears[name])[1], features(unit.linears[row])[0]
    yield from (Fused("column", parts) for parts in (2, 3) if out % (2 * parts) == 0)
    rest, odd = divmod(out - taken, 2)
    if rest > 0 and not odd and rest != taken:  # keys and values of fewer heads than queries
        yield Fused("column", (taken, rest, rest))


def _second_halves(linear: nn.Module, style: Style) -> Tensor:
    """Return the indices of the second half of each packed projection in a layer's outputs."""
    out = features(linear)[1]
    lengths = style.lengths(out) if isinstance(style, Fused) else (out,)
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    halves = zip(starts, lengths, strict=True)
    return torch.cat([torch.arange(start + n // 2, start + n) for start, n in halves])


def _is_second_half(mask: Tensor) -> bool:
    half, odd = divmod(len(mask), 2)
    return not odd and bool(mask[half:].all()) and not bool(mask[:half].any())


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
            hooks.callback(linear.register_forward_pre_hook(partial(look, other)).remove)
        hooks.callback(unit.linears[name].register_forward_hook(spoil).remove)
        try:
            returned = unit.run()
        except Exception:  # raised by model code that checks for NaN
            returned = [torch.tensor(torch.nan)]
    if any(x.is_floating_point() and bool(x.isnan().any()) for x in returned):
        reached[""] = torch.ones(1, dtype=torch.bool)
    return reached


def _counts(unit: Unit, row: str, columns: Mapping[str, Style]) -> set[int]:
    """Return the numbers of features or heads that an integer attribute may stand for."""
    taken = features(unit.linears[row])[0]
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
    outs = {features(unit.linears[name])[1] for name in proposal}
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
        places: dict[str, list[str]] = {}
        for place, name in subset:
            places.setdefault(place, []).append(name)
        yield {place: Divide(*names) for place, names in places.items()}


def _parents(name: str) -> Iterator[str]:
    """Yield the names of the enclosing modules, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _sequence_layers(
    model: nn.Module, units: Sequence[Unit], styles: Iterable[str]
) -> dict[str, Style]:
    """Return "sequence_layer" for the layers of module lists that contain sharded layers."""
    listed = [unit for unit in units if unit.name]
    found: dict[str, Style] = {}
    divided = (
        unit.name.rpartition(".")[0]
        for unit in listed
        if any(name.startswith(f"{unit.name}.") for name in styles)
    )
    for name in dict.fromkeys(divided):
        layers = [u for u in listed if u.name.rpartition(".")[0] == name]
        if all(u.args is None or u.keeps_hidden_states() for u in layers):
            numbers = range(len(model.get_submodule(name)))  # type: ignore[arg-type]
            found |= {f"{name}.{number}".strip("."): "sequence_layer" for number in numbers}
    return found


def resolve_or_suggest(
    model: nn.Module,
    plan: Plan | None,
    tp_size: int,
    *,
    sequence_parallel: bool = False,
    divided: Collection[nn.Module] = (),
) -> Resolved:
    """Resolve a plan, or one suggested by a forward (rank 0 prints it) if the model has none."""
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "divided": divided}
    try:
        return resolve(model, plan, tp_size, **options)
    except UnplannedError as unplanned:
        inside = modules_within(divided)
        names = {name for name, module in model.named_modules() if module in inside}
        key = structure(model), tp_size, sequence_parallel
        new = key not in _from_before
        if new:
            _from_before[key] = _unasked(model, tp_size, sequence_parallel)
        found, reason = _from_before[key]
        found = {n: s for n, s in found.items() if names.isdisjoint(matching(n, names))}
        if not found:
            raise UnplannedError(f"{unplanned}{reason}") from None
    if new and tp_size > 1 and get_rank() == 0:
        sys.stderr.write(f"plan: {type(model).__name__} has none; one forward suggests {found!r}\n")
    return resolve(model, found, tp_size, **options)


# Cache of what `_unasked` returned: a plan is requested for each layout.
_from_before: dict[Any, tuple[dict[str, Style], str]] = {}


def _unasked(
    model: nn.Module, tp_size: int, sequence_parallel: bool
) -> tuple[dict[str, Style], str]:
    """Return a plan from a forward of guessed inputs; if none gives one, the last error's text."""
    reason = ""
    for example in examples(model):
        try:
            found = suggest_plan(model, example, tp_size, sequence_parallel=sequence_parallel)
        except Exception as error:  # raised by model code that does not take these inputs
            line = next(iter(str(error).splitlines()), "")
            reason = f"; a forward of guessed inputs raised {type(error).__name__}: {line}"
            continue
        if found:
            return found, ""
    return {}, reason


def _as_patterns(styles: Mapping[str, Style], model: nn.Module) -> dict[str, Style]:
    """Replace numbers in names by `*` if all modules that then match have the same style."""
    names = [name for name, _ in model.named_modules()]
    found: dict[str, Style] = {}
    for name, style in styles.items():
        for pattern in (generic(name), generic(name, most=1), name):
            if all(styles.get(alike) == style for alike in matching(pattern, names)):
                found[pattern] = style
                break
    return found
