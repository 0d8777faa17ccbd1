"""Values sent between two stages: their tensors, their form, and autocast's dtypes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

# A tensor, or a nested tuple, list or dict of tensors and plain values, with at least one tensor.
Hidden = Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]
HEADER_BYTES = 8192
PLAIN = (bool, int, float, str, type(None))


class Form:
    """The form of a value that a stage passes on: the value with its tensors on meta."""

    def __init__(self, value: Any) -> None:
        self.value = map_tensors(_without_contents, value)
        self.tensors = tuple(tensors_in(self.value))

    @cached_property
    def gradients(self) -> tuple[Tensor, ...]:
        """The tensors that require grad, so that their gradient comes back."""
        return tuple(tensor for tensor in self.tensors if tensor.requires_grad)

    def __str__(self) -> str:
        """Return shapes and dtypes as text."""
        texts = [
            f"{tuple(t.shape)} of {t.dtype}{'' if t.requires_grad else ' without gradient'}"
            for t in self.tensors
        ]
        return " and ".join(texts)

    def __eq__(self, other: object) -> bool:
        """Return whether plain values, shapes, dtypes and requires_grad are equal."""
        return isinstance(other, Form) and self.describes(other.value)

    __hash__ = None  # type: ignore[assignment]

    def describes(self, value: Any) -> bool:
        """Return whether a value has these plain values, shapes, dtypes and requires_grad."""
        return bool(self._facts == _facts(value))

    @cached_property
    def _facts(self) -> Any:
        return _facts(self.value)


def _facts(value: Any) -> Any:
    return map_tensors(lambda t: (tuple(t.shape), t.dtype, t.requires_grad), value)


def _without_contents(tensor: Tensor) -> Tensor:
    needs = tensor.requires_grad
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=needs)


NOTHING = Form({})


class Place(NamedTuple):
    """An argument of a call."""

    module: int  # its index among the modules of all stages
    call: int  # the number of the call in a forward, from 1
    tensor: int  # the index of the tensor among those in the arguments


class Passed(NamedTuple):
    """A value that a stage passes on if it sends more than hidden states."""

    hidden: Any
    tensors: list[Tensor]  # the extra tensors; those of the same form are stacked
    places: dict[Place, tuple[int, int]]  # an argument's stack, and its index in the stack
    forms: Form = NOTHING  # outputs of layers of other lists, such as an encoder's, by list


def is_hidden(value: Any) -> bool:
    """Return whether a stage can pass a value on."""
    return isinstance(value, Tensor) or (
        next(tensors_in(value), None) is not None and next(strangers(value), None) is None
    )


def strangers(value: Any) -> Iterator[Any]:
    """Yield the objects in a value that cannot be passed on."""
    kind = type(value)
    if isinstance(value, Tensor) or kind in PLAIN:
        return
    if kind not in (tuple, list, dict):
        yield value
        return
    if kind is dict:
        yield from (name for name in value if not isinstance(name, str))
    for entry in value.values() if kind is dict else value:
        yield from strangers(entry)


def tensor_of(value: Any) -> Tensor:
    """Return a module's main output: the tensor itself, or a container's logits or first tensor."""
    if isinstance(value, Tensor):
        return value
    entries: Iterable[Any] = value if isinstance(value, tuple | list) else ()
    if isinstance(value, Mapping):  # the first tensor may be a loss
        entries = (value.get("logits"), *value.values())
    found = next((entry for entry in entries if isinstance(entry, Tensor)), None)
    if found is None:
        came = type(value).__name__
        message = f"{describe_rank()}: expected a module to return a tensor, got {came}"
        raise InvalidArgumentError(message)
    return found


def signature(value: Any) -> Hashable:
    """Return the facts that may decide a forward's path: shape and dtype, or a plain value."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, bool | int | float | str) else type(value).__name__


def facts_of(given: Any, kwargs: Mapping[str, Any]) -> Iterator[Hashable]:
    """Yield the facts, of all arguments, that may decide which code a forward runs."""
    for tensor in [*tensors_in(given)] or [given]:
        yield signature(tensor)
    for name, value in kwargs.items():
        yield name, signature(value)


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return `shape` as a tuple; refuse anything but a sequence of positive ints."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InvalidArgumentError(
            "tensor_shapes is the shape of one micro-batch's hidden states, such as "
            f"(micro_batch_size, sequence_length, hidden_size), got {shape!r}"
        )
    return sizes


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`; refuse anything but a floating point dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        message = f"dtype is that of the hidden states, such as torch.bfloat16, got {dtype!r}"
        raise InvalidArgumentError(message)
    return dtype


def to_header(form: Form) -> Tensor:
    """Encode a form as a tensor of `HEADER_BYTES` bytes."""
    text = pickle.dumps(form)
    if len(text) > HEADER_BYTES:
        raise InvalidArgumentError(
            f"{describe_rank()}: the output of a stage takes {len(text)} bytes to describe, more "
            f"than {HEADER_BYTES}: pass on fewer tensors, or shorter names"
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def from_header(header: Tensor) -> Form:
    """Decode a form that `to_header` has encoded."""
    text = bytearray(HEADER_BYTES)
    torch.frombuffer(text, dtype=torch.uint8).copy_(header)
    form: Form = _Unpickler(io.BytesIO(text)).load()
    return form


# All that a header may name besides dtypes. A header is a pickle, and its sender may be any rank.
_KINDS = (Form, Passed, Place, torch.Size, torch._utils._rebuild_meta_tensor_no_storage)
_NAMED = {(kind.__module__, kind.__name__) for kind in _KINDS}


class _Unpickler(pickle.Unpickler):
    """An unpickler of forms alone, so that a header cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class, function or dtype that a form needs; refuse any other."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _NAMED:
            raise InvalidArgumentError(
                f"{describe_rank()}: a message between stages names {module}.{name}, which hidden "
                "states never contain; do all ranks run the same version of scaletorch?"
            )
        return super().find_class(module, name)


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for this type of device; False if it has no autocast."""
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the input of a linear layer."""
    if tensor.dtype == torch.float64 or not autocasts(tensor.device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
