"""Values that travel between two stages: their tensors, their form, and autocast's dtypes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

Hidden = Tensor | tuple[Tensor, ...] | list[Tensor] | dict[str, Tensor]
HEADER_BYTES = 4096
CONTAINERS = {"tuple": tuple, "list": list}


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
        container: "tuple", "list", the names of a dict's entries, or None for a tensor alone.
    """

    tensors: tuple[TensorForm, ...]
    container: str | tuple[str, ...] | None = None

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
    """Return whether it is a container of tensors alone, two or more, as a stage may pass on."""
    if type(value) not in (tuple, list, dict) or len(value) < 2:
        return False
    entries = value.values() if isinstance(value, dict) else value
    names = value if isinstance(value, dict) else ()
    return all(isinstance(e, Tensor) for e in entries) and all(isinstance(n, str) for n in names)


def main_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any) -> str:
    """Return the place or name of the argument that is the hidden states, or the first tensor."""
    if args and args[0] is received:
        return "0"
    entries = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}
    same = (name for name, value in entries.items() if value is received)
    alike = (n for n, value in entries.items() if isinstance(value, Tensor) or is_hidden(value))
    return next(same, None) or next(alike, None) or next(iter(entries), "0")


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


def form_of(hidden: Hidden) -> Form:
    """Return the form of the value that a stage passes on."""
    forms = tuple(TensorForm(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_in(hidden))
    if isinstance(hidden, Tensor):
        return Form(forms)
    return Form(forms, tuple(hidden) if isinstance(hidden, dict) else type(hidden).__name__)


def fits(hidden: Hidden, form: Form) -> bool:
    """Return whether something has a form."""
    if isinstance(hidden, Tensor) and form.container is None and form.tensors:
        shape, dtype, requires_grad = form.tensors[0]
        same = hidden.shape == shape and hidden.dtype == dtype
        return same and hidden.requires_grad == requires_grad
    return form_of(hidden) == form


def contained(tensors: Sequence[Tensor], form: Form) -> Hidden:
    """Put tensors back into the container that they came in."""
    if form.container is None:
        return tensors[0]
    if isinstance(form.container, str):
        hidden: Hidden = CONTAINERS[form.container](tensors)
        return hidden
    return dict(zip(form.container, tensors, strict=True))


def to_header(form: Form | None) -> Tensor:
    """Write a form into a message of `HEADER_BYTES` bytes; None says that there is none to come.

    Raises:
        InvalidArgumentError: Too many tensors, or names too long.
    """
    fields = form and {
        "tensors": [(t.shape, str(t.dtype).removeprefix("torch."), t.requires_grad)
                    for t in form.tensors],
        "container": form.container,
    }  # fmt: skip
    text = json.dumps(fields).encode()
    if len(text) > HEADER_BYTES:
        raise InvalidArgumentError(
            f"{describe_rank()}: what a stage passes on takes {len(text)} bytes to describe, more "
            f"than {HEADER_BYTES}: pass fewer tensors, or shorter names"
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def from_header(header: Tensor) -> Form | None:
    """Read a form that `to_header` wrote."""
    fields = json.loads(bytes(header.cpu().tolist()))
    if fields is None:
        return None
    container = fields["container"]
    return Form(
        tuple(TensorForm(tuple(s), getattr(torch, d), g) for s, d, g in fields["tensors"]),
        tuple(container) if isinstance(container, list) else container,
    )


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for this kind of device; false if it has no autocast."""
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the input of a linear layer."""
    if tensor.dtype == torch.float64 or not autocasts(tensor.device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
