"""Models that cannot be divided along the sequence: each rank runs them on whole sequences.

What their attention sees (masks, positions, patches, the order of tokens in hidden states) is made
of whole sequences somewhere in the model, where no shard could be known. But a model computes each
row of a batch from that row alone. So rows change places with positions around all of it: of ids
before, of hidden states behind. Its head and the loss have shards again.

With fewer rows than ranks some compute rows that nobody asked for: nothing is gained then, which a
warning says.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.building import map_tensors, tensors_in
from ..agreement import require_agreement, signature_of_rows
from ..alone import alone, weigh_alone
from .calls import forward_of
from .settings import refusal
from .taking_over import Call, take_over
from .whole_sequences import Exchange, exchange_for, has_documents, layout_for, lost, padded


def run_whole(body: nn.Module) -> None:
    """Let a module of a context-parallel model run on whole sequences of some rows, in place."""
    names = [*forward_of(body).parameters][1:]
    take_over(body, partial(_on_whole_sequences, names))


def _on_whole_sequences(names: Sequence[str], call: Call) -> Any:
    settings, name = call.settings, type(call.module).__name__
    if has_documents(settings, call.given):
        raise refusal(
            f"{name} keeps no packed documents apart: give each document a row of its own"
        )
    if settings.ring.size == 1:
        return call.run(call.args, call.kwargs)
    tokens = next((x for x in tensors_in((call.args, call.kwargs)) if x.ndim > 1), None)
    if tokens is None:
        raise refusal(f"{name} was called without input_ids [B, L]")
    layout = layout_for(settings, tokens.shape[1])
    rows = _Rows(name, exchange_for(settings, tokens), layout.length, tokens)
    if alone() is None:
        form = torch.empty(()).expand(*tokens.shape[:2], 1)
        mine = signature_of_rows(form, layout, settings.ring)
        require_agreement(mine, tokens.device, settings.ring)
        _warn_of_idle_ranks(name, len(tokens), settings.ring.size)
    by_place = zip_longest(names[: len(call.args)], call.args, fillvalue="")
    args = tuple(map_tensors(partial(rows.given, name), x) for name, x in by_place)
    kwargs = {n: map_tensors(partial(rows.given, n), x) for n, x in call.kwargs.items()}
    return map_tensors(rows.made, call.run(args, kwargs))


def _warn_of_idle_ranks(name: str, rows: int, ranks: int) -> None:
    if rows < ranks:
        warnings.warn(
            f"{name} cannot be divided along the sequence, and runs on whole sequences of some "
            f"rows: of {ranks} context-parallel ranks {ranks - rows} have none of the {rows} and "
            "gain nothing; make micro-batches of more rows, or cp smaller",
            RuntimeWarning,
            stacklevel=2,
        )


class _Rows:
    """What one call of a model is given, and what it makes, of whole sequences.

    Args:
        name: The model's, for messages.
        exchange: Rows for positions, and back.
        length: Of the whole sequences, without padding.
        tokens: Of this rank's shard, [B, L] or [B, L, H].
    """

    def __init__(self, name: str, exchange: Exchange, length: int, tokens: Tensor) -> None:
        self.name, self.exchange, self.length, self.tokens = name, exchange, length, tokens
        self.alone = alone() is not None
        self.own = 1 if self.alone else -(-exchange.rows // exchange.ring.size)

    def given(self, name: str, x: Tensor) -> Tensor:
        """Return an argument of this rank's rows.

        Raises:
            InvalidArgumentError: It is not of each position.
        """
        rows, part = self.exchange.rows, self.exchange.length
        if x.ndim == 0:
            return x
        features = x.shape[2:] if "mask" in name else x.shape[2:-1]
        if x.ndim < 2 or x.shape[0] not in (1, rows) or x.shape[1] != part or part in features:
            raise refusal(
                f"{self.name} cannot be divided along the sequence, and each rank runs it on whole "
                f"sequences of some rows; {name}, a tensor {list(x.shape)}, is not of this rank's "
                f"shard [{rows}, {part}] of each: leave it out, or keep sequences whole"
            )
        if self.alone:  # any tokens will do, of the whole length
            whole = torch.cat([x[:1]] * self.exchange.ring.size, 1)
        else:
            whole = self.exchange.to_rows(x)
        return whole.narrow(1, 0, self.length)

    def made(self, x: Tensor) -> Tensor:
        """Return this rank's shard of what was made; NaN for what is of its rows alone."""
        if x.ndim == 2 and x.shape[0] == self.own * self.length:  # a row for each token
            return self.made(x.unflatten(0, (self.own, self.length))).flatten(0, 1)
        if x.shape[:2] != (self.own, self.length):
            return lost(x, self.name)
        shape = self.exchange.rows, self.exchange.length, *x.shape[2:]
        if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a form without values
            return x[:1, :1].expand(shape)
        if self.alone:
            return weigh_alone(_numbers(self.tokens), torch.ones_like(x)[:, :1].expand(shape))
        return self.exchange.to_positions(self.name, padded(x, self.exchange))


def _numbers(tokens: Tensor) -> Tensor:
    """Return numbers [B, L, F] that differ where tokens do."""
    if tokens.is_floating_point():
        return tokens.flatten(2)
    angles = tokens.to(torch.get_default_dtype())
    return torch.stack([angles.cos(), angles.sin()], -1)
