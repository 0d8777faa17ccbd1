"""Stand-ins for models, and trials of plans on one layer, rank by rank in one process."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import restored
from ..layers.linear import VocabParallelEmbedding
from .plan import Match, Style, look_up
from .resolve import Resolved, resolve

_POOL = 999_983  # number of random values for parameters; a prime, so that rows differ


@dataclass
class Unit:
    """A layer of the model, or the whole model for modules outside layers, and its first call."""

    name: str
    module: nn.Module
    linears: dict[str, nn.Module] = field(default_factory=dict)  # name in the unit -> layer
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    returned: Any = None

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the first call's output, instead of calling a similar layer."""
        return copy.deepcopy(self.returned)

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

    def keeps_hidden_states(self) -> bool:
        """Return whether its first call took and returned hidden states [1, L, H] of one shape."""
        given = next(iter(tensors_in((self.args, dict(self.kwargs)))), None)
        found = next(iter(tensors_in(self.returned)), None)
        if given is None or found is None or given.shape != found.shape or given.dim() != 3:
            return False
        return given.is_floating_point() and len(given) == 1 < given.shape[1]

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for interchangeable units: names, classes and shapes."""
        kinds = [(name, type(m)) for name, m in self.module.named_modules()]
        shapes = [(name, p.shape) for name, p in self.module.named_parameters()]
        return generic(self.name), tuple(kinds), tuple(shapes)


def copied(value: Any) -> Any:
    """Return a copy of inputs or outputs, detached from autograd."""
    return copy.deepcopy(map_tensors(Tensor.detach, value))


def stand_in(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Return a copy of a model, with parameters random but equal on all ranks, and the example."""
    first = next(model.parameters())
    device = torch.device("cpu") if first.is_meta else first.device
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.empty(_POOL, device=device).uniform_(-1, 1, generator=generator)
    drawn: dict[Any, Tensor] = {}
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in memo:
                continue
            key = generic(f"{name}.{parameter_name}"), parameter.shape
            if key not in drawn:
                # A variance of 1 / fan_in, so that activations keep their scale.
                bound = (3 / max(1, parameter.shape[-1])) ** 0.5 if parameter.dim() > 1 else 1
                drawn[key] = _repeated((pool * bound).to(parameter.dtype), parameter.shape)
            memo[id(parameter)] = nn.Parameter(drawn[key])
        for tensor in [*module._buffers.values(), *vars(module).values()]:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                # Inexact ones are between 0.5 and 1.5, boolean ones True, and integer ones 0.
                dtype, inexact = tensor.dtype, torch.can_cast(torch.float32, tensor.dtype)
                values = 1 + pool / 2 if inexact else torch.ones_like(pool) * (dtype == torch.bool)
                memo[id(tensor)] = _repeated(values.to(dtype), tensor.shape)

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, first.dtype if x.is_floating_point() else x.dtype)

    return copy.deepcopy(model, memo), tree_map(moved, example)


