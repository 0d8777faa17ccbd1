"""Selective recomputation: what autograd would keep is made again where that is cheap.

While a layer runs, cheap operations (elementwise ones, copies, norms, softmax) and gathers of
sequences are written down. A tensor that backward wants is then kept as the way to make it from
tensors that are kept anyway, if that takes less memory: of a norm its input remains, of an
activation function and of products with it their inputs. Products of matrices, attention, random
draws and sums over ranks never run again, and nothing runs twice that is kept.
After Korthikanti et al. 2022, section 5, by what a tensor was made of in place of named modules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..dist.building import hear_made, tensors_in
from ..dist.errors import StateError
from .operations import Operations, repeated

# What comes out far smaller than what goes in, as sums do, is kept: it takes little, and much would
# be read for it.
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
        keys: Of the sources, when it was made.
        together: Whether all ranks have to make it again, or none.
    """

    result: Tensor
    make: _Make
    sources: Sequence[Tensor]
    keys: Sequence[_Key]
    together: bool = False


class _Kept:
    """A tensor that is kept, by the hooks around the layer if there are any."""

    def __init__(self, tensor: Tensor, hooks: Any) -> None:
        self.users = 0
        self._pack: _Hook
        self._bring_back: _Hook
        self._pack, self._bring_back = hooks or (_itself, _itself)
        # What a hook makes of it is the hook's to watch.
        self._version = tensor._version if hooks is None else None
        self._held = self._pack(tensor.detach())

    def part(self) -> None:
        """Keep a copy, before the tensor is written to."""
        copy = self.get().clone()
        self._version = None if self._version is None else copy._version
        self._held = self._pack(copy)

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
        self._own = {each.untyped_storage()._cdata for each in own}
        self._kept: dict[int, list[_Kept]] = defaultdict(list)  # by memory
        self._writes = Counter[int]()  # how often memory was written to
        self._alive: list[Tensor] = []  # while the layer runs, so that no other gets their memory
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def run(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward."""
        packing = saved_tensors_hooks(self._pack, lambda packed: packed.get())
        try:
            with packing, hear_made(self._gathered), Operations(self.note, self.write):
                return inner(*args, **kwargs)
        finally:  # the graph holds the hook, and so this; what is kept it holds itself
            for each in (self._recipes, self._packed, self._kept, self._alive):
                each.clear()

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down how an operation made its results."""
        sources: list[Tensor] = []
        again = repeated(func, args, kwargs, sources)
        if not sources or not all(map(_plain, sources)):
            return
        least = max(each.numel() for each in sources) / _SMALLER
        keys = [self._key(each) for each in sources]
        results = out if isinstance(out, (tuple, list)) else (out,)
        for index, result in enumerate(results):
            if isinstance(result, Tensor) and result.numel() > least:
                key = self._key(result)
                if key not in keys:  # and not the same called anew, as by detach
                    make = partial(again, index if out is results else None)
                    self._recipes[key] = _Recipe(result, make, sources, keys)

    def write(self, tensors: Any) -> None:
        """Note that tensors are about to be written to: what was there is another thing."""
        for each in tensors_in(tensors):
            memory = each.untyped_storage()._cdata
            for kept in self._kept.pop(memory, ()):
                kept.part()
            self._writes[memory] += 1

    def _gathered(self, result: Tensor, make: Callable[[Tensor], Tensor], source: Tensor) -> None:
        if result is not source and _plain(source) and _plain(result):
            own = source.detach()
            self._recipes[self._key(result)] = _Recipe(
                result, lambda sources: make(sources[0]), [own], [self._key(own)], together=True
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
        key = self._key(tensor)
        if key not in self._packed:
            recipe = self._recipe(key)
            if recipe is not None and self._is_made_again(tensor, recipe, costs):
                sources = [self._chosen(each, costs) for each in recipe.sources]
                self._packed[key] = _Again(recipe.make, sources)
            else:
                kept = self._packed[key] = _Kept(tensor, self._hooks)
                self._kept[key[0]].append(kept)
                self._alive.append(tensor)
        return self._packed[key]

    def _is_made_again(self, tensor: Tensor, recipe: _Recipe, costs: dict[_Key, int]) -> bool:
        if self._is_here(tensor):
            return False
        return recipe.together or self._of_sources(recipe, costs) < _memory(tensor)

    def _cost(self, tensor: Tensor, costs: dict[_Key, int]) -> int:
        """Return the bytes that have to be kept to have a tensor in backward."""
        key = self._key(tensor)
        if self._is_here(tensor) or isinstance(self._packed.get(key), _Again):
            return 0
        if key not in costs:
            recipe, costs[key] = self._recipe(key), _memory(tensor)
            if recipe is not None:
                # Ranks may hold unlike shares, and have to choose the same.
                least = 0 if recipe.together else self._of_sources(recipe, costs)
                costs[key] = min(costs[key], least)
        return costs[key]

    def _of_sources(self, recipe: _Recipe, costs: dict[_Key, int]) -> int:
        pairs = zip(recipe.keys, recipe.sources, strict=True)
        return sum({key: self._cost(each, costs) for key, each in pairs}.values())

    def _recipe(self, key: _Key) -> _Recipe | None:
        """Return how a tensor was made, if all that it was made of is what it was."""
        recipe = self._recipes.get(key)
        if recipe is None or recipe.keys != [self._key(each) for each in recipe.sources]:
            return None
        return recipe

    def _is_here(self, tensor: Tensor) -> bool:
        memory = tensor.untyped_storage()._cdata
        return memory in self._own or memory in self._kept

    def _key(self, tensor: Tensor) -> _Key:
        memory = tensor.untyped_storage()._cdata
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        return memory, self._writes[memory], *place


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _plain(tensor: Tensor) -> bool:
    usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return usual and not (tensor.is_conj() or tensor.is_neg())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
