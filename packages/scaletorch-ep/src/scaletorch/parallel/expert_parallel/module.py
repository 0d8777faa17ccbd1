"""Divided experts: a subclass of the model's own class that also uses other ranks' experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError

from ...dist import functional, get_rank, get_world_size
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError, StateError
from ...dist.functional import spmd_local
from ..pg_manager import describe_rank
from ..pg_manager.building import deep_copy, shallow_copy, uncompiled
from ..placement import shard_sizes
from .exchange.dispatch import Dispatched, add_up, apply, combine, dispatch_along
from .exchange.routes import check_shapes, find_route, ranges_of

Run = Callable[[Tensor, Tensor, Tensor], Any]  # run(rows [P, H], index [P, K], weights [P, K])


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a module's experts; copies share it, as process groups cannot be copied."""

    name: str  # of the module
    group: ProcessGroup | None  # the ranks that share the experts
    tokens: ProcessGroup | None  # ranks that hold the same tokens and each send a share of them
    counts: tuple[int, ...]  # number of experts on each rank of the group
    stacked: tuple[str, ...]  # parameters that are cut along dim 0
    buffers: tuple[str, ...]  # buffers that are cut along dim 0
    checked: list[bool] = field(default_factory=list)  # True once the ranks agreed in a first call

    @property
    def own(self) -> range:
        """This rank's experts."""
        return ranges_of(self.counts)[get_rank(self.group)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self


class DividedExperts(nn.Module):
    """A base in front of a module's own class: its forward wraps the module's own."""

    _division: Division

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the experts' results for this rank's tokens, [T, H], as the whole module does."""
        results: Tensor = _call(self, super().forward, args, kwargs)
        if not self._division.checked:
            self._division.checked.append(True)
        return results

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copy(self, getattr(super(), "__deepcopy__", None), memo)

    def __copy__(self) -> Self:
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as by `torch.save(model)`."""
        raise StateError(
            f"{describe_rank()}: experts '{self._division.name}' cannot be pickled, as they are "
            "tied to this rank's process group: save their state_dict, and load it into a new "
            "model; copy.deepcopy works"
        )


def share_tokens(experts: DividedExperts, group: ProcessGroup | None) -> None:
    """Set the ranks that hold the same tokens and each send a share of them."""
    vars(experts)["_division"] = replace(experts._division, tokens=group)


class RoutedCall(NamedTuple):
    """A call, as rows with their experts."""

    hidden: Tensor  # [T, H]
    top_k_index: Tensor  # integers [T, K]
    top_k_weights: Tensor  # [T, K]


@uncompiled
def _call(
    module: DividedExperts,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Return the result of a call of the module's own forward, with arguments of any names."""
    given = list(args)
    if kwargs or len(given) != 3:
        given = list(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    if len(given) != 3 or not all(isinstance(each, Tensor) for each in given):
        raise InvalidArgumentError(
            f"{describe_rank()}: '{module._division.name}' takes three tensors (hidden states, "
            f"indices and weights), got {[type(each).__name__ for each in given]}"
        )
    call = RoutedCall(*given)
    check_shapes(*call)
    return _split_tokens(module, forward, call)


def _split_tokens(module: DividedExperts, run: Run, call: RoutedCall) -> Tensor:
    """Split tokens over the ranks that hold the same ones, and gather the results."""
    group, name = module._division.tokens, module._division.name
    ranks = 1 if group is None else get_world_size(group)
    if ranks == 1:
        return _run_experts(module, run, call)
    if not module._division.checked:
        shapes = [f"{tuple(each.shape)} {each.dtype}" for each in call]
        agree(f"the tokens of '{name}', the same on all tp ranks", shapes, group)
    sizes = shard_sizes(len(call.hidden), ranks)
    share = RoutedCall(
        functional.split(call.hidden, 0, group, sizes=sizes),
        call.top_k_index.split(list(sizes))[get_rank(group)],
        functional.split(call.top_k_weights, 0, group, sizes=sizes),
    )
    return functional.gather(_run_experts(module, run, share), 0, group, sizes=sizes)


def _run_experts(module: DividedExperts, run: Run, call: RoutedCall) -> Tensor:
    """Send tokens to the ranks of their experts, run the experts, and send results back."""
    division, counts = module._division, module._division.counts
    if len(counts) == 1:
        whole: Tensor = run(*call)
        return whole
    route = find_route(*call, counts, division.group)
    received = dispatch_along(route, *call, counts)
    # Another strategy may have put a tensor in the place of a parameter for this call.
    named: dict[str, Any] = {}
    for name in division.stacked:
        owner, own = owner_of(module, name)
        named[name] = owner._parameters[own]
    experts = partial(compute, run, received, len(division.own), [*named.values()])
    if division.checked:
        return combine(experts(), route)
    wrong: Exception | None = None
    try:
        results = experts()
    except _StopRecomputationError:  # ends torch's checkpoints, on all ranks at the same place
        raise
    except Exception as error:  # of any kind: the others would wait for this rank
        results, wrong = torch.zeros_like(received.hidden), error
    lines = [f"{name} {p.dtype} {tuple(p.shape[1:])}" for name, p in named.items()]
    agree(f"the experts '{division.name}'", lines, division.group, error=wrong)
    return combine(results, route)


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a parameter or buffer, and its name there."""
    owner, _, tensor = name.rpartition(".")
    return module.get_submodule(owner), tensor


def compute(experts: Run, received: Dispatched, count: int, parameters: Sequence[Tensor]) -> Tensor:
    """Return the results of the received rows, [R, H].

    Experts are called with top-k 1: one row for each pair of a received row and one of this rank's
    `count` experts, in expert order. They compute nothing for remote experts. If no row was
    received, their stacked `parameters` get a gradient of zeros.

    Raises:
        InvalidArgumentError: The experts' results are not like their input.
    """
    hidden, index, weights, route = received
    if not route.pairs:
        return _no_rows(hidden, weights, parameters)
    numbers, order = index.flatten().sort(stable=True)  # remote experts come last
    numbers, order = numbers[: route.pairs, None], order[: route.pairs]
    top_k = index.shape[1]
    row, most = order.div(top_k, rounding_mode="floor"), min(count, top_k)  # experts of a row
    inputs, scales = apply(_Spread, hidden, weights, row, order, most)
    results = experts(inputs, numbers, scales)
    _require_like(results, inputs)
    folded: Tensor = apply(_Fold, results, row, hidden.shape[0], most)
    return folded


def _no_rows(hidden: Tensor, weights: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return no results, [0, H], from which all other tensors get gradients of zeros."""
    nothing = torch.stack([each[:0].sum().to(hidden.dtype) for each in (weights, *parameters)])
    return hidden + nothing.sum()


def _require_like(results: Any, inputs: Tensor) -> None:
    got = f"a {type(results).__name__}"
    if isinstance(results, Tensor):
        if (results.shape, results.dtype) == (inputs.shape, inputs.dtype):
            return
        got = f"{results.dtype} {tuple(results.shape)}"
        if results.dtype != inputs.dtype:
            got += ": let them return results.to(hidden.dtype)"
    raise InvalidArgumentError(
        f"{describe_rank()}: experts must return a tensor like their input, {inputs.dtype} "
        f"{tuple(inputs.shape)}, got {got}"
    )


class _Spread(Function):
    """Copy a row and its weight for each pair; backward adds up the rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, row: Tensor, order: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Return `rows[row]` and, of shape [P, 1], `weights.flatten()[order]`."""
        ctx.row, ctx.order, ctx.most = row, order, most
        ctx.rows, ctx.weights = rows.shape[0], weights.shape
        return rows.index_select(0, row), weights.view(-1).index_select(0, order).unsqueeze_(1)

    @staticmethod
    def spmd_typecheck(
        outputs: Any, *, rows: Tensor, weights: Tensor, row: Tensor, order: Tensor
    ) -> None:
        """Give the outputs the type of the rows."""
        spmd_local(outputs, rows, weights, row, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Add up the gradients of each row, and return each weight's gradient at its index."""
        weights = grads[1].new_zeros(ctx.weights)
        weights.view(-1).index_copy_(0, ctx.order, grads[1].view(-1))
        rows = add_up(grads[0], ctx.row, ctx.rows, ctx.most)
        return rows, weights, None, None, None


class _Fold(Function):
    """Add up the results of each row; backward copies the gradient to each result."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, row: Tensor, rows: int, most: int) -> Tensor:
        """Return [rows, H]."""
        ctx.save_for_backward(row)
        return add_up(results, row, rows, most)

    @staticmethod
    def spmd_typecheck(output: Any, *, results: Tensor, row: Tensor) -> None:
        """Give the output the type of the results."""
        spmd_local(output, results, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of each result."""
        (row,) = ctx.saved_tensors
        return grads[0].index_select(0, row), None, None, None
