"""The training step of a rehearsal, in float32 if it fits: it leaves no trace, but is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...dist import get_local_size
from ...dist.building import map_tensors, tensors_in
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.data_parallel.building import NARROW, widened
from ...parallel.pg_manager.building import Attributes, eagerly, restored
from ...parallel.pipeline_parallel import PipelineParallel
from ...parallel.pipeline_parallel.building import PassThrough, forms_cast, release, surround
from ..forward import Terms, pipeline_of, rehearsing, terms_of, wait_for_parameters
from ..plain import Plain
from .batch import SmallBatch, is_narrow

Step = Callable[..., Tensor]


@contextmanager
def rehearsal_mode(
    model: DataParallelBucket, plain: Plain, terms: Terms, *, wide: bool
) -> Iterator[None]:
    """Run a step without dropout, zeros and `no_sync`, in float32 or not; restore the model."""
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
    cut: Callable[..., SmallBatch], model: DataParallelBucket, plain: Plain, step: Step
) -> tuple[SmallBatch, Tensor, Records, list[str] | None]:
    """Return a small batch, its loss, the recorded calls, and attributes that the forward changed.

    These are None if they change after the first gradient too, as by checkpoints or micro-batches.
    """

    def train(small: SmallBatch) -> tuple[SmallBatch, Tensor, Records, list[str] | None]:
        pipeline = pipeline_of(model)
        before, begun = Attributes(pipeline.module.modules()), list[Attributes]()
        with recorded(pipeline, plain, begun) as records, eagerly():
            loss = step(small.micro_batches)
        for record in (each for held in records.values() for each in held):
            for gradient in (record.input_gradient, record.output_gradient):
                if gradient is not None and terms_of(model).correction != 1:
                    gradient.mul_(terms_of(model).correction)  # it was divided by an estimate
        late = any(each.changed() for each in begun)
        return small, loss, records, None if late else before.changed()

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
    """Replace nearly zero parameters, which would hide errors, by the same values on all ranks."""
    before = []
    for parameter in model.parameters():
        x = parameter.detach()
        holds = x.is_floating_point() and x.numel() and not x.is_meta
        if holds and x.abs().max() < _SMALL:
            before.append((parameter, x.clone()))
            numbers = torch.arange(x.numel(), device=x.device)
            pattern = numbers.double().cos_().mul_(0.5 / max(x.shape[-1:] or (1,)) ** 0.5)
            x.copy_(pattern.view_as(x))
    try:
        yield
    finally:
        for parameter, own in before:
            parameter.detach().copy_(own)


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
    """Use float32 for parameters, gradients, buffers, messages and stand-ins, without autocast."""
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
_ATTENDING = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # arguments, in order


class _AttendWithoutDropout(TorchFunctionMode):
    """A mode that turns dropout of attention off, except in a backward that recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(_ATTENDING, args, strict=False))
            return func(**named | (kwargs or {}) | {"dropout_p": 0.0})
        return func(*args, **kwargs or {})


@contextmanager
def without_dropout() -> Iterator[None]:
    """Turn dropout off for a while, in modules, functions and attention."""
    # Kernels are replaced, since torch's function modes are off while a backward recomputes.
    owners: tuple[Any, ...] = (torch._VF, torch)
    places = [(o, each) for name in _DROPPING for each in (name, f"{name}_") for o in owners]
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


@dataclass(slots=True)
class Record:
    """One call of a unit on this rank."""

    input: Tensor | None = None  # the hidden states passed in
    output: Tensor | None = None  # the hidden states returned
    input_gradient: Tensor | None = None  # of `input`, through the unit alone
    output_gradient: Tensor | None = None  # of `output`, from everything that used it
    again: bool = False  # the graph is built in backward, when the unit runs again
    alone: bool = False  # it returned hidden states alone, and set nothing


Records = dict[tuple[str, int], list[Record]]  # unit and stage -> its calls in turn


