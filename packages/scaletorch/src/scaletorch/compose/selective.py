"""Selective recomputation: what autograd would keep is made again where that is cheap.

While a layer runs, cheap operations (elementwise ones, copies, norms, softmax) and gathers of
sequences are written down. A tensor that backward wants is then kept as the way to make it from
tensors that are kept anyway, if that takes less memory: of a norm its input remains, of an
activation function and of products with it their inputs. Products of matrices, attention, random
draws and sums over ranks never run again, and nothing runs twice that is kept.
After Korthikanti et al. 2022, section 5, by what a tensor was made of in place of named modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ..dist.building import hear_made, tensors_in
from ..dist.errors import StateError

# Beside elementwise operations and views. What comes out far smaller than what goes in, as sums
# do, is kept: it takes little, and much would be read for it.
_CHEAP = {
    "_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "cat", "clone", "constant_pad_nd",
    "flip", "native_layer_norm", "repeat", "roll", "stack", "tril", "triu",
}  # fmt: skip
_SMALLER = 4  # times

_Key = tuple[Any, ...]
_Make = Callable[[Sequence[Tensor]], Tensor]
_Hook = Callable[[Any], Any]


class _Recipe(NamedTuple):
    """How a tensor was made.

    Attributes:
        result: The tensor, so that its memory is its own as long as the layer runs.
        make: Of its sources.
        sources: Tensors.
        versions: Of the result and of the sources, when it was made.
        together: Whether all ranks have to make it again, or none.
    """

    result: Tensor
    make: _Make
    sources: Sequence[Tensor]
    versions: Sequence[int]
    together: bool = False


class _Kept:
    """A tensor that is kept, by the hooks around the layer if there are any."""

    def __init__(self, tensor: Tensor, hooks: Any) -> None:
        self.users = 0
        pack: _Hook
        self._bring_back: _Hook
        pack, self._bring_back = hooks or (_itself, _itself)
        # What a hook makes of it is the hook's to watch.
        self._version = tensor._version if hooks is None else None
        self._held = pack(tensor.detach())

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            StateError: It was changed in place.
        """
        tensor: Tensor = self._bring_back(self._held)
        if self._version not in (None, tensor._version):
            raise StateError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
                "after it was computed: change a copy of it"
            )
        return tensor


class _Again:
    """A tensor that is made again when it is first wanted, and kept until its last user has it."""

    def __init__(self, make: _Make, sources: Sequence[_Kept | _Again]) -> None:
        self.users = 0
        self._make, self._sources, self._asked = make, sources, 0
        self._value: Tensor | None = None
        for each in sources:
            each.users += 1

    def get(self) -> Tensor:
        """Return the tensor."""
        value = self._value
        if value is None:
            with torch.no_grad(), torch._C._DisableAutocast():
                value = self._make([each.get() for each in self._sources])
        self._asked += 1
        self._value = None if self._asked % self.users == 0 else value
        return value


