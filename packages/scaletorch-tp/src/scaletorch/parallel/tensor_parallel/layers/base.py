"""The base class of the sharded layers, and the refusal of optimizers that are wrong on shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ....dist import get_rank, get_world_size
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import axis_group, describe_rank
from ...pg_manager.building import Scope, update_scope
from ...placement import Cut, Invariant, Placement, fuse, share_cut
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import not_pickled
from ..styles import misfit_of

# Full parameter -> this rank's shard, so that tied ones stay tied.
Memo = MutableMapping[Tensor, nn.Parameter]

Group = ProcessGroup | None
Options = Mapping[str, Any]


class TensorParallelLayer(nn.Module):
    """A layer that is sharded over the ranks of `group`."""

    plain_class: ClassVar[type[nn.Module]]  # the class that it shards
    _known: ClassVar[Sequence[str]] = ("weight", "bias")  # its parameters; always with the first
    sharded_size: ClassVar[str]  # the attribute of that class that is divided over the ranks
    shard_dims: ClassVar[Mapping[str, int]] = {}  # parameter -> shard dim; others are replicated
    packed: ClassVar[Mapping[str, int]] = {}  # parameter -> number of packed projections
    replicable: ClassVar[bool] = False  # whether several ranks may hold the same shard
    options: ClassVar[Mapping[str, Any]] = {}  # further attributes and their defaults

    group: ProcessGroup | None  # the tensor-parallel axis; None in one process
    tp_size: int  # number of these ranks; with 1 the layer works like a plain one
    tp_rank: int  # this rank's index among them
    cut: Cut  # the index ranges of the divided size that each rank holds
    shard_sizes: tuple[int, ...]  # each rank's share of the divided size
    _kept: Collection[str]  # names of its parameters when it was sharded
    _replicated: bool  # whether several ranks hold the same shard
    _in_order: bool  # whether the ranks' shards, concatenated, are the full size
    sequence: SequenceShares | None = None  # sharding of its input's sequences, if any
    arrives: Placement | None = None  # placement of the input; None: a full one is invariant
    returns: Placement = Invariant()  # placement of a full or summed output

    @classmethod
    def convert(
        cls, module: nn.Module, group: ProcessGroup | None, memo: Memo, cut: Cut, **options: Any
    ) -> Self:
        """Convert a plain module, which fits, to this rank's shard in place.

        References to it, its hooks and its training mode stay. Parameters that are not sharded (a
        row-parallel bias; all with one rank) stay, too; new ones take over dtype, device and
        `requires_grad`.
        """
        layer: Any = module
        layer.__class__ = cls
        layer._shard(group, memo, options, cut)
        return layer  # type: ignore[no-any-return]

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Return whether `module` is of the class that this layer shards."""
        return type(module) is cls.plain_class

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become this layer, or None if it can."""
        if not cls.takes(module):
            return f"it is a {type(module).__name__}, not a {cls.plain_class.__name__} itself"
        found = {name: p for name, p in module._parameters.items() if p is not None}
        if not found.keys() <= {*cls._known}:  # a weight computed from others, for one
            return f"its parameters are {sorted(found)}, and only {sorted(cls._known)} are known"
        if cls._known[0] not in found:
            return f"its {cls._known[0]} is not a parameter"
        return misfit_of(module, found)

    def _build(
        self, draw: Callable[[], nn.Module], size: int, group: Group, options: Options
    ) -> None:
        """Initialise this rank's shard of a new layer; `draw` creates the full layer."""
        super().__init__()
        group = axis_group("tp", group)
        tp_size = get_world_size(group)
        if size < tp_size:
            raise InvalidArgumentError(
                f"{type(self).__name__}: {self.sharded_size} = {size} has no share for each of tp "
                f"= {tp_size} ranks; tp sizes up to {size} are legal"
            )
        vars(self).update(vars(draw()))
        self._shard(group, {}, options, share_cut(size, tp_size))

    def _shard(self, group: Group, memo: Memo, options: Options, cut: Cut) -> None:
        vars(self).update({**self.options, **options})
        self.group, self.tp_size, self.tp_rank = group, get_world_size(group), get_rank(group)
        if self.tp_size > 1:
            watch(self)
        # Computed once, since every forward needs them.
        self.cut, self.shard_sizes = cut, cut.sizes
        self._replicated, self._in_order = cut.replicated, cut.in_order
        for name, dim in self.shard_dims.items():
            whole = self._parameters.get(name)
            if whole is not None and self.tp_size > 1:
                self._parameters[name] = self._shard_parameter(name, dim, whole, memo)
        self._kept = frozenset(self._parameters)

    @property
    def settled(self) -> Collection[str]:
        """Names of the parameters whose gradients never need a sum over the ranks: shards."""
        return self.shard_dims

    def cut_of(self, name: str) -> Cut:
        """Return the cut of the parameter `name` along its shard dim."""
        return self.cut_of_packed(self.cut, name)

    @classmethod
    def cut_of_packed(cls, cut: Cut, name: str) -> Cut:
        """Return the cut of the parameter `name`, given the cut of each packed projection."""
        return fuse([cut] * cls.packed.get(name, 1))

    def _shard_parameter(
        self, name: str, dim: int, whole: nn.Parameter, memo: Memo
    ) -> nn.Parameter:
        if whole not in memo:
            cut = self.cut_of(name)
            shard = nn.Parameter(self._own(whole, dim, cut), requires_grad=whole.requires_grad)
            vars(shard).update(vars(whole))
            shard.grad = None if whole.grad is None else self._own(whole.grad, dim, cut)
            memo[whole] = shard
        return memo[whole]

    def _own(self, whole: Tensor, dim: int, cut: Cut) -> Tensor:
        """Return a copy of this rank's shard, so that the full tensor can be freed."""
        shard = cut.take(whole.detach(), dim, self.tp_rank)
        return shard.clone(memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        """Return the plain module's full sizes, which of them is divided, and tp."""
        plain = self.plain_class.extra_repr(self)
        return f"{plain}{plain and ', '}{self.sharded_size} over tp={self.tp_size}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # process groups cannot be copied: share it
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        if self.tp_size > 1:
            watch(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling, and so `torch.save(model)`."""
        raise not_pickled(type(self).__name__)

    def _check_parameters(self) -> None:
        """Refuse a shard with a parameter that is computed from others."""
        if self._parameters.keys() != self._kept and self.tp_size > 1:
            names = ", ".join(name for name, _ in self.named_parameters())
            raise StateError(
                f"{describe_rank()}: a parameter of this {type(self).__name__} is computed from "
                f"others ({names}) on this rank's shard alone, as weight_norm, spectral_norm and "
                "pruning do: remove them, or give the layer the style 'replicate'"
            )

    def _check_input(self, x: Tensor, length: int) -> None:
        self._check_parameters()
        if x.shape[-1:] != (length,):
            options = ", ".join(f"{name}={getattr(self, name)}" for name in self.options)
            raise InvalidArgumentError(
                f"{describe_rank()}: {type(self).__name__}({options}) expected an input of last "
                f"dim {length}, got one of shape {tuple(x.shape)}"
            )


_models: WeakSet[nn.Module] = WeakSet()  # models with sharded layers, or the layers
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # optimizer -> parameter count
_hooks: list[Any] = []


def watch(module: nn.Module) -> None:
    """Check every optimizer of this module's parameters before its first step."""
    _models.add(module)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer that is new or has a new number of parameters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) != count:
        _check_optimizer(optimizer)
        _checked[optimizer] = count


def _check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer with sharded parameters whose update is not element-wise."""
    held = [*_shards_in(optimizer)]
    scope = update_scope(optimizer) if held else Scope.ELEMENT
    if scope is not Scope.ELEMENT:
        name, tensor = max(held, key=lambda pair: len(pair[0]))  # by a model, not a layer alone
        raise InvalidArgumentError(
            f"{describe_rank()}: {type(optimizer).__name__} {scope.words}, but {name} "
            f"{tuple(tensor.shape)} is of a model whose parameters are tensor-parallel shards, "
            "and updates of shards would differ. Give it whole matrices by "
            "whole_matrices(optimizer, model) of scaletorch.compose, or take an optimizer that "
            "treats every element alike, such as AdamW"
        )


def _shards_in(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of watched shards that an optimizer updates, and its tensors for them."""
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    # A sharded optimizer holds stand-ins of parameters. Each rank has other stand-ins of shards,
    # so any stand-in counts: all ranks then give the same answer.
    given = {id(getattr(tensor, "stands_for", tensor)): tensor for tensor in tensors}
    for model in _models:
        for name, module in model.named_modules():
            dims = getattr(module, "shard_dims", {})
            for own, parameter in module._parameters.items():
                tensor = given.get(id(parameter))
                if tensor is not None and (own in dims or tensor is not parameter):
                    yield f"{name}.{own}".lstrip("."), tensor
