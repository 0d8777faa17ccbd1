"""Replace a module's class by a subclass whose forward wraps the module's own."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ...pg_manager.building import class_before, deep_copy, shallow_copy, uncompiled

M = TypeVar("M", bound=nn.Module)


class Surrounded(nn.Module):
    """Base of the mixins put before a module's own class, which they call by `super().forward`."""

    _tp_group: ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self._tp_group)] = self._tp_group  # process groups cannot be copied: share it
        return deep_copy(self, getattr(super(), "__deepcopy__", None), memo)

    def __copy__(self) -> Self:
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling, and so `torch.save(model)`."""
        raise not_pickled(type(self).__name__)


def surround(module: M, mixin: type[Surrounded], group: ProcessGroup | None) -> M:
    """Put `mixin` before the class of `module`, in place; it stays an instance of its class."""
    vars(module)["_tp_group"] = group
    kind = type(module)
    module.__class__ = class_before(mixin, kind, f"{mixin.__name__}{kind.__name__}")
    return module


@uncompiled
def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before any mixin."""
    kinds: tuple[Any, ...] = type(module).__mro__
    found: type[nn.Module] = kinds[kinds.index(Surrounded) + 1] if Surrounded in kinds else kinds[0]
    return found


def cannot_surround(module: nn.Module, mixin: type[Surrounded]) -> str | None:
    """Return why `module` cannot get `mixin`, or None if it can."""
    if isinstance(module, mixin):
        return "it has this style already"
    if "forward" in vars(module):
        return "its forward was replaced on the instance: apply tensor parallelism before that"
    return None


def not_pickled(name: str) -> StateError:
    """Return the error for a module that cannot be pickled."""
    return StateError(
        f"{describe_rank()}: a {name} cannot be pickled, as tensor parallelism "
        "ties it to this rank's process group: save a state_dict, or gather_state_dict(model) for "
        "the full model's, and load it into a new model; copy.deepcopy works"
    )