class Selected:
    """What one run of a layer keeps.

    Args:
        module: The layer, whose parameters and buffers take no memory of their own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._recipes: dict[_Key, _Recipe] = {}
        self._packed: dict[_Key, _Kept | _Again] = {}
        own = (*module.parameters(), *module.buffers())
        self._here = {each.untyped_storage()._cdata for each in own}  # memory that stays anyway
        self._alive: list[Tensor] = []  # while the layer runs, so that no other gets their memory
        self._written: set[int] = set()  # memory that collectives wrote to, which no version tells
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def run(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward."""
        packing = saved_tensors_hooks(self._pack, lambda packed: packed.get())
        with packing, hear_made(self._gathered), _Noting(self):
            return inner(*args, **kwargs)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down how an operation made its results."""
        sources: list[Tensor] = []
        others = _without(args, sources)
        if not sources or not all(map(_plain, sources)):
            return
        least = max(each.numel() for each in sources) / _SMALLER
        versions = [each._version for each in sources]
        results = out if isinstance(out, (tuple, list)) else (out,)
        for index, result in enumerate(results):
            if isinstance(result, Tensor) and result.numel() > least:
                at = index if out is results else None
                make = partial(_operate, func, others, kwargs, at)
                told = [result._version, *versions]
                self._recipes[_key(result)] = _Recipe(result, make, sources, told)

    def written(self, tensors: Any) -> None:
        """Note what a collective writes to: its first argument."""
        self._written.update(each.untyped_storage()._cdata for each in tensors_in(tensors))

    def _gathered(self, result: Tensor, make: Callable[[Tensor], Tensor], source: Tensor) -> None:
        if result is not source and _plain(source) and _plain(result):
            versions = [result._version, source._version]
            self._recipes[_key(result)] = _Recipe(
                result, lambda sources: make(sources[0]), [source.detach()], versions, together=True
            )

    def _pack(self, tensor: Tensor) -> _Kept | _Again:
        if not _plain(tensor):
            packed: _Kept | _Again = _Kept(tensor, self._hooks)
        else:
            packed = self._chosen(tensor, {})
        packed.users += 1
        return packed

    def _chosen(self, tensor: Tensor, costs: dict[_Key, int]) -> _Kept | _Again:
        """Return how a tensor is kept."""
        key = _key(tensor)
        if key not in self._packed:
            recipe = self._recipes.get(key)
            if recipe is not None and self._is_made_again(tensor, recipe, costs):
                sources = [self._chosen(each, costs) for each in recipe.sources]
                self._packed[key] = _Again(recipe.make, sources)
            else:
                self._here.add(tensor.untyped_storage()._cdata)
                self._alive.append(tensor)
                self._packed[key] = _Kept(tensor, self._hooks)
        return self._packed[key]

    def _is_made_again(self, tensor: Tensor, recipe: _Recipe, costs: dict[_Key, int]) -> bool:
        if self._is_here(tensor) or not self._is_unchanged(recipe):
            return False
        return recipe.together or self._of_sources(recipe, costs) < _memory(tensor)

    def _cost(self, tensor: Tensor, costs: dict[_Key, int]) -> int:
        """Return the bytes that have to be kept to have a tensor in backward."""
        key = _key(tensor)
        if self._is_here(tensor) or isinstance(self._packed.get(key), _Again):
            return 0
        if key not in costs:
            recipe, costs[key] = self._recipes.get(key), _memory(tensor)
            if recipe is not None and self._is_unchanged(recipe):
                # Ranks may hold unlike shares, and have to choose the same.
                least = 0 if recipe.together else self._of_sources(recipe, costs)
                costs[key] = min(costs[key], least)
        return costs[key]

    def _of_sources(self, recipe: _Recipe, costs: dict[_Key, int]) -> int:
        return sum({_key(each): self._cost(each, costs) for each in recipe.sources}.values())

    def _is_unchanged(self, recipe: _Recipe) -> bool:
        tensors = (recipe.result, *recipe.sources)
        return all(
            each._version == version and each.untyped_storage()._cdata not in self._written
            for each, version in zip(tensors, recipe.versions, strict=True)
        )

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._here


class _Noting(TorchDispatchMode):
    """Writes operations down that autograd sees; what its functions do inside is theirs."""

    def __init__(self, selected: Selected) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._selected = selected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (
            torch.is_grad_enabled()
            and _is_cheap(func)
            and not any(isinstance(each, Tensor) for each in kwargs.values())
        ):
            self._selected.note(func, args, kwargs, out)
        return out


@cache
def _is_cheap(func: Any) -> bool:
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    views = any(each.alias_info for each in schema.returns)
    name = schema.name.removeprefix("aten::")
    return views or torch.Tag.pointwise in func.tags or name in _CHEAP


def _operate(
    func: Any, others: Any, kwargs: Any, at: int | None, sources: Sequence[Tensor]
) -> Tensor:
    """Run an operation again, of these tensors."""
    out = func(*_with(others, iter(sources)), **kwargs)
    made: Tensor = out if at is None else out[at]
    return made


def _without(value: Any, taken: list[Tensor]) -> Any:
    """Return arguments with a mark for every tensor, which are taken out."""
    if isinstance(value, Tensor):
        taken.append(value)
        return Tensor
    return [_without(each, taken) for each in value] if isinstance(value, (list, tuple)) else value


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return arguments with a tensor for every mark."""
    if value is Tensor:
        return next(tensors)
    return [_with(each, tensors) for each in value] if isinstance(value, list) else value


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _plain(tensor: Tensor) -> bool:
    usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return usual and not (tensor.is_conj() or tensor.is_neg())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _key(tensor: Tensor) -> _Key:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
