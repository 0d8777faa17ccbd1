"""Stand-ins for another stage's tensors, and twins of its modules: a form, but no values.

A model's code does more with a module than call it: it looks for adapters in a layer, switches its
kind of attention, or calls a method that embeds other positions. The module's twin answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import PLAIN

# The results of these depend on the form (shape, dtype, device) of their inputs, not on values.
OF_FORM_ALONE = {
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
}  # fmt: skip
_READS = {"_local_scalar_dense", "equal"}  # these return values to Python
_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_DATA = (*PLAIN, torch.dtype, torch.device, torch.Size)
META = torch.device("meta")
_Form = tuple[torch.Size, torch.dtype]


class UnknownValueError(Exception):
    """The model's code reads a value after the stage's last module; a later stage has it."""


class Forward(Protocol):
    """The forwards of a rank's stages; one runs at a time."""

    @property
    def source(self) -> tuple[int, Any]:
        """The running stage, and the hidden states received from the previous stage."""

    @property
    def past(self) -> bool:
        """True while a forward runs code after the last module of its stage."""


class StandIn(Tensor):
    """A tensor of another stage, or a result computed from one, without values.

    It has a shape, dtype and device and takes no memory; operations on it run on the meta device.
    Its autograd graph is real.
    """

    carried: Tensor  # the received tensor that has replaced it as an argument; unset if none has
    forward: Forward  # the forwards of its rank; errors depend on the running one
    source: tuple[int, Any] | None  # that of the forward that made it; None for a twin's tensor
    _is_param: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on meta tensors, and return stand-ins; refuse to read values."""
        kwargs = kwargs or {}
        standing = next(stand_ins_within((*args, *kwargs.values())))
        name = func.overloadpacket.__name__
        if name in OF_FORM_ALONE:
            return func(*map_tensors(_blank, args), **map_tensors(_blank, kwargs))
        if name in _READS:
            _refuse_read(standing.forward)
        device = kwargs.get("device", standing.device)
        kwargs = {**kwargs, "device": META} if "device" in kwargs else kwargs
        if func._schema.is_mutable:
            return _written(func, args, kwargs, standing.forward)
        try:
            result = func(*map_tensors(_form, args), **map_tensors(_form, kwargs))
        except NotImplementedError:  # the form of its result depends on values
            _refuse_read(standing.forward)
        forward = standing.forward
        source = standing.source or forward.source

        def stand_in(form: Tensor) -> StandIn:
            return _stand_in(form.size(), form.dtype, device, forward, source, form.stride())

        return map_tensors(stand_in, result)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return shape, dtype and device as text."""
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: Any) -> StandIn:
        """Return itself: a stand-in never changes."""
        return self

    def numpy(self, **_: Any) -> NoReturn:
        """Refuse to read values."""
        _refuse_read(self.forward)

    tolist = numpy


def standing_like(value: Any, forward: Forward, base: Tensor, *, trained: bool = False) -> Any:
    """Return a value with its tensors replaced by stand-ins on the device of `base`.

    Autograd takes them to be computed from `base`. If that requires grad, so do the stand-ins of
    tensors that do, and all floating point ones if `trained`.
    """
    has_graph = base.requires_grad and torch.is_grad_enabled()

    def stand_in(tensor: Tensor) -> Any:
        form = tensor.size(), tensor.dtype
        if has_graph and (tensor.requires_grad or (trained and tensor.is_floating_point())):
            return _Standing.apply(base, form, forward)  # type: ignore[no-untyped-call]
        return _stand_in(*form, base.device, forward, forward.source)

    return map_tensors(stand_in, value)


def stand_ins_within(value: Any) -> Iterator[StandIn]:
    """Yield the stand-ins in a value: itself, or in tuples, lists and mappings, at any depth."""
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, StandIn))


def has_stand_ins(value: Any) -> bool:
    """Return whether a value is or contains a stand-in."""
    # Most values are plain tensors, and each argument of each layer is checked.
    return type(value) is not Tensor and next(stand_ins_within(value), None) is not None


def with_received(value: Any) -> Any:
    """Return a value with received tensors in place of their stand-ins."""
    return map_tensors(lambda tensor: getattr(tensor, "carried", tensor), value)


