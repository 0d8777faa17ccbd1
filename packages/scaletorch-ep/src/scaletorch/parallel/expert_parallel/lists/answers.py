"""Rows that loops over experts asked for: to the ranks that have the experts, and results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ....dist import functional, get_comm_device, get_world_size
from ....dist.building import agree, caught
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ..exchange.dispatch import exchange
from ..exchange.functions import apply
from ..exchange.shares import share_out
from ..exchange.travel import landed
from ..module import Division
from .asking import Ask, Kinds, computing, sort_of_call
from .telling import DTYPES, NOT_ASKED, Traffic, counts_of_asked, tell

Experts = Sequence[Callable[[Tensor], Any]]


class Answers(NamedTuple):
    """What experts answered.

    Attributes:
        results: Of each call, [n, H], in order.
        mark: Depends on all results, [0, H]; None if nothing was exchanged.
        error: What is wrong with the experts here.
    """

    results: list[Tensor]
    mark: Tensor | None
    error: ScaletorchError | None


def answer(
    asks: Sequence[Ask],
    experts: Experts,
    division: Division,
    kinds: Kinds,
    error: ScaletorchError | None,
) -> Answers:
    """Have all calls of this rank answered; every rank that has some of the experts calls it.

    One small all-to-all says how many rows of which sort come; rows and results are one each. Ranks
    that hold the same tokens have made the same calls, and each sends a share of the rows.

    Args:
        asks: The calls.
        experts: This rank's; each is called once, on the rows of all ranks [n, H].
        division: How they are divided.
        kinds: What was learned of results, and is from now on.
        error: What is wrong here, told to all ranks.

    Raises:
        InvalidArgumentError: It is wrong, or experts return something else than rows.
        MismatchError: It is so on another rank, or ranks differ in what they ask for.
    """
    order = sorted(range(len(asks)), key=lambda number: asks[number].expert)
    sizes = [len(asks[number].rows) for number in order]
    asked = [asks[number].expert for number in order]
    error = _agreed(division, asked, sizes, error or _unlike_rows(division.name, asks))
    shares = share_out(
        sum(sizes), 1 if division.tokens is None else get_world_size(division.tokens)
    )
    rows = None if error or not asks else torch.cat([asks[number].rows for number in order])
    traffic = tell(rows, counts_of_asked(asked, sizes, shares, division), division, error)
    if traffic is None:
        return Answers([], None, None)
    if rows is None:
        rows = torch.empty(
            0, traffic.width, dtype=traffic.dtype, device=get_comm_device(division.group)
        )
    shared = len(shares) > 1 and len(rows) > 0
    share = functional.split(rows, 0, division.tokens, sizes=shares) if shared else rows
    results, mark, wrong = _exchanged(share, traffic, experts, division, kinds)
    if shared:
        results = functional.gather(results, 0, division.tokens, sizes=shares)
    back = dict(zip(order, results.split(sizes), strict=True)) if asks else {}
    return Answers([back[number] for number in range(len(asks))], mark, wrong)


def _unlike_rows(name: str, asks: Sequence[Ask]) -> InvalidArgumentError | None:
    sorts = {(ask.given.shape[-1], ask.given.dtype) for ask in asks}
    if len(sorts) < 2 and all(dtype in DTYPES for _, dtype in sorts):
        return None
    told = ", ".join(sorted(f"{dtype} [n, {width}]" for width, dtype in sorts))
    return InvalidArgumentError(
        f"{describe_rank()}: experts of '{name}' must be called with rows of one width, and of one "
        f"dtype of {', '.join(map(str, DTYPES))}, got {told}"
    )


def _agreed(
    division: Division, asked: list[int], sizes: list[int], error: ScaletorchError | None
) -> ScaletorchError | None:
    """Return what is wrong on a rank that holds the same tokens, or that it asks otherwise."""
    if division.tokens is None or get_world_size(division.tokens) == 1:
        return error
    lines = [f"expert {each}: {rows} rows" for each, rows in zip(asked, sizes, strict=True)]
    subject = f"what is asked of '{division.name}', the same on all tp ranks"
    return caught(partial(agree, subject, lines, division.tokens, error=error))


def _exchanged(
    rows: Tensor, traffic: Traffic, experts: Experts, division: Division, kinds: Kinds
) -> tuple[Tensor, Tensor, ScaletorchError | None]:
    """Return the results of this rank's rows, a mark that hangs on them, and what is wrong here."""
    if traffic.backward and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # another rank needs gradients, so all send them
    came, mark = apply(_Exchange, rows, traffic.sends, traffic.receives, division.group)
    results, wrong = _compute(came, traffic, experts, division, kinds)
    results = torch.cat((mark.to(results.dtype), results))  # of the graph even without rows
    if torch.is_grad_enabled() and not results.requires_grad:
        results = results.detach().requires_grad_()
    back, mark = apply(_Exchange, results, traffic.receives, traffic.sends, division.group)
    return back, mark, wrong


