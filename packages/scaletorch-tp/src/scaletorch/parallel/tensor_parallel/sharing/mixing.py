"""Operations that mix tokens, refused on hidden states that are shards of sequences.

There they would see this rank's tokens alone: attention or a convolution that no region holds, a
mean over the sequence. They are looked for once, while a model's first forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

Seen = Callable[[Tensor, Mapping[str, Any], Sequence[Any], int], bool]


class RefuseMixing(TorchFunctionMode):
    """While it is on, what mixes the tokens of a share is refused.

    Args:
        own: Tokens of this rank, more than one; all of them are more.
        exempt: Returns whether a module runs that sees whole sequences.
    """

    def __init__(self, own: int, exempt: Callable[[], bool]) -> None:
        super().__init__()
        self._own = own
        self._exempt = exempt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the call, and make it."""
        kwargs = kwargs or {}
        seen = _MIXING.get(func)
        if seen is not None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            mixes = isinstance(x, Tensor) and seen(x, kwargs, args[1:], self._own)
            if mixes and isinstance(x, Tensor) and not self._exempt():
                raise InvalidArgumentError(
                    f"{describe_rank()}: {getattr(func, '__name__', func)} of a tensor of shape "
                    f"{tuple(x.shape)} would mix this rank's {self._own} tokens alone: with "
                    "sequence parallelism hidden states are shares outside of attention and MLP "
                    "modules. Call it inside of a module that the plan shards as attention, or "
                    "behind one that it styles 'sequence_join', or do without sequence parallelism"
                )
        return func(*args, **kwargs)


def _attends(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return x.ndim > 2 and x.shape[-2] == own


def _scores(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return x.ndim > 3 and x.shape[-2:] == (own, own)


def _convolves(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    weight = args[0] if args else kwargs.get("weight")
    kernel = weight.shape[-1] if isinstance(weight, Tensor) else 0
    return kernel > 1 and x.ndim > 1 and own <= x.shape[-1] < own + kernel


def _pools(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return x.ndim > 1 and x.shape[-1] == own


def _along(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether the sequence is the dim, or one of the dims, of a call for hidden states."""
    dim = kwargs.get("dim", kwargs.get("dims", args[0] if args else None))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    hidden = x.ndim == 3 and x.shape[1] == own and x.is_floating_point()
    return hidden and any(type(each) is int and each % 3 == 1 for each in dims)


def _shifts(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether tokens of hidden states are moved along the sequence, or some added."""
    pad = args[0] if args else kwargs.get("pad", ())
    moved = isinstance(pad, tuple | list) and len(pad) > 3 and any(pad[2:4])
    return moved and x.ndim == 3 and x.shape[1] == own and x.is_floating_point()


def _recurs(x: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return x.ndim == 3 and own in x.shape[:2]


_MIXING: dict[Any, Seen] = {
    F.scaled_dot_product_attention: _attends,
    F.pad: _shifts,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _scores),
    **dict.fromkeys((F.conv1d, torch.conv1d), _convolves),
    **dict.fromkeys((torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu), _recurs),
    **dict.fromkeys((F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d), _pools),
    **dict.fromkeys(
        (
            getattr(place, name)
            for place in (torch, Tensor)
            for name in ("mean", "sum", "amax", "max", "std", "var", "cumsum", "cumprod", "flip")
        ),
        _along,
    ),
}
