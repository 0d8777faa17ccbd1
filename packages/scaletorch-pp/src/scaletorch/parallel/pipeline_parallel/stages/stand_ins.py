"""Stand-ins for another stage's tensors, followed through the model's own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

# What these return depends on the form of what they are given, not on its values.
_OF_FORM_ALONE = {
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
}  # fmt: skip
_READS = {"_local_scalar_dense", "equal"}  # a tensor's values become Python's


class StandIns(TorchDispatchMode):
    """Knows the tensors that stand for those of another stage, and all that is computed from them.

    The hidden states that a stage has received are those of one process on their way into the
    stage's first module alone; anywhere else one process has another tensor. So it is with the
    output of another stage's module here. While the mode is on, memory that results of these are
    written to counts as theirs.

    Attributes:
        over: Whether the rest of the forward is another stage's.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.over = False
        self._memory: dict[int, object] = {}  # kept, so that no other tensor gets it meanwhile

    def add(self, value: Any) -> None:
        """Let all tensors of a value count as stand-ins."""
        for tensor in tensors_in(value):
            memory = _memory(tensor)
            self._memory[_key(memory)] = memory

    def hold(self, value: Any) -> bool:
        """Return whether a value is or contains a stand-in."""
        return any(_key(_memory(tensor)) in self._memory for tensor in tensors_in(value))

    def of(self, value: Any) -> Any:
        """Return the output of another stage's module for its argument: a stand-in."""
        if isinstance(value, Tensor):
            if not self.hold(value):
                value = value.clone()
                self.add(value)
            return value
        if type(value) is dict:
            return {name: self.of(entry) for name, entry in value.items()}
        if type(value) in (tuple, list) and not all(self.hold(entry) for entry in value):
            return type(value)(self.of(entry) for entry in value)
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call, and take note of results that come of stand-ins.

        Raises:
            InvalidArgumentError: It reads a number out of one.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if self.over or name in _OF_FORM_ALONE or not self.hold((*args, *kwargs.values())):
            return result
        if name in _READS:
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward reads a number out of hidden states, or "
                "of what another stage's modules return, outside its layers: on this stage that "
                "is another number than in one process; do it inside a layer, or make it an entry "
                "of the micro-batch"
            )
        self.add(result)
        self.add(_written(func, args, kwargs))
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    return [value for name, value in {**named, **kwargs}.items() if name in written]


def _memory(tensor: Tensor) -> Any:
    """Return a tensor's memory, or itself if it has none of its own, as sparse ones."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def _key(memory: Any) -> int:
    return memory._cdata if isinstance(memory, torch.UntypedStorage) else id(memory)
