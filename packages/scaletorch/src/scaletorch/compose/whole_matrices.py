"""Let optimizers such as Muon update whole matrices of a model that is cut over tp."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..dist import all_gather_object
from ..dist.building import agree, caught
from ..dist.errors import InvalidArgumentError, StateError
from ..parallel.data_parallel import Shard, parameter_shards
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import Scope, update_scope
from ..parallel.tensor_parallel.building import ParameterCut, find_cuts
from .forward import manager_of
from .matrices import Exchange, exchanging_group, share_out

Held = list[tuple[Shard, ParameterCut]]
_exchanges: weakref.WeakKeyDictionary[Optimizer, list[Exchange]] = weakref.WeakKeyDictionary()


def whole_matrices(
    optimizer: Optimizer, model: nn.Module, manager: ProcessGroupManager | None = None
) -> Optimizer:
    """Let an optimizer that needs whole parameters update them whole, in place; all ranks call it.

    One tp rank owns each parameter that is cut over tp. The owner's optimizer has the whole
    parameter in place of the shard, with all of its state; the other ranks' optimizers drop it. In
    `optimizer.step()` gradient shards go to the owners in one all-to-all per dtype, and shards of
    the new weights come back in another. Owners are chosen so that each has about the same number
    of elements. Schedulers and clipping work as before, and `scaletorch.checkpoint` saves and loads
    the state on any layout.

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
    exchanges = [
        Exchange(share_out(shards, group, manager), dtype, group)
        for shards, dtype, group in _of_each_dtype(optimizer, model, manager)
    ]
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
) -> Iterator[tuple[Held, torch.dtype, ProcessGroup | None]]:
    """Yield an optimizer's cut parameters by dtype, each time with the group that exchanges them.

    Parameters that every dp rank updates are exchanged in the tp group. So are those of a sharded
    optimizer, if the tp ranks have the same ones; see `exchanging_group`.
    """
    taken = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    cuts = find_cuts(model)
    held = [
        (shard, cuts[shard.name])
        for shard in parameter_shards(model)
        if id(shard.tensor) in taken and shard.name in cuts and cuts[shard.name].layer.tp_size > 1
    ]
    whole = [each for each in held if each[0].replicated]
    divided = [each for each in held if not each[0].replicated]
    group = exchanging_group(sorted(shard.name for shard, _ in divided), manager)
    for shards, ranks in ((whole, manager.tp_group), (divided, group)):
        told = all_gather_object({shard.tensor.dtype for shard, _ in shards}, ranks)
        for dtype in sorted({dtype for dtypes in told for dtype in dtypes}, key=str):
            yield [each for each in shards if each[0].tensor.dtype == dtype], dtype, ranks


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

    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(after)
    # Run before a sharded optimizer sends the updated shards to other ranks.
    order: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    order.move_to_end(handle.id, last=False)
    optimizer.register_step_post_hook(settled)
    # Torch's scaler would look for gradients on the shards: let it call step, which then raises.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer.register_state_dict_post_hook(partial(_name, exchanges))
    optimizer.register_load_state_dict_pre_hook(partial(_refuse_others, exchanges))
    inner = vars(optimizer).get("zero_grad", partial(_own_zero_grad, weakref.ref(optimizer)))
    optimizer.zero_grad = partial(_zero_grad, inner, exchanges)  # type: ignore[method-assign]


def _own_zero_grad(optimizer: weakref.ref[Optimizer], set_to_none: bool = True) -> None:
    this = optimizer()
    if this is not None:
        type(this).zero_grad(this, set_to_none)


def _zero_grad(
    inner: Callable[[bool], None], exchanges: list[Exchange], set_to_none: bool = True
) -> None:
    """Clear the gradients of the model's shards as well."""
    inner(set_to_none)
    for exchange in exchanges:
        for shard in (matrix.shard.tensor for matrix in exchange.matrices):
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()


def _names(exchanges: list[Exchange]) -> list[str]:
    return [matrix.shard.name for exchange in exchanges for matrix, _ in exchange.wholes]


def _name(exchanges: list[Exchange], _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "whole": _names(exchanges)}


def _refuse_others(exchanges: list[Exchange], _: Optimizer, state: Mapping[str, Any]) -> None:
    if state.get("whole") != _names(exchanges):
        raise StateError(
            f"{describe_rank()}: this state is not of this rank's whole matrices: state_dict() is "
            "one rank's part on one layout; use scaletorch.checkpoint instead"
        )
