"""Attention that a model computes itself, by products and a softmax, context parallel.

It can neither be replaced by its name nor be seen in a call. But it computes each row of a batch
from that row alone, as modules that pass a state along do: so it runs as it is, on whole sequences
of a rank's share of the rows. What it is called with is of this rank's shard, and made whole
before; its mask is made of whole sequences at once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.building import map_tensors
from ..agreement import require_agreement, signature_of_rows
from ..alone import alone, weigh_alone
from .biases import Biases
from .calls import forward_of
from .override import AttentionOverride
from .positions import require_positions
from .settings import Settings, refusal
from .taking_over import Call, take_over
from .whole_sequences import (
    Exchange,
    exchange_for,
    has_documents,
    hidden_states,
    layout_for,
    padded,
)

# Arguments of attention by which a model tells positions: such a one counts none elsewhere.
_BIASES = ("alibi", "position_bias")
_MASKS = (
    "create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask",
    "create_bidirectional_mask",
)  # fmt: skip


def find_attention(part: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model of transformers that can run on whole sequences.

    They are the outermost modules of that name. There are none if it is not known where their masks
    come from: from functions of transformers, or from a triangle that each module has itself.
    """
    named = [module for module in part.modules() if _is_attention(module)]
    within = {inner for outer in named for inner in outer.modules() if inner is not outer}
    found = [module for module in named if module not in within]
    return found if _masks_whole(part) or all(map(_has_triangle, found)) else []


def _masks_whole(module: nn.Module) -> bool:
    """Return whether transformers' own functions make the masks of a module."""
    return any(name in _source(module) for name in _MASKS)


def _source(module: nn.Module) -> Mapping[str, Any]:
    """Return what is defined where the class of a module of transformers is."""
    names = (base.__module__ for base in type(module).__mro__)
    own = next((name for name in names if name.startswith("transformers.models.")), None)
    return {} if own is None else vars(sys.modules[own])


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _has_triangle(module: nn.Module) -> bool:
    return any(b.ndim >= 2 and b.shape[-1] == b.shape[-2] > 1 for b in module.buffers())


def takes_positions(modules: Iterable[nn.Module]) -> bool:
    """Return whether attention is given all that its model knows of positions, as ALiBi."""
    names = [forward_of(module).parameters for module in modules]
    return bool(names) and all(any(bias in each for bias in _BIASES) for each in names)


def attend_whole(modules: Mapping[nn.Module, int]) -> None:
    """Let attention of a context-parallel model see whole sequences, in place.

    Args:
        modules: That were found, and how many heads their model's config has: biases are made so.
    """
    for module, heads in modules.items():
        signature = forward_of(module)
        take_over(module, functools.partial(_on_whole_sequences, signature, heads))


def _on_whole_sequences(signature: inspect.Signature, heads: int, call: Call) -> Any:
    module, settings = call.module, call.settings
    _refuse_documents(module, settings, call.given)
    if settings.ring.size == 1:
        return call.run(call.args, call.kwargs)
    bound = signature.bind(module, *call.args, **call.kwargs)
    given = {name: value for name, value in bound.arguments.items() if value is not module}
    hidden = hidden_states(module, (), given)
    _require_computable(module, settings, call.override, hidden)
    length = layout_for(settings, hidden.shape[1]).length
    change = _Change(module, exchange_for(settings, hidden), hidden, (length, heads))
    bound.arguments.update({n: change.argument(n, v, module) for n, v in given.items()})
    return map_tensors(change.output, call.run(bound.args[1:], bound.kwargs))


def _require_computable(
    module: nn.Module, settings: Settings, override: AttentionOverride | None, hidden: Tensor
) -> None:
    """Refuse what the model is called with, if attention over whole sequences would differ.

    Raises:
        InvalidArgumentError: Weights that are asked for, positions of another order, or hidden
            states that are not of the shard.
    """
    if override is None:
        return
    if override.calls == 1 and alone() is None:
        layout = layout_for(settings, hidden.shape[1])
        mine = signature_of_rows(hidden, layout, settings.ring)
        require_agreement(mine, hidden.device, settings.ring)
    if override.given.get("output_attentions"):
        raise refusal("the model is asked for its attention weights, of which no rank has all")
    ids = override.position_ids
    if isinstance(ids, Tensor) and ids.shape[-1] != hidden.shape[1]:
        raise refusal(
            f"{type(module).__name__} is called with {hidden.shape[1]} positions, and this rank's "
            f"shard has {ids.shape[-1]}: it cannot be told which they are"
        )
    if override.calls == 1 and alone() is None and not takes_positions([module]):
        require_positions(ids, hidden.shape[1], settings, told=settings.told is not None)