class _Standing(torch.autograd.Function):
    """Make a stand-in whose autograd graph leads to a real tensor."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, form: _Form, forward: Forward) -> StandIn:
        return _stand_in(*form, base.device, forward, forward.source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        return None, None, None


def _stand_in(
    size: torch.Size,
    dtype: torch.dtype,
    device: Any,
    forward: Forward,
    source: tuple[int, Any] | None,
    strides: tuple[int, ...] | None = None,
) -> StandIn:
    standing: StandIn = Tensor._make_wrapper_subclass(
        StandIn, size, strides=strides, dtype=dtype, device=device
    )
    standing.forward, standing.source = forward, source
    return standing


def _form(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form on the meta device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _blank(tensor: Tensor) -> Tensor:
    """Return a real tensor of a stand-in's form, expanded from one element to save memory."""
    if not isinstance(tensor, StandIn):
        return tensor
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Forward) -> Any:
    """Return the targets of an in-place operation unchanged, since a stand-in has no values."""
    schema = func._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    values = [value for name, value in {**named, **kwargs}.items() if name in written]
    new_form = torch.Tag.inplace_view in func.tags
    real = any(not isinstance(tensor, StandIn) for tensor in tensors_in(values))
    if (real or new_form) and not forward.past:
        _refuse("copies", " into another tensor")
    if not schema.returns:
        return None
    return values[0] if len(schema.returns) == 1 else tuple(values)


def _refuse_read(forward: Forward) -> NoReturn:
    """Refuse to read values; after the stage's last module, end the forward instead."""
    if forward.past:
        raise UnknownValueError
    _refuse("reads")


def _refuse(action: str, where: str = "") -> NoReturn:
    raise InvalidArgumentError(
        f"{describe_rank()}: the model's forward {action} values of hidden states, or of outputs "
        f"of another stage's modules,{where} outside its layers. This stage does not have these "
        "values: do it inside a layer, or make them an entry of the micro-batch"
    )


def twin_of(module: nn.Module, forward: Forward, keeps: Callable[[Any], bool]) -> nn.Module:
    """Return a module's twin, without hooks, and without references to the module's tensors.

    It has the attributes whose value `keeps` accepts; lists, dicts and sets are copied.
    """
    kind = nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)
    twin: nn.Module = object.__new__(kind)
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        if name not in _OF_ANY_MODULE and keeps(value):
            vars(twin)[name] = copy(value) if isinstance(value, list | dict | set) else value
    for own, theirs in _tensors(twin, module):
        for name, tensor in theirs.items():
            if tensor is None or not is_lazy(tensor):
                own[name] = None if tensor is None else _without_values(tensor, forward)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else twin_of(child, forward, keeps)
    return twin


def cast(twin: nn.Module, forward: Forward, fn: Callable[[Tensor], Tensor]) -> None:
    """Give the tensors of a twin the dtype and the device of the function's results."""
    for module in twin.modules():
        for own, _ in _tensors(module, module):
            for name, tensor in own.items():
                if tensor is not None:
                    like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                    own[name] = _without_values(tensor, forward, like)


def kind_of(module: nn.Module) -> str:
    """Return the qualified name of a module's class, the same if its calls are surrounded."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def runs_plain_forward(module: nn.Module) -> bool:
    """Return whether a call of the module returns the same form as its twin's forward.

    True if no module inside has forward hooks or another forward than its class's; wrappers that
    set `__wrapped__` (`functools.wraps`) are seen through.
    """
    for inner in module.modules():
        scripted = isinstance(inner, torch.jit.ScriptModule)
        if scripted or inner._forward_hooks or inner._forward_pre_hooks:
            return False
        forward = inspect.unwrap(getattr(inner.forward, "__func__", inner.forward))
        if forward is not inspect.unwrap(type(inner).forward):
            return False
    return True


def _tensors(one: nn.Module, other: nn.Module) -> list[tuple[Any, Any]]:
    return [(one._parameters, other._parameters), (one._buffers, other._buffers)]


def _without_values(tensor: Tensor, forward: Forward, like: Tensor | None = None) -> Any:
    like = tensor if like is None else like
    standing = _stand_in(tensor.size(), like.dtype, like.device, forward, None)
    # This makes isinstance(standing, nn.Parameter) true.
    standing._is_param = isinstance(tensor, nn.Parameter)
    return standing


def is_data(value: Any) -> bool:
    """Return whether a value is plain data, a plain function, a class, or a tuple of these."""
    # Other objects may hold tensors, or be changed by a forward on another rank.
    if isinstance(value, tuple):
        return all(map(is_data, value))
    if inspect.isfunction(value):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__closure__ is None and is_data(defaults)
    return isinstance(value, (*_DATA, type))
