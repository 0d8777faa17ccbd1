"""Let optimizers such as Muon update whole matrices of a model that is cut over tp."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..dist import all_gather_object, get_comm_device, get_rank, get_world_size
from ..dist.building import agree, all_to_all_flat, caught
from ..dist.errors import InvalidArgumentError, MismatchError, StateError
from ..parallel.data_parallel import Shard, parameter_shards
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import Scope, update_scope
from ..parallel.tensor_parallel.building import ParameterCut, find_cuts
from .forward import manager_of

Held = list[tuple[Shard, ParameterCut]]


def whole_matrices(
    optimizer: Optimizer, model: nn.Module, manager: ProcessGroupManager | None = None
) -> Optimizer:
    """Let an optimizer that needs whole parameters update them whole, in place; all ranks call it.

    One tp rank owns each parameter that is cut over tp: its optimizer has the whole parameter and
    all of its state, and the other ranks' optimizers drop it. In `optimizer.step()` gradient shards
    go to the owners in one all-to-all per dtype, and shards of the new weights come back in
    another. Schedulers and clipping work as before, and `scaletorch.checkpoint` saves and loads the
    state on any layout.

    With ZeRO call `shard_optimizer` first: then state and work are divided over dp and tp. An
    optimizer that treats all elements the same way stays as it is; so does any without tp.

    Args:
        optimizer: An optimizer that updates each parameter independently (tried on small matrices)
            and has made no step. Other parameters may have other optimizers.
        model: The model that `parallelize` returned.
        manager: The grid; by default the model's.

    Returns:
        The optimizer.

    Raises:
        InvalidArgumentError: The optimizer looks at several parameters at once.
        StateError: The optimizer has made steps, has whole matrices already, or has an `eval`.
        MismatchError: The ranks' optimizers differ.

    Source: Muon, https://kellerjordan.github.io/posts/muon/; an owner for each matrix, as in
        Distributed Shampoo, https://arxiv.org/abs/2309.06497.

    Example:
        >>> muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
        >>> whole_matrices(muon, model)
    """
    manager = manager_of(model, manager)
    if manager.tp_size == 1:
        return optimizer
    scope = update_scope(optimizer)
    lines = [type(optimizer).__name__, scope.name]
    error = caught(_check, optimizer, scope)
    agree("the optimizer of whole matrices", lines, manager.world_group, error=error)
    if scope is Scope.ELEMENT:
        return optimizer
    shared: list[tuple[list[Matrix], torch.dtype]] = []
    error = None
    for held, dtype in _of_each_dtype(optimizer, model, manager):
        try:
            shared.append((_share_out(held, manager.tp_group), dtype))
        except MismatchError as different:  # on all tp ranks; other groups may have the same
            error = error or different
    agree("the matrices of this optimizer", [], manager.world_group, error=error)
    exchanges = [Exchange(matrices, dtype, manager.tp_group) for matrices, dtype in shared]
    _replace(optimizer, exchanges)
    _follow(optimizer, exchanges)
    _exchanges[optimizer] = exchanges
    return optimizer


def whole_shards(optimizer: Optimizer | None) -> list[tuple[Shard, nn.Parameter]]:
    """Return the whole parameters in this rank's optimizer, each with the shard it replaces."""
    exchanges = [] if optimizer is None else _exchanges.get(optimizer, [])
    return [(m.shard, whole) for exchange in exchanges for m, whole in exchange.wholes]


def _check(optimizer: Optimizer, scope: Scope) -> None:
    kind = type(optimizer).__name__
    if scope > Scope.PARAMETER:
        raise InvalidArgumentError(
            f"{kind} {scope.words}, and each rank would have some of the matrices: take an "
            "optimizer that updates each parameter by itself"
        )
    if optimizer in _exchanges:
        raise StateError(f"this {kind} has whole matrices already")
    if scope is Scope.PARAMETER and optimizer.state:
        raise StateError(
            f"{describe_rank()}: this {kind} has made steps on shards: call whole_matrices before "
            "the first step, and load its state afterwards"
        )
    if scope is Scope.PARAMETER and callable(getattr(optimizer, "eval", None)):
        raise StateError(
            f"{kind} has an eval() that changes weights, which shards would not follow: take it "
            "without tensor parallelism"
        )


def _of_each_dtype(
    optimizer: Optimizer, model: nn.Module, manager: ProcessGroupManager
) -> Iterator[tuple[Held, torch.dtype]]:
    """Yield an optimizer's parameters that are cut over tp, by dtype, the same on all tp ranks."""
    taken = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    cuts = find_cuts(model)
    held = [
        (shard, cuts[shard.name])
        for shard in parameter_shards(model)
        if id(shard.tensor) in taken and shard.name in cuts and cuts[shard.name].layer.tp_size > 1
    ]
    everyone = all_gather_object({shard.tensor.dtype for shard, _ in held}, manager.tp_group)
    for dtype in sorted({dtype for dtypes in everyone for dtype in dtypes}, key=str):
        yield [each for each in held if each[0].tensor.dtype == dtype], dtype