def _compute(
    came: Tensor, traffic: Traffic, experts: Experts, division: Division, kinds: Kinds
) -> tuple[Tensor, ScaletorchError | None]:
    """Call each expert that was asked for anything, and return results in the order of rows."""
    sizes = [[max(count, 0) for count in each] for each in traffic.pieces]
    parts = came.split([*chain(*sizes)])
    found: list[Any] = []
    with computing():
        for number, expert in enumerate(experts):
            rows = torch.cat(parts[number :: len(experts)])
            asked = any(each[number] != NOT_ASKED for each in traffic.pieces)
            found.append((rows, expert(rows) if asked else None))
    kind, wrong = _kind(found, experts, traffic, division, kinds)
    fit = [rows.to(kind) if wrong or given is None else given for rows, given in found]
    split = [each.split([of[number] for of in sizes]) for number, each in enumerate(fit)]
    ordered = [each[rank] for rank in range(len(sizes)) for each in split]
    return torch.cat(ordered), wrong


def _kind(
    found: Sequence[tuple[Tensor, Any]],
    experts: Experts,
    traffic: Traffic,
    division: Division,
    kinds: Kinds,
) -> tuple[torch.dtype, ScaletorchError | None]:
    """Return the dtype of results, the same on all ranks, and what is wrong with those here."""
    sort = sort_of_call(traffic.dtype, found[0][0].device)
    results = [(rows, given) for rows, given in found if given is not None]
    if not results:
        with torch.no_grad(), computing():
            results = [(found[0][0], experts[0](found[0][0]))]
    kind = kinds.get(sort)
    if kind is None:
        kind = results[0][1].dtype if isinstance(results[0][1], Tensor) else traffic.dtype
    wrong = next(filter(None, (_wrong(division.name, *each, kind) for each in results)), None)
    if sort not in kinds:
        lines = [f"results {kind}"]
        agree(f"the experts of '{division.name}'", lines, division.group, error=wrong)
        kinds[sort] = kind
    return kind, wrong


def _wrong(name: str, rows: Tensor, result: Any, kind: torch.dtype) -> InvalidArgumentError | None:
    got = f"a {type(result).__name__}"
    if isinstance(result, Tensor):
        if (result.shape, result.dtype) == (rows.shape, kind):
            return None
        got = f"{result.dtype} {tuple(result.shape)}"
    return InvalidArgumentError(
        f"{describe_rank()}: experts of '{name}' must return a row of the same width for each row, "
        f"all of one dtype ({kind}); for {tuple(rows.shape)} one returned {got}"
    )


class _Exchange(Function):
    """Rows to other ranks; backward sends their gradients back, on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sends: tuple[int, ...],
        receives: tuple[int, ...],
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Return what came, [R, H], and a mark of no elements, [0, H]."""
        ctx.counts = receives, sends, group
        return _moved(rows, sends, receives, group), rows.new_empty(0, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the rows."""
        return _moved(grads[0], *ctx.counts), None, None, None


def _moved(
    rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup | None
) -> Tensor:
    (came,) = landed([exchange(rows.contiguous(), sends, receives, group)])
    return came.view(-1, rows.shape[1])
