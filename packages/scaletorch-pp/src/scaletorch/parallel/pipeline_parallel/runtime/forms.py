"""Values that travel between two stages: their tensors, their form, and autocast's dtypes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

# A tensor, or a tuple, list or dict of such things and of plain values, with tensors in it.
Hidden = Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]
# The same with None for each tensor; a plain value comes as ("value", it), a container as its name
# and its entries, or pairs of a name and an entry.
Container = tuple[Any, ...] | None
HEADER_BYTES = 4096
PLAIN = (bool, int, float, str, type(None))
CONTAINERS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict}


class TensorForm(NamedTuple):
    """The form of one tensor.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether its gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the value that a stage passes on.

    Attributes:
        tensors: Its tensors, in order.
        container: What they came in; None for a tensor alone.
    """

    tensors: tuple[TensorForm, ...]
    container: Container = None

    def __str__(self) -> str:
        """Write shapes and dtypes."""
        texts = [
            f"{t.shape} of {t.dtype}{'' if t.requires_grad else ' without gradient'}"
            for t in self.tensors
        ]
        return " and ".join(texts)

    @property
    def gradients(self) -> tuple[TensorForm, ...]:
        """Those whose gradient comes back."""
        return tuple(form for form in self.tensors if form.requires_grad)


NOTHING = Form(())


def is_hidden(value: Any) -> bool:
    """Return whether a stage may pass a value on."""
    return isinstance(value, Tensor) or (
        next(tensors_in(value), None) is not None and next(strangers(value), None) is None
    )


def strangers(value: Any) -> Iterator[Any]:
    """Yield what is in a value that cannot be passed on."""
    kind = type(value)
    if isinstance(value, Tensor) or kind in PLAIN:
        return
    if kind not in CONTAINERS.values():
        yield value
        return
    if kind is dict:
        yield from (name for name in value if not isinstance(name, str))
    for entry in value.values() if kind is dict else value:
        yield from strangers(entry)


def tensor_of(value: Any) -> Tensor:
    """Return the tensor that carries a module's result: itself, or a container's logits or first.

    Raises:
        InvalidArgumentError: There is none.
    """
    logits = value.get("logits") if isinstance(value, Mapping) else None
    if isinstance(logits, Tensor):  # before them a model may return losses of its own
        return logits
    entries = tensors_of(value) if isinstance(value, Tensor | Mapping | tuple | list) else []
    if not entries:
        came = type(value).__name__
        message = f"{describe_rank()}: expected a module to return a tensor, got {came}"
        raise InvalidArgumentError(message)
    return entries[0]


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a forward's output: itself, or those directly in its container."""
    if isinstance(output, Tensor):
        return [output]
    entries = output.values() if isinstance(output, Mapping) else output
    return [entry for entry in entries if isinstance(entry, Tensor)]


def signature(value: Any) -> Hashable:
    """Return the facts that a forward may decide by: shape and dtype, or a plain value itself."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, bool | int | float | str) else type(value).__name__


def facts_of(given: Any, kwargs: Mapping[str, Any]) -> Iterator[Hashable]:
    """Yield the facts that the way of a forward may depend on, of all that it is given."""
    for tensor in tensors_in(given) if is_hidden(given) else [given]:
        yield signature(tensor)
    for name, value in kwargs.items():
        yield name, signature(value)


def form_of(hidden: Hidden) -> Form:
    """Return the form of the value that a stage passes on."""
    forms = tuple(TensorForm(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_in(hidden))
    return Form(forms, _container(hidden))


def _container(value: Any) -> Container:
    if isinstance(value, Tensor):
        return None
    kind = type(value)
    if kind is dict:
        return "dict", tuple((name, _container(entry)) for name, entry in value.items())
    if kind in CONTAINERS.values():
        return kind.__name__, tuple(map(_container, value))
    return "value", value


def contained(tensors: Sequence[Tensor], form: Form) -> Hidden:
    """Put tensors back into the container that they came in."""
    hidden: Hidden = _filled(form.container, iter(tensors))
    return hidden


def _filled(container: Container, tensors: Iterator[Tensor]) -> Any:
    if container is None:
        return next(tensors)
    kind, entries = container
    if kind == "value":
        return entries
    if kind == "dict":
        return {name: _filled(entry, tensors) for name, entry in entries}
    return CONTAINERS[kind](_filled(entry, tensors) for entry in entries)


def blank(form: Form | None) -> Any:
    """Return what has a form, on the meta device."""
    tensors = [
        torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)
        for t in (form or NOTHING).tensors
    ]
    return None if form is None else contained(tensors, form)


def to_header(form: Form | None) -> Tensor:
    """Write a form into a message of `HEADER_BYTES` bytes; None says that there is none to come.

    Raises:
        InvalidArgumentError: Too many tensors, or names too long.
    """
    text = to_text(form).encode()
    if len(text) > HEADER_BYTES:
        raise InvalidArgumentError(
            f"{describe_rank()}: what a stage passes on takes {len(text)} bytes to describe, more "
            f"than {HEADER_BYTES}: pass fewer tensors, or shorter names"
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def from_header(header: Tensor) -> Form | None:
    """Read a form that `to_header` wrote."""
    return from_text(bytes(header.cpu().tolist()).decode())


def to_text(form: Form | None) -> str:
    """Write a form; None says that there is none."""
    fields = form and {
        "tensors": [(t.shape, str(t.dtype).removeprefix("torch."), t.requires_grad)
                    for t in form.tensors],
        "container": form.container,
    }  # fmt: skip
    return json.dumps(fields)


def from_text(text: str) -> Form | None:
    """Read a form that `to_text` wrote."""
    fields = json.loads(text)
    if fields is None:
        return None
    return Form(
        tuple(TensorForm(tuple(s), getattr(torch, d), g) for s, d, g in fields["tensors"]),
        _in_tuples(fields["container"]),
    )


def _in_tuples(value: Any) -> Any:
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for this kind of device; false if it has no autocast."""
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the input of a linear layer."""
    if tensor.dtype == torch.float64 or not autocasts(tensor.device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
