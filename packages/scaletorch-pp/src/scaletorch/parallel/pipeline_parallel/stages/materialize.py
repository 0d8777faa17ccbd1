"""Allocate and fill the parameters of one stage of a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ....dist.errors import InvalidArgumentError
from .stage import PipelineParallel


class TensorFile(Protocol):
    """Tensors by name, read one at a time, such as the result of safetensors' `safe_open`."""

    def keys(self) -> Any:
        """Return the names."""

    def get_tensor(self, name: str) -> Tensor:
        """Read one tensor."""


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build modules whose parameters take no memory, while their buffers are real.

    Each parameter moves to the meta device when a module registers it. Unlike under
    `torch.device("meta")`, buffers that no checkpoint holds, such as a rotary embedding's
    frequencies, keep their values. Not thread-safe. Parameters made outside and passed into a
    module would lose their values.

    Example:
        >>> with meta_parameters():
        ...     model = Model()
        >>> stage = PipelineParallel(model)
        >>> materialize(stage, "cuda", state)
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta and not is_lazy(param):
            _replace(param, torch.empty_like(param, device="meta", requires_grad=False))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(
    stage: nn.Module,
    device: torch.device | str,
    state: Mapping[str, Tensor] | TensorFile,
) -> None:
    """Allocate a stage's parameters and persistent buffers on a device, and fill them from a state.

    Tensors of other stages are neither read nor allocated. Tensors keep their identity, so tied
    parameters stay tied, also across stages; the state may hold them by any of their names. Buffers
    that are not persistent move to the device with their values. Call this before the stage is
    wrapped and before its optimizer is built: hooks and gradients of the parameters are lost.

    Args:
        stage: A `PipelineParallel`, or any module, built under `meta_parameters` or on meta.
        device: Device of its tensors afterwards.
        state: Tensors by the names of the whole plain model: its `state_dict`, another mapping or
            an open safetensors file. Only this stage's tensors are read, one at a time. Values are
            copied, and cast to the dtypes of the model.

    Raises:
        InvalidArgumentError: The state lacks names or has tensors of other shapes, or a buffer on
            meta is not persistent. The stage is unchanged then.
    """
    read = getattr(state, "get_tensor", None) or getattr(state, "__getitem__", None)
    if read is None or not hasattr(state, "keys"):
        raise InvalidArgumentError(
            "state must be a mapping of names to tensors, such as a state_dict, or an open "
            f"safetensors file, got {type(state).__name__}"
        )
    unsaved = list(_buffers(stage, persistent=False))
    lost = [name for name, buffer in unsaved if buffer.is_meta]
    if lost:
        raise InvalidArgumentError(
            f"buffers on the meta device are not persistent, so no state has their values: "
            f"{', '.join(lost)}; build the model under meta_parameters() instead of "
            "torch.device('meta'), or set them to real tensors first"
        )
    values = _values(_sources(stage, set(state.keys())), read, torch.device(device))
    for tensor, value in values:
        _replace(tensor, value)
    for _, buffer in unsaved:
        moved = buffer.to(device)
        if moved is not buffer:
            _replace(buffer, moved)


def _sources(stage: nn.Module, known: set[str]) -> dict[Tensor, str]:
    """Return, for each tensor to fill, its name in the state; refuse a state that lacks some."""
    own = chain(stage.named_parameters(remove_duplicate=False), _buffers(stage, persistent=True))
    names: dict[Tensor, list[str]] = {}
    for name, tensor in own:
        names.setdefault(tensor, []).append(name)
    ties = stage.ties if isinstance(stage, PipelineParallel) else ()
    for tie in ties:  # a checkpoint may hold it only by its name on another stage
        if tie.parameter is not None:
            names[tie.parameter] = [*dict.fromkeys((*names[tie.parameter], *tie.names))]
    found = {t: next((n for n in aliases if n in known), None) for t, aliases in names.items()}
    missing = [" or ".join(names[tensor]) for tensor, name in found.items() if name is None]
    if missing:
        raise InvalidArgumentError(
            f"the state lacks {len(missing)} of the stage's {len(names)} tensors: "
            f"{', '.join(missing)}; name its tensors as the plain model's state_dict does"
        )
    return {tensor: name for tensor, name in found.items() if name is not None}


def _buffers(stage: nn.Module, *, persistent: bool) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in stage.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(prefix, recurse=False, remove_duplicate=False):
            own = name.rpartition(".")[2]
            if (own not in module._non_persistent_buffers_set) == persistent:
                yield name, buffer


def _values(
    sources: Mapping[Tensor, str], read: Callable[[str], Any], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Read the new value of each tensor; refuse values of another shape."""
    values: list[tuple[Tensor, Tensor]] = []
    for tensor, name in sources.items():
        value = read(name)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != tuple(tensor.shape):
            raise InvalidArgumentError(
                f"{name} of the state does not fit the stage: expected {tuple(tensor.shape)}, got "
                f"{shape}; pass the state of this model, with full tensors"
            )
        fresh = torch.empty_like(tensor, device=device, requires_grad=False)
        values.append((tensor, fresh.copy_(value.detach())))
    return values


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Swap another tensor into a parameter or buffer, seen through every reference to it."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)