class Recorder:
    """A recorder of one unit's calls, innermost among the wrappers of these calls."""

    def __init__(
        self, name: str, pipeline: PipelineParallel, records: Records, begun: list[Attributes]
    ) -> None:
        self._name, self._pipeline, self._records = name, pipeline, records
        self._begun = begun  # the attributes of all modules at the first gradient
        self._open: list[tuple[Record | None, Attributes]] = []

    def takes_forward(self) -> bool:
        """Return whether to record direct calls of the module's `forward` too."""
        return True

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the input, and its gradient by a hook on a view that only this call uses."""
        x = hidden_states_of((args, kwargs))
        record = self._record(x)
        self._open.append((record, Attributes(module.modules())))
        if record is None or x is None or type(x) is not Tensor:
            return args, kwargs
        record.input = x.detach().clone()
        if not (torch.is_grad_enabled() and x.requires_grad):
            return args, kwargs
        view = x.view_as(x)
        view.register_hook(lambda gradient: _note(record, "input_gradient", gradient))
        return map_tensors(lambda tensor: view if tensor is x else tensor, (args, kwargs))

    def after(self, module: nn.Module, output: Any) -> Any:
        """Record the output, and its gradient by a hook on a copy that only the caller uses."""
        (record, attributes), y = self._open.pop(), hidden_states_of(output)
        if record is None or y is None:
            return output
        shaped = output is y and record.input is not None and record.input.shape == y.shape
        record.alone = shaped and not attributes.changed()
        if record.output is None:  # keep the first run's: a layer may count its runs
            record.output = y.detach().clone()
        if not (torch.is_grad_enabled() and y.requires_grad):
            return output
        # Uses of `y` within the call must not count. A copy, since the caller may write to its
        # tensor in place, and a view would then lose the hook.
        own = y.clone()
        own.register_hook(lambda gradient: self._arrived(record, gradient))
        return map_tensors(lambda tensor: own if tensor is y else tensor, output)

    def _arrived(self, record: Record, gradient: Tensor) -> None:
        if not self._begun:
            self._begun.append(Attributes(self._pipeline.module.modules()))
        _note(record, "output_gradient", gradient)

    def _record(self, x: Tensor | None) -> Record | None:
        """Return a new record for a call; for a second run in backward, the first's or None."""
        stage = self._pipeline.stages[self._pipeline.runtime.chunks.selected]
        calls = self._records.setdefault((self._name, stage), [])
        if torch._C._current_graph_task_id() == -1:
            calls.append(Record(again=not torch.is_grad_enabled()))
            return calls[-1]
        # Only a checkpoint whose first run has no gradients builds its graph in backward.
        waiting = [each for each in calls if each.again and each.output_gradient is None]
        return next((each for each in reversed(waiting) if is_same(each.input, x)), None)


@contextmanager
def recorded(
    pipeline: PipelineParallel, plain: Plain, begun: list[Attributes]
) -> Iterator[Records]:
    """Record all calls of this rank's units, which may have several names."""
    records: Records = {}
    here = dict(pipeline.module.named_modules(remove_duplicate=False))
    units = {unit: name for name, unit in plain.units.items()}
    named = plain.model.named_modules(remove_duplicate=False)
    placed = {here[n]: units[unit] for n, unit in named if unit in units and n in here}
    with ExitStack() as undo:
        for module, unit in placed.items():
            if not isinstance(module, PassThrough):
                recorder = Recorder(unit, pipeline, records, begun)
                surround(module, recorder, innermost=True)
                undo.callback(release, module, recorder)
        yield records


def hidden_states_of(value: Any) -> Tensor | None:
    """Return a call's first floating tensor of 2 dims or more, if possible one with a gradient."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        args, kwargs = value
        found = hidden_states_of([*tensors_in(args)])
        return hidden_states_of([*tensors_in(kwargs)]) if found is None else found
    tensors = [x for x in tensors_in(value) if x.is_floating_point() and x.ndim > 1]
    return next((x for x in tensors if x.requires_grad), next(iter(tensors), None))


def is_same(given: Tensor | None, x: Tensor | None) -> bool:
    """Return whether two calls had equal inputs."""
    return given is not None and x is not None and torch.equal(given, x)


def _note(record: Record, name: str, gradient: Tensor) -> None:
    if getattr(record, name) is None:
        setattr(record, name, gradient.detach().clone())