def _refuse_documents(module: nn.Module, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse a batch of several documents, if the module masks by a triangle of its own.

    Raises:
        InvalidArgumentError: It would let each see those before it.
    """
    if has_documents(settings, given) and not _masks_whole(module):
        raise refusal(
            f"{type(module).__name__} has a causal mask of its own, by which packed documents see "
            "those before them: give each document a row of its own"
        )


class _Change:
    """What one call of attention is given, and what it makes, of whole sequences."""

    def __init__(
        self, module: nn.Module, exchange: Exchange, hidden: Tensor, sizes: tuple[int, int]
    ) -> None:
        """Begin with hidden states of the shard, a length without padding and a number of heads."""
        self.name, self.exchange, self.hidden = type(module).__name__, exchange, hidden
        self.alone = alone() is not None
        length, self.heads = sizes
        # Padding is cut off: where keys are chosen, it could be chosen in place of others.
        self.whole = 1 if self.alone else length
        self.own = 1 if self.alone else -(-exchange.rows // exchange.ring.size)
        shapes = (exchange.rows, exchange.length), (self.own, self.whole)
        self.biases = Biases(self.name, *shapes)
        self.weights = [hidden]  # tensors of the shard's positions, if each is alone

    def argument(self, name: str, value: Any, module: nn.Module) -> Any:
        """Return an argument as the module is to be given it.

        Raises:
            InvalidArgumentError: It is of the shard in a form that is not known.
        """
        if name == "position_bias":  # of all positions that the model can have
            return value
        if isinstance(value, Tensor) and name == "alibi":
            make = _source(module).get("build_alibi_tensor")
            return self.biases.alibi(value, make, self.heads)
        if isinstance(value, Tensor) and name == "relative_distance":
            return self.biases.distance(value)
        return map_tensors(functools.partial(self._tensor, name), value)

    def output(self, x: Tensor) -> Tensor | None:
        """Return this rank's shard of what was made; None for attention weights.

        Raises:
            InvalidArgumentError: It is of positions, but not [rows, length, ...].
        """
        if x.shape[:2] == (self.own, self.whole):
            if self.alone:
                return self._weighed(x)
            return self.exchange.to_positions(self.name, padded(x, self.exchange))
        if x.ndim == 4 and (x.shape[0], x.shape[2]) == (self.own, self.whole):  # weights
            return None
        if self.alone or x.ndim < 2 or self.whole not in x.shape:
            return x  # such as a bias, which the model adds itself
        raise refusal(f"{self.name} returns a tensor {list(x.shape)} of whole sequences")

    def _weighed(self, x: Tensor) -> Tensor:
        x = torch.ones_like(x).expand(*self.hidden.shape[:2], *x.shape[2:])
        for weight in self.weights:
            x = weigh_alone(weight.flatten(2), x)
        return x

    def _tensor(self, name: str, x: Tensor) -> Tensor:
        rows, length = self.hidden.shape[:2]
        if x.ndim >= 2 and x.shape[-2:] == (self.whole, self.whole):
            return x  # the mask
        place = next((dim for dim, size in enumerate(x.shape) if size == length), None)
        if place == 1 and x.shape[0] in (1, rows) and not self._again(name, x, 2):
            return self._positions(x)
        if (
            place is not None
            and x.shape[:place].numel() == 1
            and not self._again(name, x, place + 1)
        ):
            flat = x.reshape(1, length, *x.shape[place + 1 :])
            return self._positions(flat)[:1].reshape(*x.shape[:place], -1, *x.shape[place + 1 :])
        if place is None and (x.ndim < 3 or x.shape[-1] != self.hidden.shape[-1]):
            return x
        raise refusal(
            f"{self.name} computes its attention itself, on whole sequences of some rows, and is "
            f"given {name}, a tensor {list(x.shape)} that is made of this rank's shard or of "
            "another sequence: leave it out, or keep sequences whole"
        )

    def _again(self, name: str, x: Tensor, start: int) -> bool:
        """Return whether dims from `start` on may be positions too; the last is of features."""
        others = x.shape[start:] if "mask" in name else x.shape[start:-1]
        return self.exchange.length in others

    def _positions(self, x: Tensor) -> Tensor:
        """Return whole sequences for [1 or rows, length, ...]."""
        if not self.alone:
            return self.exchange.to_rows(x).narrow(1, 0, self.whole)
        if x.is_floating_point() and x is not self.hidden and x.ndim > 2:
            self.weights.append(x)
        return x[:1, :1]
