"""Suggest a tensor parallel plan for a model without one, from one forward of a copy."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ....dist import get_rank
from ....dist.building import map_tensors
from ...pg_manager.building import eagerly, matching, restored
from ...placement import modules_within
from ..layers.linear import VocabParallelEmbedding
from .plan import Plan, Style
from .resolve import Resolved, UnplannedError, resolve
from .trial import Unit, as_linear, generic, styles_of

_POOL = 999_983  # number of random values for parameters; a prime, so that rows differ


def suggest_plan(model: nn.Module, example: Any, tp_size: int = 2) -> dict[str, Style]:
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

    Returns:
        Pattern of module names -> style; empty if nothing can be sharded.

    Example:
        >>> plan = suggest_plan(model, {"input_ids": torch.arange(8)[None]}, tp_size=2)
        >>> parallelize(model, manager, plan=plan)
    """
    styles: dict[str, Style] = {}
    with _disable_current_modes():
        model, example = _stand_in(model, example)
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
                known.update(styles_of(unit, tp_size))
            styles |= {f"{unit.name}.{name}".strip("."): style for name, style in known.items()}
        if styles:
            inside = {module for unit in units if unit.name for module in unit.module.modules()}
            planned = {model.get_submodule(name) for name in styles}
            styles |= _vocabulary_styles(model, inside | planned, example)
    return _as_patterns(styles, model)


def _stand_in(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
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


def _call(model: nn.Module, example: Any) -> None:
    """Call a model with an example as `suggest_plan` takes it."""
    if isinstance(example, Mapping):
        model(**example)
    else:
        model(*(example if isinstance(example, tuple) else (example,)))


def _record(model: nn.Module, example: Any) -> list[Unit]:
    """Run the model; return its units with their linear layers and first calls."""
    modules = dict(model.named_modules())
    found = {name: as_linear(name, module) for name, module in modules.items()}
    linears = {name: linear for name, linear in found.items() if linear is not None}
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
            unit.args, unit.kwargs = _copied((args, dict(kwargs)))

    def keep(unit: Unit, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit.returned = _copied(output)

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
        _call(model, example)
    return [unit for unit in units.values() if unit.linears]


def _copied(value: Any) -> Any:
    """Return a copy of inputs or outputs, detached from autograd."""
    return copy.deepcopy(map_tensors(Tensor.detach, value))


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


def _vocabulary_styles(model: nn.Module, inside: set[nn.Module], example: Any) -> dict[str, Style]:
    """Return the styles of embeddings outside of layers and heads that no other code reads."""
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    fits = VocabParallelEmbedding.misfit
    tables = {name: module for name, module in outside.items() if fits(module) is None}
    heads = {n: m for n, m in outside.items() if isinstance(m, nn.Linear) and as_linear(n, m)}
    calls: Counter[int] = Counter()

    def count(module: nn.Module, *_: Any) -> None:
        calls.update(id(parameter) for parameter in module.parameters())

    with ExitStack() as hooks:
        for module in {*tables.values(), *heads.values()}:
            hooks.callback(module.register_forward_hook(count).remove)
        reads = hooks.enter_context(_Reads())
        _call(model, example)
    for name, table in tables.items():
        rows = len(table.get_parameter("weight"))
        heads_of = {n: head for n, head in heads.items() if head.out_features == rows}
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
        key = _structure(model), tp_size
        new = key not in _from_before
        if new:
            _from_before[key] = _unasked(model, tp_size)
        found, reason = _from_before[key]
        found = {n: s for n, s in found.items() if names.isdisjoint(matching(n, names))}
        if not found:
            raise UnplannedError(f"{unplanned}{reason}") from None
    if new and tp_size > 1 and get_rank() == 0:
        sys.stderr.write(f"plan: {type(model).__name__} has none; one forward suggests {found!r}\n")
    return resolve(model, found, tp_size, **options)


# Cache of what `_unasked` returned: a plan is requested for each layout.
_from_before: dict[Any, tuple[dict[str, Style], str]] = {}


def _unasked(model: nn.Module, tp_size: int) -> tuple[dict[str, Style], str]:
    """Return a plan from a forward of guessed inputs; if none gives one, the last error's text."""
    reason = ""
    for example in _examples(model):
        try:
            found = suggest_plan(model, example, tp_size)
        except Exception as error:  # raised by model code that does not take these inputs
            line = next(iter(str(error).splitlines()), "")
            reason = f"; a forward of guessed inputs raised {type(error).__name__}: {line}"
            continue
        if found:
            return found, ""
    return {}, reason


def _examples(model: nn.Module) -> Iterator[Any]:
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


def _structure(model: nn.Module) -> tuple[Any, ...]:
    """Return a cache key for suggestions: classes, int attributes, shapes, and the config."""
    numbers = (
        (name, type(module), *((n, v) for n, v in vars(module).items() if type(v) is int))
        for name, module in model.named_modules()
    )
    shapes = ((name, parameter.shape) for name, parameter in model.named_parameters())
    return *numbers, *shapes, str(getattr(model, "config", ""))