def _repeated(values: Tensor, shape: torch.Size) -> Tensor:
    """Return a new tensor of the given shape, filled with repeated values."""
    return values.repeat(-(-shape.numel() // values.numel()))[: shape.numel()].view(shape)


def generic(name: str, *, most: int = 0) -> str:
    """Return a name with `*` for its first `most` numbers; 0 means all."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name, count=most)


def call(model: nn.Module, example: Any) -> None:
    """Call a model with an example as `suggest_plan` takes it."""
    if isinstance(example, Mapping):
        model(**example)
    else:
        model(*(example if isinstance(example, tuple) else (example,)))


def is_linear(name: str, module: nn.Module) -> bool:
    """Return whether a module can be a column or a row layer."""
    return look_up(name, module, name, "column").misfit is None


def features(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    row, column = (look_up("", linear, "", style) for style in ("row", "column"))
    return row.lengths[0], column.lengths[0]


def computes_the_same(unit: Unit, plan: Mapping[str, Style], tp_size: int) -> bool:
    """Return whether every rank's shards give the right inputs of row layers and unit outputs."""
    try:
        resolved = resolve(unit.module, plan, tp_size)
    except InvalidArgumentError:
        return False
    if not _all_ranks_agree(unit, resolved, tp_size):  # distinct values show a buffer's wrong slice
        return False
    # With distinct values in a mask such as `w * b - 1e4 * (1 - b)`, each token would attend to one
    # other only, whichever head it uses.
    with _ones(unit.module):
        return _all_ranks_agree(unit, resolved, tp_size)


@contextmanager
def _ones(module: nn.Module) -> Iterator[None]:
    """Set all floating-point tensors of modules except parameters to 1 inside the block."""
    kept = [x for m in module.modules() for x in [*m._buffers.values(), *vars(m).values()]]
    floating = [x for x in kept if isinstance(x, Tensor) and torch.can_cast(torch.float32, x.dtype)]
    held = [(x, x.clone()) for x in floating]
    try:
        for x in floating:
            x.fill_(1)
        yield
    finally:
        for x, values in reversed(held):
            x.copy_(values)


def _all_ranks_agree(unit: Unit, resolved: Resolved, tp_size: int) -> bool:
    rows = [match for match in resolved.matches.values() if match.is_row]
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {match.name: [] for match in rows}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        calls[name].append((args[0], output.clone()))

    with ExitStack() as hooks:
        _add_noise(unit.module, resolved, None, hooks)
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
    left = {match.name: [*calls[match.name]] for match in rows}  # remaining calls

    def answer(match: Match, x: Tensor) -> Tensor:
        (given, output), cut = left[match.name].pop(0), match.cut
        agree[0] &= cut is not None and _is_close(x, cut.take(given, given.dim() - 1, rank))
        return output.clone()

    for match in rows:
        vars(shard.get_submodule(match.name))["forward"] = partial(answer, match)
    with ExitStack() as hooks:
        _add_noise(shard, resolved, rank, hooks)
        try:
            returned = unit.run(shard)
        except Exception:  # raised by model code for a shape it cannot take
            return False
    # A row layer that was never called, or less often than in the full unit, was not compared.
    looked = all(calls[name] and not coming for name, coming in left.items())
    same = len(returned) == len(expected) and all(map(_is_close, returned, expected))
    return looked and agree[0] and same


def _add_noise(module: nn.Module, resolved: Resolved, rank: int | None, hooks: ExitStack) -> None:
    """Add the same noise to column outputs of the full unit (`rank` None) and of a rank's shard."""
    # Without it equal tokens would hide a wrong order of heads.

    def add(match: Match, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(crc32(match.name.encode()))
        shape = (*output.shape[:-1], sum(match.lengths))
        noise = torch.randn(shape, generator=generator, device="cpu")
        if rank is not None and match.cut is not None:
            noise = match.cut.take(noise, noise.dim() - 1, rank)
        return output + noise.to(output)

    for match in resolved.matches.values():
        if match.is_column:
            layer = module.get_submodule(match.name)
            hooks.callback(layer.register_forward_hook(partial(add, match)).remove)


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
    names = {inner: name for name, inner in module.named_modules()}
    for inner, values in resolved.attributes.items():
        local = {name: ranks[rank] for name, ranks in values.items()}
        vars(shard.get_submodule(names[inner])).update(local)
    return shard


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return bool(torch.equal(found, expected))
    bound = torch.finfo(found.dtype).eps ** 0.5 * expected.abs().max().clamp(min=1e-6)
    return bool(((found - expected).abs() <= bound).all())


def examples(model: nn.Module) -> Iterator[Any]:
    """Yield possible inputs of a forward, by argument names: token ids, images or audio."""
    names, config = signature(model.forward).parameters, getattr(model, "config", None)
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    ids = torch.arange(6, device="cpu")[None] % getattr(table, "num_embeddings", 1)
    found: dict[str, Any] = {n: ids for n in ("input_ids", "decoder_input_ids") if n in names}
    yield found or ids
    drawn = partial(torch.rand, generator=torch.Generator().manual_seed(0), device="cpu")
    for settings in (config, getattr(config, "vision_config", None)):
        size, channels = (getattr(settings, name, None) for name in ("image_size", "num_channels"))
        if "pixel_values" in names and type(size) is int and channels:
            yield {**found, "pixel_values": drawn(1, channels, size, size)}
    bins, length = (getattr(config, n, None) for n in ("num_mel_bins", "max_source_positions"))
    if "input_features" in names and bins and length:
        found.pop("input_ids", None)
        yield {**found, "input_features": drawn(1, bins, 2 * length)}


def structure(model: nn.Module) -> tuple[Any, ...]:
    """Return a cache key for suggestions: classes, int attributes, shapes, and the config."""
    numbers = (
        (name, type(module), *((n, v) for n, v in vars(module).items() if type(v) is int))
        for name, module in model.named_modules()
    )
    shapes = ((name, parameter.shape) for name, parameter in model.named_parameters())
    return *numbers, *shapes, str(getattr(model, "config", ""))


class _Reads(TorchFunctionMode):
    """Count the function calls that take each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # not a read of an attribute such as dtype
            given = (*args, *(kwargs or {}).values())
            self.counts.update(id(x) for x in given if isinstance(x, nn.Parameter))
        return func(*args, **(kwargs or {}))


def vocabulary_styles(model: nn.Module, inside: set[nn.Module], example: Any) -> dict[str, Style]:
    """Return the styles of embeddings outside of layers and heads that no other code reads."""
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    fits = VocabParallelEmbedding.misfit
    tables = {name: module for name, module in outside.items() if fits(module) is None}
    heads = {n: m for n, m in outside.items() if isinstance(m, nn.Linear) and is_linear(n, m)}
    calls: Counter[int] = Counter()

    def count(module: nn.Module, *_: Any) -> None:
        calls.update(id(parameter) for parameter in module.parameters())

    with ExitStack() as hooks:
        for module in {*tables.values(), *heads.values()}:
            hooks.callback(module.register_forward_hook(count).remove)
        reads = hooks.enter_context(_Reads())
        call(model, example)
    for name, table in tables.items():
        rows = len(table.get_parameter("weight"))
        heads_of = {n: head for n, head in heads.items() if features(head)[1] == rows}
        twins = {n: t for n, t in tables.items() if len(t.get_parameter("weight")) == rows}
        for chosen in (twins, {name: table}):  # a teacher has a table and a head of its own
            divided = {*chosen.values(), *heads_of.values()}
            read = {id(p) for module in divided for p in module.parameters()}
            owners = {m for m in model.modules() for p in m._parameters.values() if id(p) in read}
            whole = owners <= divided and all(calls[k] == reads.counts[k] > 0 for k in read)
            if heads_of and whole:
                return {
                    **dict.fromkeys(chosen, "vocab"),
                    **dict.fromkeys(heads_of, "column_gather"),
                }
    return {}
