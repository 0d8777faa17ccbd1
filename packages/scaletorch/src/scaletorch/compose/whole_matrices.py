"""Let optimizers such as Muon update whole matrices of a model that is cut over tp."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

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

Sizes = Mapping[str, tuple[int, torch.dtype]]  # elements and dtype of a rank's shards, by name


def whole_matrices(
    optimizer: Optimizer, model: nn.Module, manager: ProcessGroupManager | None = None
) -> Optimizer:
    """Let an optimizer that needs whole parameters update them whole, in place; all ranks call it.

    One tp rank owns each parameter that is cut over tp: its optimizer has the whole parameter and
    all of its state, and the other ranks' optimizers drop it. In `optimizer.step()` gradient shards
    go to the owners in one all-to-all, and shards of the new weights come back in another.
    Schedulers and clipping work as before, and `scaletorch.checkpoint` saves and loads the state on
    any layout.

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
    taken = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    cuts = find_cuts(model)
    held = [
        Matrix(shard, cuts[shard.name])
        for shard in parameter_shards(model)
        if id(shard.tensor) in taken and shard.name in cuts and cuts[shard.name].layer.tp_size > 1
    ]
    own = {m.shard.name: (m.shard.parameter.numel(), m.shard.tensor.dtype) for m in held}
    everyone = all_gather_object(own, manager.tp_group)
    error = caught(_require_same, everyone)
    agree("the matrices of this optimizer", [], manager.world_group, error=error)
    exchange = Exchange(held, everyone, manager.tp_group)
    _replace(optimizer, exchange)
    _follow(optimizer, exchange)
    _exchanges[optimizer] = exchange
    return optimizer


def whole_shards(optimizer: Optimizer | None) -> list[tuple[Shard, nn.Parameter]]:
    """Return the whole parameters in this rank's optimizer, each with the shard it replaces."""
    exchange = None if optimizer is None else _exchanges.get(optimizer)
    return [] if exchange is None else [(m.shard, whole) for m, whole in exchange.wholes]


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


def _require_same(everyone: Sequence[Sizes]) -> None:
    """Refuse matrices that only some tp ranks give to their optimizers."""
    names = {name for sizes in everyone for name in sizes}
    incomplete = sorted(name for name in names if any(name not in sizes for sizes in everyone))
    if incomplete:
        raise MismatchError(
            f"{describe_rank()}: the optimizers of some tensor-parallel ranks have "
            f"{', '.join(incomplete[:4])}, and those of others have not: give all the same; a "
            "sharded optimizer needs matrices that tp cuts evenly"
        )


