"""What experts take of their rows and of their stacks, one expert at a time, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ..exchange.functions import apply, once_differentiable
from .stacks import PRODUCTS, Stack, product

_SORTS = (torch.sort, torch.argsort, Tensor.sort, Tensor.argsort)


def call_taking(
    experts: Callable[..., Any],
    rows: Tensor,
    given: tuple[Tensor, ...],
    stacks: Sequence[Tensor],
    sizes: Sequence[int] = (),
) -> Any:
    """Call experts, with gradients that cost less of what they take of one stack or of the rows.

    The gradient of `stack[expert]` in PyTorch is as large as the stack, zeros but for that expert,
    and all of them are added up: for E experts it writes E times all weights. Here it is written
    once, by the products themselves. Those of an expert's rows, and of their weights, are joined;
    of any other `rows[index]` they are added by a kernel that is quick in bfloat16, too. What sorts
    rows, which lie sorted, takes them as they are. Values are the same. All else that experts do is
    as ever, and so is everything if it is compiled.

    Args:
        experts: Called as `experts(rows, *given)`.
        rows: Hidden states [P, H].
        given: Indices and weights, [P, 1].
        stacks: Parameters of all experts, one along dim 0 for each.
        sizes: The rows of each expert, if these and what is given lie one expert after another.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return experts(rows, *given)
    # To see whose rows an index takes, the host reads it: on a device it would wait each time.
    lying = given if sizes and rows.is_cpu else ()
    with _Taking(rows, lying, stacks, sizes):
        return experts(rows, *given)


class _Taking(TorchFunctionMode):
    """While it is on, indexing of rows, weights and stacks has gradients of its own.

    Experts that sort their rows find them sorted, and one expert for each: they pass over what
    would leave all as it is, to take all rows in order and to add up one result.
    """

    def __init__(
        self,
        rows: Tensor,
        given: tuple[Tensor, ...],
        stacks: Sequence[Tensor],
        sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.rows, self.given, self.sizes = rows, given, list(sizes)
        self.weights = given[1] if given else None
        # By `id`, of tensors that live as long as this.
        self.known: dict[int, tuple[Tensor, int]] = {}  # indices of all rows of one expert
        self.pieces: dict[int, tuple[Tensor, ...]] = {}  # of rows or weights
        self.wholes = {id(each): each for each in stacks}
        self.parts: dict[int, tuple[Tensor, ...]] = {}  # of stacks of which one was taken
        self.places: dict[int, tuple[Stack, int]] = {}  # of parts

    @cached_property
    def every(self) -> Tensor:
        """The index of all rows, in order."""
        return torch.arange(self.rows.shape[0])

    @cached_property
    def first(self) -> dict[int, tuple[int, Tensor]]:
        """First row of an expert -> the expert, and all its rows, int64."""
        sizes, rows = self.sizes, self.every.split(self.sizes)
        starts = enumerate(accumulate(sizes[:-1], initial=0))
        return {start: (expert, rows[expert]) for expert, start in starts if sizes[expert]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for."""
        find = _FINDERS.get(func)
        if find is not None and not torch.compiler.is_compiling():
            found = find(self, func, args, kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs) if kwargs else func(*args)

    def _part(self, _: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return what is taken, or None if it is something else."""
        of, index = args
        if id(of) in self.wholes:
            one = type(index) is int or _is_index(index, 0)
            return self._parts(of)[int(index)] if one else None
        if type(index) is tuple:
            return self._of_weights(index) if of is self.weights else None
        if not _is_index(index, 1):
            return None
        whole = self.given and index.shape[0] == self.rows.shape[0]
        if whole and index.shape[0] == len(of) and torch.equal(index, self.every):
            return of.clone(memory_format=torch.contiguous_format)
        return self._of_rows(index) if of is self.rows else None

    def _sorted(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Sort stably, so that rows which lie sorted stay in place."""
        plain = self.given and len(args) == 1 and not kwargs
        return func(*args, stable=True) if plain else None

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        return None if kwargs else product(func, args, self.places)

    def _of_rows(self, index: Tensor) -> Tensor:
        expert = self._expert_of(index)
        taken: Tensor = (
            apply(_Rows, self.rows, index) if expert is None else self._piece(self.rows, expert)
        )
        return taken

    def _of_weights(self, index: tuple[Any, ...]) -> Tensor | None:
        """Return weights `[row, slot]` or `[row, slot, None]` of one expert's rows."""
        if len(index) not in (2, 3) or index[2:] not in ((), (None,)):
            return None
        if not (_is_index(index[0], 1) and _is_index(index[1], 1)):
            return None
        expert = self._expert_of(index[0])
        if expert is None or index[1].any():
            return None
        piece = self._piece(self.given[1], expert)
        return piece if len(index) == 3 else piece.squeeze(1)

    def _expert_of(self, index: Tensor) -> int | None:
        """Return the expert whose rows these are, all of them in order; None if it is none."""
        if id(index) in self.known:
            return self.known[id(index)][1]
        if not (self.given and index.numel()):
            return None
        found = self.first.get(int(index[0]))
        if found is None or not torch.equal(index, found[1]):
            return None
        self.known[id(index)] = index, found[0]
        return found[0]

    def _piece(self, of: Tensor, expert: int) -> Tensor:
        """Return a copy, which experts may write to as they may to what an index gives."""
        pieces = self.pieces.get(id(of))
        if pieces is None:
            pieces = self.pieces[id(of)] = of.split(self.sizes)
        return pieces[expert].clone()

    def _parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        if id(whole) not in self.parts:
            stack = Stack(whole)
            parts = self.parts[id(whole)] = stack.apart()
            self.places |= {id(part): (stack, number) for number, part in enumerate(parts)}
        return self.parts[id(whole)]


def _of_one(of: Any = None, dim: Any = None, **options: Any) -> Tensor | None:
    """Return a sum over a dim of size 1, as that over the experts of a row is; None for another."""
    if options or type(dim) is not int or not of.is_floating_point():
        return None
    if not -of.dim() <= dim < of.dim() or of.shape[dim] != 1:
        return None
    taken: Tensor = of.squeeze(dim).clone(memory_format=torch.contiguous_format)
    return taken


# What is called -> what looks for a quicker way to the same, given the function and its arguments.
_FINDERS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _Taking._part,
    **dict.fromkeys(PRODUCTS, _Taking._product),
    **dict.fromkeys(_SORTS, _Taking._sorted),
    **dict.fromkeys(
        (torch.sum, Tensor.sum), lambda _, __, args, kwargs: _of_one(*args, **kwargs or {})
    ),
}


def _is_index(index: Any, dims: int) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == dims


class _Rows(Function):
    """Rows of an index; backward adds theirs by a quicker kernel than PyTorch's own does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        """Return `rows[index]`."""
        ctx.rows = len(rows)
        index = torch.where(index < 0, index + len(rows), index)
        ctx.save_for_backward(index)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of all rows."""
        (index,) = ctx.saved_tensors
        total = grads[0].new_zeros((ctx.rows, *grads[0].shape[1:]))
        return total.index_add_(0, index, grads[0]), None
