"""The first forward of a kind: uncompiled, with each tensor's origin followed and errors explained.

It finds the arguments of later stages' modules that depend on this stage's own modules. Later
forwards of the same kind send the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError
from torch.overrides import TorchFunctionMode

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly
from .passage import Extras
from .stand_ins import OF_FORM_ALONE


@contextmanager
def examining(extras: Extras) -> Iterator[None]:
    """Run the forward in this context uncompiled, and explain failures of the model's own code."""
    with eagerly(), Following(extras):
        try:
            yield
        except (ScaletorchError, DistError):
            raise
        except Exception as error:
            if extras.inside:  # a layer's own failure
                raise
            raise InvalidArgumentError(_failed(error)) from error


def _failed(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return (
        f"{describe_rank()}: the model's own code between its layers raised "
        f"{type(error).__name__} ({text}). On this stage, modules of other stages return tensors "
        "without values, of the shape of their input or of the outputs of this stage's layers. If "
        "the code runs in one process, it needs more than that: compute it inside the layers, make "
        "it an entry of the micro-batch, or use no pipeline (pp_size=1)"
    )


class Following(TorchFunctionMode):
    """A mode that notes the results of operations on noted tensors."""

    def __init__(self, extras: Extras) -> None:
        super().__init__()
        self._extras = extras

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and note its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, dependent = getattr(func, "__name__", ""), self._extras.dependent
        if self._extras.inside or name in OF_FORM_ALONE or not dependent:
            return result
        if any(tensor in dependent for tensor in tensors_in((args, kwargs))):
            self._extras.note(result)
            if name == "__setitem__":
                self._extras.note(args[0])
        return result