def _owners(everyone: Sequence[Sizes]) -> dict[str, int]:
    """Return the tp rank that updates each matrix, by name; ranks get about as many elements."""
    total = {name: sum(sizes[name][0] for sizes in everyone) for name in everyone[0]}
    loads, owners = [0] * len(everyone), dict[str, int]()
    for name in sorted(total, key=lambda name: (-total[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += total[name]
    return owners


def _replace(optimizer: Optimizer, exchange: Exchange) -> None:
    """Replace shards by whole parameters on their owners; remove them on the other ranks."""
    instead: dict[int, list[Tensor]] = {id(each.shard.tensor): [] for each in exchange.matrices}
    instead |= {id(matrix.shard.tensor): [whole] for matrix, whole in exchange.wholes}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in instead and hasattr(tensor, "stands_for"):
                del tensor.stands_for  # a sharded optimizer's whole parameter counts as whole
        found = [instead.get(id(tensor), [tensor]) for tensor in group["params"]]
        group["params"] = [tensor for tensors in found for tensor in tensors]
        group.pop("param_names", None)


def _follow(optimizer: Optimizer, exchange: Exchange) -> None:
    """Make the optimizer's `step`, `zero_grad` and state dict handle its whole matrices."""
    names = [matrix.shard.name for matrix, _ in exchange.wholes]

    def before(this: Optimizer, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None or hasattr(this, "grad_scale"):
            raise StateError(
                f"{describe_rank()}: {type(this).__name__} has whole matrices, and its step takes "
                "neither a closure nor a gradient scaler: call backward before, in bfloat16 if "
                "float32 is too long"
            )
        exchange.read()

    def refuse_others(_: Optimizer, state: Mapping[str, Any]) -> None:
        if state.get("whole") != names:
            raise StateError(
                f"{describe_rank()}: this state is not of this rank's whole matrices: "
                "state_dict() is one rank's shard on one layout; use scaletorch.checkpoint instead"
            )

    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(lambda *_: exchange.write())
    # Run before a sharded optimizer sends the updated shards to other ranks.
    order: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    order.move_to_end(handle.id, last=False)
    optimizer.register_step_post_hook(lambda *_: exchange.note_versions())
    # Torch's scaler would look for gradients on the shards: let it call step, which then raises.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "whole": names})
    optimizer.register_load_state_dict_pre_hook(refuse_others)
    optimizer.zero_grad = _clearing(optimizer, exchange)  # type: ignore[method-assign]


def _clearing(optimizer: Optimizer, exchange: Exchange) -> Callable[..., None]:
    """Return a `zero_grad` that clears the gradients of the model's shards as well."""
    inner, reference = vars(optimizer).get("zero_grad"), weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        this = reference()
        if inner is not None:  # a sharded optimizer's
            inner(set_to_none)
        elif this is not None:
            type(this).zero_grad(this, set_to_none)
        for shard in (each.shard.tensor for each in exchange.matrices):
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()

    return zero_grad


class Matrix(NamedTuple):
    """A parameter that is cut over tp, of which this rank has a shard."""

    shard: Shard  # the shard in this rank's optimizer
    cut: ParameterCut

    def shape_on(self, rank: int) -> Size:
        """Return the shape of a tp rank's shard."""
        shape = list(self.shard.tensor.shape)
        shape[self.cut.dim] = self.cut.cut.sizes[rank]
        return Size(shape)

    def new_whole(self) -> Tensor:
        """Return an empty tensor of the whole matrix."""
        like = self.shard.tensor
        return like.new_empty(self.cut.whole(like.shape))


class Exchange:
    """The exchange of matrices between tp ranks, by all-to-alls in the widest of their dtypes."""

    def __init__(
        self, matrices: Iterable[Matrix], everyone: Sequence[Sizes], group: ProcessGroup | None
    ) -> None:
        self._group, self._rank, self._size = group, get_rank(group), get_world_size(group)
        dtypes = [dtype for sizes in everyone for _, dtype in sizes.values()]
        self._dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        owners = _owners(everyone)
        self.matrices = sorted(matrices, key=lambda each: each.shard.name)
        # The matrices of each owner, and the parameters by which this rank updates its own.
        self._of: list[list[Matrix]] = [[] for _ in range(self._size)]
        for each in self.matrices:
            self._of[owners[each.shard.name]].append(each)
        self.wholes = [(each, nn.Parameter(each.new_whole())) for each in self._of[self._rank]]
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
            [m.cut.cut.take(whole.detach(), m.cut.dim, rank) for m, whole in self.wholes]
            for rank in range(self._size)
        ]
        expected = [[each.shard.tensor.numel() for each in theirs] for theirs in self._of]
        for theirs, received in zip(self._of, self._pass(sent, expected), strict=True):
            for matrix, values in zip(theirs, received, strict=True):
                matrix.shard.tensor.copy_(values.view_as(matrix.shard.tensor))

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
        for theirs in self._of:
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
            joined = torch.cat(
                [flat[index].view(each[index]) for flat, each in pairs], matrix.cut.dim
            )
            arranged = matrix.cut.cut.arrange(joined, matrix.cut.dim)
            found.append(arranged.to(whole) if heads[1 + index] else None)
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


_exchanges: weakref.WeakKeyDictionary[Optimizer, Exchange] = weakref.WeakKeyDictionary()
