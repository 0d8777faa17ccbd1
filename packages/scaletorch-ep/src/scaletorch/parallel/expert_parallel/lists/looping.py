"""Blocks that loop over a bare list of experts: run once to ask, and once with the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ....dist.building import agree, map_tensors, tensors_in
from ...pg_manager.building import deep_copy, shallow_copy
from ..computing.uncompiled import call_uncompiled
from ..exchange.attempts import attempt
from ..exchange.functions import apply, once_differentiable
from .answers import answer
from .asking import Ask, answering, check_kept, recording, unlike
from .standing import standing_in
from .trial import Draws, run_on_copies


class LoopingBlock(nn.Module):
    """Comes before a block's class: its forward runs the block's own twice."""

    _looped: str  # the list's name in the block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns where all experts are here."""
        return call_uncompiled(_run, self, super().forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copy(self, getattr(super(), "__deepcopy__", None), memo)

    def __copy__(self) -> Self:
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as its experts do."""
        return self._modules[self._looped].__reduce_ex__(protocol)


def _run(block: LoopingBlock, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a block's own forward to see what it asks for, have it answered, and run it again."""
    experts: Any = block._modules[block._looped]
    division, kinds = experts._division, experts._kinds
    name, (keys,) = division.name, division.lists.values()
    device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
    asks: list[Ask] = []

    def ask() -> None:
        with standing_in(experts, name, keys, recording(asks, kinds)):
            run_on_copies(own, args, kwargs, [*_besides(block, experts)])
        check_kept(name, asks)

    def again() -> Any:
        used: list[int] = []
        call = answering(name, asks, results, used)
        with standing_in(experts, name, keys, call):
            result = own(*args, **kwargs)
        if len(used) < len(asks):
            raise unlike(name, asks[len(used)], "nothing more")
        return result

    before = Draws.now(device)
    _, error = attempt(ask)
    results, mark, wrong = answer(asks, [*experts._modules.values()], division, kinds, error)
    behind = Draws.now(device)
    before.restore()
    result, error = (None, wrong) if wrong else attempt(again)
    behind.restore()
    agree(f"a call of the experts '{name}'", (), division.group, error=error)
    return _tied(result, mark)


def _besides(module: nn.Module, experts: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all in it but the experts."""
    yield module
    for child in module.children():
        if child is not experts:
            yield from _besides(child, experts)


def _tied(result: Any, mark: Tensor | None) -> Any:
    """Let what a block returns hang on the exchange, whatever came of it.

    A rank without tokens, or whose block drops a result, would not take part in backward.
    """
    if mark is None or not mark.requires_grad:
        return result
    floats = {
        id(each): each
        for each in tensors_in(result)
        if each.is_floating_point() and (each.requires_grad or each.shape[-1:] == mark.shape[1:])
    }
    tied = dict(zip(floats, apply(_Tie, mark, *floats.values()), strict=True)) if floats else {}
    return map_tensors(lambda each: tied.get(id(each), each), result)


class _Tie(Function):
    """Copies, which callers may write to as to what the block returned.

    A tensor is saved behind all that the block saves, and unpacked before any of it: so every rank
    that recomputes does so at the same time, and no less than the others; see `dispatch._Meet`.
    """

    @staticmethod
    def forward(ctx: Any, mark: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the same values."""
        ctx.set_materialize_grads(False)
        copies = tuple(each.clone() for each in given)
        ctx.save_for_backward(mark.new_empty(mark.shape))
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand gradients on."""
        (mark,) = ctx.saved_tensors
        return torch.zeros_like(mark), *grads
