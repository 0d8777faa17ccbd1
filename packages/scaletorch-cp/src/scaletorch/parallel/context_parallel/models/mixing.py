"""Asking a model, in its first forward, whether it mixes the positions of its shard.

Outside of attention a rank has to compute each position from that position alone. So what the model
is called with runs twice, with attention in which each position sees itself: as it is, and with
other tokens at half of the places. At the other half nothing may change.

Positions that a model counts itself are not found so: it may know its place among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....dist import all_gather_object
from ....dist.building import agree, tensors_in
from ....dist.errors import InvalidArgumentError
from ..alone import each_alone
from .looking import apart, looking
from .settings import Settings, refusal, settings_of

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
_MIXES, _UNSEEN, _FAILED = 1, 2, 3  # what a rank notes


class _Call(NamedTuple):
    """One call of a module, in words, and the tensors that it was given and returned."""

    module: str
    given: tuple[Tensor, ...]
    made: tuple[Tensor, ...]


def require_apart(
    model: nn.Module,
    forward: Callable[..., Any],
    given: Arguments,
    settings: Settings,
    turned_on: Callable[[Settings, Mapping[str, Any]], AbstractContextManager[Any]],
) -> None:
    """Refuse a model that mixes the positions of its shard outside of attention; ask it once.

    Args:
        model: What became context parallel.
        forward: Its own forward, which takes the model first.
        given: What it is called with.
        settings: Its own.
        turned_on: Lets attention be over the whole sequence.

    Raises:
        InvalidArgumentError: It does, on every rank of the ring.
    """
    ids = _ids(given)
    settings.unasked = _why_unasked(model, ids)
    if ids is None or settings.unasked is not None:
        return
    shape, (own, others) = ids.shape[:2], _halves(ids.shape[1])
    changed = _changed(given, shape, own, others)

    def run(arguments: Arguments) -> list[Tensor]:
        args, kwargs = arguments
        with each_alone(), looking(model), turned_on(settings, given[1]):
            out = tensors_in(forward(model, *args, **kwargs))
            return [x for x in out if x.shape[:2] == shape]

    def same(a: Tensor, b: Tensor) -> bool:
        dims = [dim for dim, size in enumerate(a.shape) if size == shape[1]]
        if a.shape != b.shape or not dims:
            return True
        kept = own.to(a.device)
        return any(not apart(a.index_select(d, kept), b.index_select(d, kept)) for d in dims)

    try:
        before, after = run(given), run(changed)
        settings.unasked = None if before else "it returned nothing of shape [B, L, ...]"
    except Exception as error:  # the forward itself will say why, or it does not fail
        before = after = []
        settings.unasked = f"it failed while it was asked, with {type(error).__name__}: {error}"
    mixes = len(before) == len(after) and not all(map(same, before, after))
    note = _MIXES if mixes else 0 if ids.unique().numel() > 1 else _UNSEEN
    note, subject = _FAILED if settings.unasked else note, "whether the model mixes positions"
    notes = agree(subject, [], settings.ring.group, note=note)
    settings.asked = not {_UNSEEN, _FAILED} & {*notes}
    if _FAILED in notes:
        settings.unasked = settings.unasked or "it could not be on another rank"
    if _MIXES not in notes:
        return
    with _recorded(model) as first:
        run(given)
    with _recorded(model) as second:
        run(changed)
    found = all_gather_object(_first_mixed(first, second, same), settings.ring.group)
    raise _mixed(next(filter(None, found), "the model's own code"))


def _mixed(where: str) -> InvalidArgumentError:
    return refusal(
        f"{where} computes a position from others than itself, by more than attention: a "
        "convolution, a recurrence, pooling, a cumulative sum. It would see this rank's shard "
        "alone. Mix positions by F.scaled_dot_product_attention, or keep sequences whole"
    )


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[_Call]]:
    """Write down all calls of a model's modules, as they end."""
    calls: list[_Call] = []
    handles = []
    for name, module in model.named_modules():

        def write(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            words = f"module {name} ({type(module).__name__})"
            given = tensors_in((args, kwargs))
            calls.append(_Call(words, tuple(given), tuple(tensors_in(output))))

        handles.append(module.register_forward_hook(write, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _first_mixed(
    first: list[_Call], second: list[_Call], same: Callable[[Tensor, Tensor], bool]
) -> str | None:
    """Return, in words, the first module whose outputs are not what its inputs make them."""
    for a, b in zip(first, second, strict=False):
        if not all(map(same, a.given, b.given)):
            return f"what {a.module} is given"
        if not all(map(same, a.made, b.made)):
            return a.module
    return None


def _why_unasked(model: nn.Module, ids: Tensor | None) -> str | None:
    if ids is None:
        return "it was given neither tokens [B, L] nor hidden states [B, L, H]"
    if any(settings_of(module) is None for module in model.modules()):
        return "parts of it were replaced since, as by the stages of a pipeline"
    return None


def _ids(given: Arguments) -> Tensor | None:
    """Return the first integers [B, L], or hidden states; None without two positions."""
    found = [*tensors_in(given)]
    ids = (x for x in found if x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool)
    states = (x for x in found if x.ndim == 3 and x.is_floating_point())
    first = next(ids, next(states, None))
    return None if first is None or first.shape[1] < 2 else first


def _halves(length: int) -> tuple[Tensor, Tensor]:
    """Return the places that are kept and those that get other tokens, the same on all ranks."""
    drawn = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    return drawn[: length // 2], drawn[length // 2 :]


def _changed(given: Arguments, shape: tuple[int, ...], own: Tensor, others: Tensor) -> Arguments:
    """Return arguments with, at other places, what stands at those that are kept.

    Tokens that only change places would leave a mean over all of them as it is.
    """
    taken = own.repeat(2)[: len(others)]

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != shape:
            return value
        places, sources = others.to(value.device), taken.to(value.device)
        return value.index_copy(1, places, value.index_select(1, sources))

    args, kwargs = given
    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}
