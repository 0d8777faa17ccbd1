"""Rows that loops over experts asked for: to the ranks that have the experts, and results back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ....dist import functional, get_comm_device, get_world_size
from ....dist.building import agree
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..exchange.attempts import attempt
from ..exchange.dispatch import exchange
from ..exchange.functions import apply, once_differentiable
from ..exchange.shares import share_out
from ..exchange.travel import landed
from ..module import Division
from .asking import Ask, Kinds, Sort, sort_of_call
from .standing import computing
from .telling import DTYPES, NOT_ASKED, Traffic, counts_of_asked, tell

Experts = Sequence[Callable[[Tensor], Any]]


def answer(
    asks: Sequence[Ask],
    experts: Experts,
    division: Division,
    kinds: Kinds,
    error: Exception | None,
) -> tuple[list[Tensor], Tensor | None, Exception | None]:
    """Have all calls of this rank answered; every rank that has some of the experts calls it.

    One small all-to-all says how many rows of which sort come; rows and results are one each. Ranks
    that hold the same tokens have made the same calls, and each sends a share of the rows.

    Args:
        asks: The calls.
        experts: This rank's; each is called once, on the rows of all ranks [n, H].
        division: How they are divided.
        kinds: What was learned of results, and is from now on.
        error: What is wrong here, told to all ranks.

    Returns:
        The result of each call, [n, H]; a mark that depends on all of them, [0, H], or None if
        nothing was exchanged; and what is wrong with the experts here.

    Raises:
        InvalidArgumentError: It is wrong, or experts return something else than rows.
        MismatchError: It is so on another rank, or ranks differ in what they ask for.
    """
    order = sorted(range(len(asks)), key=lambda number: asks[number].expert)
    found, failed = attempt(_rows_of, division.name, [asks[number] for number in order])
    error = error or failed
    sizes, rows = ([], None) if error else found
    asked = [asks[number].expert for number in order][: len(sizes)]
    sharers = 1 if division.tokens is None else get_world_size(division.tokens)
    if sharers > 1:
        lines = [f"expert {each}: {number} rows" for each, number in zip(asked, sizes, strict=True)]
        subject = f"what is asked of '{division.name}', the same on all tp ranks"
        _, error = attempt(lambda: agree(subject, lines, division.tokens, error=error))
    shares = share_out(sum(sizes), sharers)
    traffic = tell(rows, counts_of_asked(asked, sizes, shares, division), division, error)
    if traffic is None:
        return [], None, None
    if rows is None:
        rows = torch.empty(
            0, traffic.width, dtype=traffic.dtype, device=get_comm_device(division.group)
        )
    shared = sharers > 1 and len(rows) > 0
    share = functional.split(rows, 0, division.tokens, sizes=shares) if shared else rows
    results, mark, wrong = _exchanged(share, traffic, experts, division, kinds)
    if shared:
        results = functional.gather(results, 0, division.tokens, sizes=shares)
    back = dict(zip(order, results.split(sizes), strict=True)) if asks else {}
    return [back[number] for number in range(len(asks))], mark, wrong


def _rows_of(name: str, asks: Sequence[Ask]) -> tuple[list[int], Tensor | None]:
    """Return how many rows each call has, and all of them, [N, H]; None if there are no calls."""
    sorts = {(ask.given.shape[-1], ask.given.dtype) for ask in asks}
    if len(sorts) > 1 or not all(dtype in DTYPES for _, dtype in sorts):
        told = ", ".join(sorted(f"{dtype} [n, {width}]" for width, dtype in sorts))
        raise InvalidArgumentError(
            f"{describe_rank()}: experts of '{name}' must be called with rows of one width, and of "
            f"one dtype of {', '.join(map(str, DTYPES))}, got {told}"
        )
    rows = [ask.rows for ask in asks]
    return [*map(len, rows)], torch.cat(rows) if rows else None


def _exchanged(
    rows: Tensor, traffic: Traffic, experts: Experts, division: Division, kinds: Kinds
) -> tuple[Tensor, Tensor, Exception | None]:
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
) -> tuple[Tensor, Exception | None]:
    """Call each expert that was asked for anything, and return results in the order of rows."""
    sizes = [[max(count, 0) for count in each] for each in traffic.pieces]
    parts = came.split([*chain(*sizes)])
    rows = [torch.cat(parts[number :: len(experts)]) for number in range(len(experts))]
    asked = [any(each[n] != NOT_ASKED for each in traffic.pieces) for n in range(len(experts))]
    found, error = attempt(_call, experts, rows, asked)
    found = found or {}
    sort = sort_of_call(traffic.dtype, came.device)
    kind = kinds.get(sort) or _kind(found, experts[0], rows[0][:0], sort)
    wrongs = (_wrong(division.name, rows[n], result, kind) for n, result in found.items())
    error = error or next(filter(None, wrongs), None)
    if sort not in kinds:
        subject = f"the experts of '{division.name}'"
        agree(subject, [f"results {kind}"], division.group, error=error)
        kinds[sort] = kind
    fits = [n in found and not error for n in range(len(experts))]
    fit = [found[n] if fits[n] else each.to(kind) for n, each in enumerate(rows)]
    split = [each.split([of[number] for of in sizes]) for number, each in enumerate(fit)]
    ordered = [each[rank] for rank in range(len(sizes)) for each in split]
    return torch.cat(ordered), error


def _call(experts: Experts, rows: Sequence[Tensor], asked: Sequence[bool]) -> dict[int, Any]:
    """Return the result of each expert that was asked for anything."""
    with computing():
        return {n: experts[n](each) for n, each in enumerate(rows) if asked[n]}


def _kind(
    found: Mapping[int, Any], expert: Callable[[Tensor], Any], nothing: Tensor, sort: Sort
) -> torch.dtype:
    """Return the dtype of results; if nothing was asked, that of an expert's for no rows."""
    result = next(iter(found.values()), None)
    if not found:
        with torch.no_grad():
            result = (attempt(_call, [expert], [nothing], [True])[0] or {}).get(0)
    return result.dtype if isinstance(result, Tensor) else sort[1] or sort[0]


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
