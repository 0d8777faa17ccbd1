"""Try a proposed plan on one layer of a model, in this process, a rank at a time."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from .plan import Match, Style, look_up
from .resolve import Resolved, resolve


@dataclass
class Unit:
    """A layer of the model, or the whole model for what is in no layer, and its first call."""

    name: str
    module: nn.Module
    linears: dict[str, nn.Module] = field(default_factory=dict)  # name in the unit -> layer
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, module: nn.Module | None = None) -> list[Tensor]:
        """Run the unit, or a copy of it, as it was called first; return the tensors it returns.

        Every run draws the same random numbers, and counts no call.
        """
        module = self.module if module is None else module
        args, kwargs = copy.deepcopy((self.args or (), dict(self.kwargs)))
        with as_before(module):
            random.seed(0)
            torch.manual_seed(0)
            return [*tensors_in(module(*args, **kwargs))]

    def keeps_hidden_states(self) -> bool:
        """Return whether it takes and returns hidden states [B, L, H], of a batch of one."""
        if self.args is None:
            return False
        given = next((x for x in tensors_in((self.args, dict(self.kwargs)))), None)
        found = next(iter(self.run()), None)
        if given is None or found is None or given.shape != found.shape or given.dim() != 3:
            return False
        return given.is_floating_point() and len(given) == 1 < given.shape[1]

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for units of which one stands for all: names, classes, shapes."""
        kinds = [(name, type(m)) for name, m in self.module.named_modules()]
        shapes = [(name, p.shape) for name, p in self.module.named_parameters()]
        return generic(self.name), tuple(kinds), tuple(shapes)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put back, in the end, random generators, and the modules' buffers and attributes."""
    modules = [*model.modules()]
    held = [({**vars(m)}, {**m._buffers}) for m in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters()} - {torch.device("cpu"), torch.device("meta")}
    state = random.getstate()
    try:
        with ExitStack() as forked:
            forked.enter_context(torch.random.fork_rng([]))
            for device in devices:
                forked.enter_context(torch.random.fork_rng([device], device_type=device.type))
            yield
    finally:
        random.setstate(state)
        for module, (attributes, own) in zip(modules, held, strict=True):
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


def generic(name: str, *, most: int = 0) -> str:
    """Return a name with `*` for numbers: all of them, or as many of the first ones."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name, count=most)


def call(model: nn.Module, example: Any) -> None:
    """Call a model with what `suggest_plan` takes."""
    if isinstance(example, Mapping):
        model(**example)
    else:
        model(*(example if isinstance(example, tuple) else (example,)))


def is_linear(name: str, module: nn.Module) -> bool:
    """Return whether a module can be a column or a row layer."""
    return look_up(name, module, name, "column").misfit is None


def features(linear: nn.Module) -> tuple[int, int]:
    """Return how many features a linear layer takes and returns."""
    row, column = (look_up("", linear, "", style) for style in ("row", "column"))
    return row.lengths[0], column.lengths[0]


def computes_the_same(unit: Unit, plan: Mapping[str, Style], tp_size: int) -> bool:
    """Return whether each rank's shards give its rows their inputs, and the unit its outputs."""
    try:
        resolved = resolve(unit.module, plan, tp_size)
    except InvalidArgumentError:
        return False
    rows = [match for match in resolved.matches.values() if match.is_row]
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {match.name: [] for match in rows}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        calls[name].append((args[0], output))

    with ExitStack() as hooks:
        for name in calls:
            row = unit.module.get_submodule(name)
            hooks.callback(row.register_forward_hook(partial(keep, name)).remove)
        expected = unit.run()
    return all(_rank_agrees(unit, resolved, rank, calls, expected) for rank in range(tp_size))


def _rank_agrees(
    unit: Unit,
    resolved: Resolved,
    rank: int,
    calls: Mapping[str, Sequence[tuple[Tensor, Tensor]]],
    expected: Sequence[Tensor],
) -> bool:
    shard, agree = _shard_of(unit.module, resolved, rank), [True]
    rows = [match for match in resolved.matches.values() if match.is_row]
    left = {match.name: [*calls[match.name]] for match in rows}  # calls that are still to come

    def compare(match: Match, _: nn.Module, args: tuple[Any, ...]) -> None:
        (x, _output), cut = left[match.name][0], match.cut
        agree[0] &= cut is not None and _is_close(args[0], cut.take(x, x.dim() - 1, rank))

    def give(match: Match, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        _input, whole = left[match.name].pop(0)
        return whole

    with ExitStack() as hooks:
        for match in rows:
            row = shard.get_submodule(match.name)
            hooks.callback(row.register_forward_pre_hook(partial(compare, match)).remove)
            hooks.callback(row.register_forward_hook(partial(give, match)).remove)
        try:
            returned = unit.run(shard)
        except Exception:  # of whatever code of the model's met shapes that it cannot take
            return False
    # A row that was never called, or less often than in the whole, has not been compared.
    looked = all(calls[name] and not coming for name, coming in left.items())
    same = len(returned) == len(expected) and all(map(_is_close, returned, expected))
    return looked and agree[0] and same


def _shard_of(module: nn.Module, resolved: Resolved, rank: int) -> nn.Module:
    """Return a copy of a module with plain layers that hold a rank's shards."""
    shard = copy.deepcopy(module)
    for match in resolved.matches.values():
        layer = shard.get_submodule(match.name)
        for name, dim in match.dims.items():
            whole, cut = layer._parameters.get(name), match.cut_of(name)
            if whole is not None and cut is not None:
                layer._parameters[name] = nn.Parameter(cut.take(whole, dim, rank).clone())
        if match.layer is not None and match.cut is not None:
            setattr(layer, match.layer.sharded_size, match.cut.sizes[rank])
    names = {inner: name for name, inner in module.named_modules()}
    for inner, values in resolved.attributes.items():
        own = {name: ranks[rank] for name, ranks in values.items()}
        vars(shard.get_submodule(names[inner])).update(own)
    return shard


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return bool(torch.equal(found, expected))
    bound = torch.finfo(found.dtype).eps ** 0.5 * expected.abs().max().clamp(min=1e-6)
    return bool(((found - expected).abs() <= bound).all())