def _share_out(held: Held, group: ProcessGroup | None) -> list[Matrix]:
    """Choose an owner for each matrix, the same on all tp ranks; return the matrices by name."""
    everyone = all_gather_object({shard.name: shard.parameter.numel() for shard, _ in held}, group)
    names = {name for sizes in everyone for name in sizes}
    incomplete = sorted(name for name in names if any(name not in sizes for sizes in everyone))
    if incomplete:
        raise MismatchError(
            f"{describe_rank()}: the optimizers of some tensor-parallel ranks have "
            f"{', '.join(incomplete[:4])}, and those of others have not: give all the same; a "
            "sharded optimizer needs matrices that tp cuts evenly"
        )
    total = {name: sum(sizes[name] for sizes in everyone) for name in names}
    loads, owners = [0] * len(everyone), dict[str, int]()
    for name in sorted(names, key=lambda name: (-total[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += total[name]
    by_name = sorted(held, key=lambda each: each[0].name)
    return [Matrix(shard, cut, owners[shard.name]) for shard, cut in by_name]


def _replace(optimizer: Optimizer, exchanges: list[Exchange]) -> None:
    """Replace shards by whole parameters on their owners; remove them on the other ranks."""
    instead: dict[int, list[Tensor]] = {}
    for exchange in exchanges:
        instead |= {id(matrix.shard.tensor): [] for matrix in exchange.matrices}
        for matrix, whole in exchange.wholes:
            instead[id(matrix.shard.tensor)] = [whole]
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in instead and hasattr(tensor, "stands_for"):
                del tensor.stands_for  # a sharded optimizer's whole parameter counts as whole
        found = [instead.get(id(tensor), [tensor]) for tensor in group["params"]]
        group["params"] = [tensor for tensors in found for tensor in tensors]
        group.pop("param_names", None)


def _follow(optimizer: Optimizer, exchanges: list[Exchange]) -> None:
    """Make the optimizer's `step`, `zero_grad` and state dict handle its whole matrices."""
    names = [matrix.shard.name for exchange in exchanges for matrix, _ in exchange.wholes]

    def before(this: Optimizer, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None or hasattr(this, "grad_scale"):
            raise StateError(
                f"{describe_rank()}: {type(this).__name__} has whole matrices, and its step takes "
                "neither a closure nor a gradient scaler: call backward before, in bfloat16 if "
                "float32 is too long"
            )
        for exchange in exchanges:
            exchange.read()

    def after(*_: Any) -> None:
        for exchange in exchanges:
            exchange.write()

    def settled(*_: Any) -> None:
        for exchange in exchanges:
            exchange.note_versions()

    def refuse_others(_: Optimizer, state: Mapping[str, Any]) -> None:
        if state.get("whole") != names:
            raise StateError(
                f"{describe_rank()}: this state is not of this rank's whole matrices: "
                "state_dict() is one rank's shard on one layout; use scaletorch.checkpoint instead"
            )

    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(after)
    # Run before a sharded optimizer sends the updated shards to other ranks.
    order: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    order.move_to_end(handle.id, last=False)
    optimizer.register_step_post_hook(settled)
    # Torch's scaler would look for gradients on the shards: let it call step, which then raises.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "whole": names})
    optimizer.register_load_state_dict_pre_hook(refuse_others)
    optimizer.zero_grad = _clearing(optimizer, exchanges)  # type: ignore[method-assign]


def _clearing(optimizer: Optimizer, exchanges: list[Exchange]) -> Callable[..., None]:
    """Return a `zero_grad` that clears the gradients of the model's shards as well."""
    inner, reference = vars(optimizer).get("zero_grad"), weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        this = reference()
        if inner is not None:  # a sharded optimizer's
            inner(set_to_none)
        elif this is not None:
            type(this).zero_grad(this, set_to_none)
        for shard in (m.shard.tensor for exchange in exchanges for m in exchange.matrices):
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()

    return zero_grad


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that is cut over tp, of which this rank has a shard."""

    shard: Shard  # the shard in this rank's optimizer
    cut: ParameterCut
    owner: int  # the tp rank that updates the whole matrix

    def shape_on(self, rank: int) -> Size:
        """Return the shape of a tp rank's shard."""
        shape = list(self.shard.tensor.shape)
        shape[self.cut.dim] = self.cut.cut.sizes[rank]
        return Size(shape)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all tp ranks to the whole matrix."""
        joined = torch.cat(list(shards), self.cut.dim)
        return self.cut.cut.arrange(joined, self.cut.dim)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return a tp rank's shard of the whole matrix."""
        return self.cut.cut.take(whole, self.cut.dim, rank)


class Exchange:
    """The exchange of matrices of one dtype between tp ranks, by all-to-alls."""

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, group: ProcessGroup | None
    ) -> None:
        self.matrices, self._dtype, self._group = list(matrices), dtype, group
        self._rank, self._size = get_rank(group), get_world_size(group)
        self.wholes: list[tuple[Matrix, nn.Parameter]] = []  # that this rank owns and updates
        for matrix in self.matrices:
            if matrix.owner == self._rank:
                like = matrix.shard.tensor
                whole = like.new_empty(matrix.cut.whole(like.shape))
                self.wholes.append((matrix, nn.Parameter(whole)))
        self._versions: list[int] = []
        self._read_weights()
        self.note_versions()

    def note_versions(self) -> None:
        """Record that owners have the current values of the shards."""
        self._versions = self._current_versions()

    @torch.no_grad()
    def read(self) -> None:
        """Send gradients to owners, and weights too if any shard has been written to."""
        written = self._versions != self._current_versions()
        found, anywhere = self._to_owners(lambda matrix: matrix.shard.tensor.grad, written)
        for (_, whole), gradient in zip(self.wholes, found, strict=True):
            whole.grad = gradient
        if anywhere:
            self._read_weights()

    @torch.no_grad()
    def write(self) -> None:
        """Send all ranks their shards of the owners' new weights; drop the owners' gradients."""
        for _, whole in self.wholes:
            whole.grad = None
        sent = [
            [matrix.take(whole.detach(), rank) for matrix, whole in self.wholes]
            for rank in range(self._size)
        ]
        expected = [
            [each.shard.tensor.numel() for each in self.matrices if each.owner == rank]
            for rank in range(self._size)
        ]
        received = self._pass(sent, expected)
        for matrix in self.matrices:
            shard = matrix.shard.tensor
            shard.copy_(received[matrix.owner].pop(0).view(shard.shape))

    @torch.no_grad()
    def _read_weights(self) -> None:
        found, _ = self._to_owners(lambda matrix: matrix.shard.tensor)
        for (_, whole), value in zip(self.wholes, found, strict=True):
            if value is not None:
                whole.copy_(value)

    def _to_owners(
        self, tensor_of: Callable[[Matrix], Tensor | None], written: bool = False
    ) -> tuple[list[Tensor | None], bool]:
        """Return the whole tensors, or None, that this rank owns, and whether any has `written`."""
        sent = []
        for owner in range(self._size):
            theirs = [each for each in self.matrices if each.owner == owner]
            tensors = [tensor_of(each) for each in theirs]
            head = torch.tensor([written, *(each is not None for each in tensors)])
            filled = (
                torch.zeros_like(each.shard.tensor) if tensor is None else tensor
                for each, tensor in zip(theirs, tensors, strict=True)
            )
            sent.append([head, *filled])
        ranks = range(self._size)
        shapes = [[matrix.shape_on(rank) for matrix, _ in self.wholes] for rank in ranks]
        expected = [[1 + len(each), *(shape.numel() for shape in each)] for each in shapes]
        received = self._pass(sent, expected)
        heads = torch.stack([each.pop(0) for each in received]).any(0).tolist()
        found: list[Tensor | None] = []
        for index, (matrix, whole) in enumerate(self.wholes):
            pairs = zip(received, shapes, strict=True)
            shards = [flat[index].view(each[index]) for flat, each in pairs]
            found.append(matrix.join(shards).to(whole.device) if heads[1 + index] else None)
        return found, heads[0]

    def _pass(
        self, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors, and return those from each rank, flat."""
        # Device and dtype must not depend on the tensors: a rank may have none to send.
        device = get_comm_device(self._group)
        flat = [each.flatten().to(device, self._dtype) for each in chain(*sent)]
        data = torch.cat([torch.empty(0, dtype=self._dtype, device=device), *flat])
        counts = [sum(each.numel() for each in some) for some in sent]
        totals = [sum(sizes) for sizes in expected]
        received = all_to_all_flat(data, counts, totals, self._group).wait()
        pairs = zip(received.split(totals), expected, strict=True)
        return [list(flat.split(list(sizes))) for flat, sizes in pairs]

    def _current_versions(self) -> list[int]:
        shards = [matrix.shard for matrix in self.matrices]
        return [each for s in shards for each in (s.tensor._version, s.parameter._version)]


_exchanges: weakref.WeakKeyDictionary[Optimizer, list[Exchange]] = weakref.WeakKeyDictionary()
