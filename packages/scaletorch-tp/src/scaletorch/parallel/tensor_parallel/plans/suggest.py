"""Suggest a tensor parallel plan for a model without one, from one forward of a copy."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from ....dist import get_rank
from ....dist.building import map_tensors, tensors_in
from ...pg_manager.building import eagerly, matching, restored
from ...placement import ModelView, modules_within
from ..layers.linear import VocabParallelEmbedding
from .plan import Plan, Style
from .resolve import Resolved, UnplannedError, resolve
from .trial import Unit, as_linear, generic, has_nan, styles_of

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
        for unit in units:
            if unit.args is not None and unit.signature not in found:
                found[unit.signature] = styles_of(unit, tp_size)
        for unit in units:
            known = found.get(unit.signature, {})
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
        held = {**module._parameters, **module._buffers, **vars(module)}
        for own_name, tensor in held.items():
            if not isinstance(tensor, Tensor) or id(tensor) in memo:
                continue
            dtype, shape = tensor.dtype, tensor.shape
            if isinstance(tensor, nn.Parameter):  # layers share the values of one
                # A variance of 1 / fan_in, so that activations keep their scale.
                bound = (3 / max(1, shape[-1])) ** 0.5 if len(shape) > 1 else 1
                key = generic(f"{name}.{own_name}"), shape
                if key not in drawn:
                    drawn[key] = _repeated((pool * bound).to(dtype), shape)
                memo[id(tensor)] = nn.Parameter(drawn[key])
            else:  # inexact ones are between 0.5 and 1.5, boolean ones True, and integer ones 0
                inexact = torch.can_cast(torch.float32, dtype)
                values = 1 + pool / 2 if inexact else torch.ones_like(pool) * (dtype == torch.bool)
                memo[id(tensor)] = _repeated(values.to(dtype), shape)

    def moved(x: Tensor) -> Tensor:
        return x.to(device, first.dtype if x.is_floating_point() else x.dtype)

    return copy.deepcopy(model, memo), map_tensors(moved, example)


def _repeated(values: Tensor, shape: torch.Size) -> Tensor:
    """Return a new tensor of the given shape, filled with repeated values."""
    return values.repeat(-(-shape.numel() // values.numel()))[: shape.numel()].view(shape)


def _call(model: nn.Module, example: Any) -> Any:
    """Call a model with an example as `suggest_plan` takes it."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*(example if isinstance(example, tuple) else (example,)))


def _record(model: nn.Module, example: Any) -> list[Unit]:
    """Run the model; return its units with their linear layers and first calls."""
    modules = dict(model.named_modules())
    found = {name: as_linear(name, module) for name, module in modules.items()}
    linears = {name: linear for name, linear in found.items() if linear is not None}
    units = {"": Unit("", model)}
    for name, module in modules.items():
        of_list = isinstance(modules[name.rpartition(".")[0]], nn.ModuleList) and name
        if of_list and sum(n.startswith(f"{name}.") for n in linears) > 1:  # one layer is no pair
            units[name] = Unit(name, module)
    for name, linear in linears.items():
        places = (n for n in units if not n or name.startswith(f"{n}."))
        unit = units[max(places, key=len)]
        unit.linears[name.removeprefix(unit.name).lstrip(".")] = linear

    def note(unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if unit.args is None:
            given = map_tensors(Tensor.detach, (args, dict(kwargs)))
            unit.args, unit.kwargs = copy.deepcopy(given)

    with ExitStack() as hooks:
        for unit in units.values():
            hook = partial(note, unit)
            handle = unit.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            hooks.callback(handle.remove)
        _call(model, example)
    return [unit for unit in units.values() if unit.linears]


def _vocabulary_styles(model: nn.Module, inside: set[nn.Module], example: Any) -> dict[str, Style]:
    """Return the styles of embeddings outside of layers and heads that no other code reads."""
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    fits = VocabParallelEmbedding.misfit
    tables = {name: module for name, module in outside.items() if fits(module) is None}
    heads = {n: m for n, m in outside.items() if isinstance(m, nn.Linear) and as_linear(n, m)}
    rows = {name: len(table.get_parameter("weight")) for name, table in tables.items()}
    features = {name: head.out_features for name, head in heads.items()}
    for size in dict.fromkeys(rows.values()):
        found: dict[str, Style] = {n: "vocab" for n, number in rows.items() if number == size}
        found |= {n: "column_gather" for n, number in features.items() if number == size}
        if size in features.values() and _only_they_read(model, found, example):
            return found
    return {}


def _only_they_read(model: nn.Module, names: Iterable[str], example: Any) -> bool:
    """Return whether these modules alone own and read their parameters, each at least once.

    Otherwise NaN in the parameters reaches the outputs, though their forwards have the old values.
    """
    modules = {name: model.get_submodule(name) for name in names}
    inside = {parameter for module in modules.values() for parameter in module.parameters()}
    owners = ModelView(model).owners
    if not {owner for x in inside for owner, _ in owners[x]} <= {*modules.values()}:
        return False
    memo: dict[int, Any] = {
        id(x): nn.Parameter(torch.full_like(x, torch.nan)) if x in inside else x for x in owners
    }
    twin, read = copy.deepcopy(model, memo), set[nn.Parameter]()

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        read.update(module.parameters())
        return module.forward(*args, **kwargs)

    for name, module in modules.items():
        vars(twin.get_submodule(name))["forward"] = partial(forward, module)
    try:
        outputs = [*tensors_in(_call(twin, example))]
    except Exception:  # raised by model code that checks for NaN
        return False
    return read == inside and bool(outputs) and not has_nan(outputs)


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
    except UnplannedError as error:
        unplanned = str(error)
    found, reason = dict[str, Style](), ""
    for example in _examples(model):
        try:
            found = suggest_plan(model, example, tp_size)
        except Exception as error:  # raised by model code that does not take these inputs
            line = next(iter(str(error).splitlines()), "")
            reason = f"; a forward of guessed inputs raised {type(error).__name__}: {line}"
            continue
        if found:
            break
    inside = modules_within(divided)
    names = [name for name, module in model.named_modules() if module in inside]
    found = {pattern: style for pattern, style in found.items() if not matching(pattern, names)}
    if not found:
        raise UnplannedError(f"{unplanned}{reason}")
    if tp_size > 1 and get_rank() == 0:
        sys.stderr.write(f"plan: {type(model).__name__} has none; one forward suggests {found!r}\n")
    return resolve(model, found, tp_size, **options)


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
