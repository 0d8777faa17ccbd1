"""The training step of a rehearsal: a real one, in float32 if it fits, that leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...dist import get_local_size
from ...dist.building import tensors_in
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.data_parallel.building import NARROW, widened
from ...parallel.pg_manager.building import eagerly, restored
from ...parallel.pipeline_parallel.building import PassThrough, forms_cast
from ..forward import Terms, pipeline_of, rehearsing, terms_of, wait_for_parameters
from ..plain import Plain
from .batch import SmallBatch, is_narrow
from .recording import Records, recorded

Step = Callable[..., Tensor]


@contextmanager
def as_for_a_rehearsal(
    model: DataParallelBucket, plain: Plain, terms: Terms, *, wide: bool
) -> Iterator[None]:
    """Run a step as a rehearsal, in float32 or not, and restore the model afterwards.

    Gradients are summed even in `no_sync`, dropout is off, and parameters are not zero.
    """
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    stage = pipeline_of(model).module
    terms.seen = 0
    wait_for_parameters(model)
    try:
        wider = in_float32(model, plain.model) if wide else nullcontext()
        with rehearsing(), restored(stage), wider, without_zeros(stage), without_dropout():
            yield
    finally:
        model.reset()
        model.require_backward_grad_sync = before


def trained(
    cut: Callable[..., SmallBatch],
    model: DataParallelBucket,
    plain: Plain,
    step: Step,
) -> tuple[SmallBatch, Tensor, Records]:
    """Train a small batch, with all positions if few fail; return it, loss and recorded calls."""

    def train(small: SmallBatch) -> tuple[SmallBatch, Tensor, Records]:
        pipeline = pipeline_of(model)
        with recorded(pipeline, plain.names_of_units()) as records, eagerly():
            loss = step(small.micro_batches)
        for record in (each for held in records.values() for each in held):
            record.scale_gradients(terms_of(model).correction)
        return small, loss, records

    small = cut(shortens=True)
    try:
        return train(small)
    except Exception as error:  # the model may accept one length only
        if not small.is_short or isinstance(error, torch.OutOfMemoryError):
            raise
        model.reset()
    return train(cut(shortens=False))


# Smaller parameters may hide what they multiply: a branch that starts at zero, a scale of 1e-6.
_SMALL = 1e-3


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Replace, alike on all ranks, parameters that are nearly zero and would hide errors."""
    with torch.no_grad():
        before = [(each, each.clone(), values) for each, values in _other_values(model)]
        for parameter, _, values in before:
            parameter.copy_(values)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, own, _ in before:
                parameter.copy_(own)


def _other_values(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter that is nearly zero, with values to replace it."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel() or parameter.is_meta:
            continue
        if parameter.detach().abs().max() < _SMALL:
            numbers = torch.arange(parameter.numel(), device=parameter.device)
            pattern = numbers.double().cos_().mul_(0.5 / max(parameter.shape[-1:] or (1,)) ** 0.5)
            yield parameter, pattern.to(parameter.dtype).view_as(parameter)


_BYTES = 8  # per parameter: its value and its gradient in float32


def wish_for_float32(model: DataParallelBucket, device: torch.device) -> tuple[bool, str]:
    """Return whether a model runs in 16 bits, and the reason why float32 is impossible, or ""."""
    narrow = [p for p in model.parameters() if is_narrow(p)]
    travels = any(manager.reduction.dtype in NARROW for manager in model.bucket_managers)
    casts = torch.is_autocast_enabled(device.type)
    fits = _BYTES * sum(p.numel() for p in narrow) <= _free(device) // 2
    plain = all(type(p) is nn.Parameter for p in narrow)  # a subclass may store values its own way
    problem = "" if fits else "for which a rank has too little memory"
    if not plain:
        problem = "which the class of its parameters may not be"
    return bool(narrow) or travels or casts, problem


def _free(device: torch.device) -> int:
    """Return the free bytes of a device; on a CPU, the host's free memory / its local ranks."""
    if device.type == "cpu":
        free: int = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return free // get_local_size()
    module = torch.get_device_module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + kept)


@contextmanager
def in_float32(model: DataParallelBucket, plain: nn.Module) -> Iterator[None]:
    """Use float32 for parameters, gradients, buffers and messages for a while, without autocast.

    Stand-ins for other stages' modules change too: code may take a dtype from them.
    """
    device = next(model.parameters(), torch.empty(0)).detach()
    pipeline = pipeline_of(model)
    passing = [each for each in pipeline.modules() if isinstance(each, PassThrough)]
    passing.extend(pipeline.runtime.chunks.passing())
    with ExitStack() as undo:
        undo.enter_context(widened(model))
        for module in (pipeline.module, plain):
            undo.enter_context(buffers_in(module, torch.float32, NARROW))
        undo.enter_context(forms_cast(passing, lambda x: x.float() if is_narrow(x) else x))
        undo.enter_context(without_autocast(device))
        yield


_DROPPING = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_OWNERS: tuple[Any, ...] = (torch._VF, torch)


class _AttendWithoutDropout(TorchFunctionMode):
    """A mode that turns dropout of attention off, except in a backward that recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if len(args) < 5 else {}
        return func(*args, **kwargs)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Turn dropout off for a while, in modules, functions and attention.

    Kernels are replaced, since torch's function modes are off while a backward recomputes.
    """
    places = [
        (place, each) for name in _DROPPING for each in (name, f"{name}_") for place in _OWNERS
    ]
    own = [(place, name, getattr(place, name)) for place, name in places if hasattr(place, name)]
    for place, name, _ in own:
        setattr(place, name, lambda x, *_args, **_kwargs: x)
    try:
        with _AttendWithoutDropout():
            yield
    finally:
        for place, name, function in own:
            setattr(place, name, function)


@contextmanager
def buffers_in(
    unit: nn.Module, dtype: torch.dtype | None, narrow: Collection[torch.dtype] = ()
) -> Iterator[None]:
    """Convert a unit's floating buffers, or those of dtypes in `narrow`, to `dtype` for a while."""
    before = [
        (module, name, buffer)
        for module in unit.modules()
        for name, buffer in module._buffers.items()
        if dtype is not None and buffer is not None and buffer.is_floating_point()
        if not narrow or buffer.dtype in narrow
    ]
    for module, name, buffer in before:
        module._buffers[name] = buffer.to(dtype)
    try:
        yield
    finally:
        for module, name, buffer in before:
            module._buffers[name] = buffer


def without_autocast(args: Any) -> Any:
    """Return a context without autocast, on the device of a call's arguments."""
    device = next((x.device.type for x in tensors_in(args)), "cpu")
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()
