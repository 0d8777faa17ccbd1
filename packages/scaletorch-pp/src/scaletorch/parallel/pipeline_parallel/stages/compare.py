"""Hidden states around a stage's modules, compared: what a forward may not do to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden, is_hidden, tensors_in


def tensor_of(value: Any) -> Tensor:
    """Return the tensor that carries the result of a module: itself, or the first in a container.

    Raises:
        InvalidArgumentError: there is none.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for entry in value:
            if isinstance(entry, Tensor):
                return entry
    message = f"{describe_rank()}: expected a module to return a tensor, got {type(value).__name__}"
    raise InvalidArgumentError(message)


def handed_on(left: Any, output: Any) -> Hidden:
    """Return which part of what a stage's last module returned the forward hands on.

    Raises:
        InvalidArgumentError: None that can be told, or tensors beside it.
    """
    if output is left and isinstance(output, Tensor):  # by far the most frequent case
        return output
    if is_hidden(left) and type(output) is type(left) and _same(left, output):
        hidden: Hidden = left
        return hidden
    if output is left and not isinstance(left, Tensor) and len(left) > 1:
        raise InvalidArgumentError(
            f"{describe_rank()}: layers must pass on a tensor, or a tuple, list or dict of "
            f"tensors alone, got a {type(left).__name__} with something else in it, or of a "
            "class of its own; leave that out, or put it into a tensor"
        )
    carrier, first = tensor_of(output), tensor_of(left)
    if not _same(first, carrier):
        raise InvalidArgumentError(changed_message("after the last layer", "last"))
    refuse_collected(output, carrier)
    return first


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of what a forward returned: itself, or those right in a container."""
    if isinstance(output, Tensor):
        return [output]
    entries = output.values() if isinstance(output, Mapping) else output
    return [entry for entry in entries if isinstance(entry, Tensor)]


def refuse_changed(given: Any, received: Any) -> None:
    """Refuse hidden states that are not those which a stage has received.

    Raises:
        InvalidArgumentError: They are others.
    """
    if is_hidden(received):
        changed = not is_hidden(given) or not _same(received, given)
    else:
        changed = isinstance(received, Tensor) and not _same(received, tensor_of(given))
    if changed:
        raise InvalidArgumentError(changed_message("before the first layer", "first"))


def refuse_collected(output: Any, carrier: Tensor) -> None:
    """Refuse tensors to train by, beside the hidden states: they would end on this stage.

    Raises:
        InvalidArgumentError: There is one.
    """
    for entry in [] if isinstance(output, Tensor) else tensors_of(output):
        if entry.requires_grad and not _same_tensor(entry, carrier):
            raise InvalidArgumentError(collected_message(entry))


def _same(a: Hidden, b: Hidden) -> bool:
    ours, theirs = tensors_in(a), tensors_in(b)
    return len(ours) == len(theirs) and all(map(_same_tensor, ours, theirs))


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr() and a.dtype == b.dtype:
        return True
    return torch.equal(a.detach(), b.detach().to(a.dtype))


def changed_message(where: str, part: str) -> str:
    """Say that values change."""
    return (
        f"{describe_rank()}: the model's forward changes the hidden states {where} of this stage, "
        "in code or modules that every stage runs, so it would happen once per stage; put it into "
        f"a module and name that in Split({part}=...), or into the layers (a residual around them)"
    )


def gradient_message(where: str, part: str) -> str:
    """Say that gradients change."""
    return (
        f"{describe_rank()}: the model's forward changes the gradient of hidden states {where} of "
        "this stage, and not their values (detach, a hook, a factor taken back by a detached copy, "
        "a parameter of zeros or ones), in code that every stage runs, so it would happen once per "
        f"stage; put it into a module and name that in Split({part}=...), or into the layers"
    )


def collected_message(tensor: Tensor) -> str:
    """Say that a tensor to train by would be lost."""
    return (
        f"{describe_rank()}: the model's forward returns a tensor with a gradient of shape "
        f"{tuple(tensor.shape)} beside the hidden states, made by this stage's layers alone "
        "(such as an auxiliary loss): it would be lost here; let layers pass it on, with "
        "the hidden states in one tuple"
    )
