"""Operations that mix tokens, refused on hidden states that are shards of sequences.

There they would see this rank's tokens alone: attention, a convolution or a recurrence that no
region holds, a mean over the sequence. Positions that are counted there, or sliced from a table,
would be those of the first tokens on every rank. Both are looked for once, while a model's first
forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..regions.surround import own_code

Seen = Callable[[Any, Mapping[str, Any], Sequence[Any], int], bool]


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
        self._counted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # positions from 0 on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the call, and make it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        x = args[0] if args else next(iter(kwargs.values()), None)
        seen = _recurs if name in _RECURRENCES else _MIXING.get(func)
        mixes = seen is not None and seen(x, kwargs, args[1:], self._own)
        if mixes and not own_code(1) and not self._exempt():
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors_in((args, kwargs)))
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} of a tensor of shape {shapes} would mix this rank's "
                f"{self._own} tokens alone: with sequence parallelism hidden states are shares "
                "outside of attention and MLP modules. Call it inside of a module that the plan "
                "shards as attention or styles 'sequence_whole', or behind one that it styles "
                "'sequence_join', or do without sequence parallelism"
            )
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not own_code(1) and not self._exempt():
            self._follow(name, args, [*tensors_in((args, kwargs))], out)
        return out

    def _follow(self, name: str, args: Any, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Refuse hidden states with which positions or means of this rank's tokens are combined."""
        own = self._own
        if name in _COUNTS and out.shape == (own,):
            self._counted[out] = "positions that it counts from 0 on, as every rank does"
        elif tensors and _slices(name, args) and _is_start(tensors[0], out, own):
            self._counted[out] = "the beginning of a table, as on every rank"
        why = next((self._counted[x] for x in tensors if x in self._counted), None)
        hidden = [x for x in tensors if _is_hidden(x, own) and x not in self._counted]
        if not hidden:
            if why is not None:
                self._counted[out] = why
        elif out.ndim == 0:
            self._counted[out] = "a number that is of these alone"
        elif why is not None and out.shape == hidden[0].shape and _fits(tensors, hidden, own):
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} gives hidden states, which are this rank's {own} "
                f"tokens with sequence parallelism, {why}. Style the layers 'sequence_layer', so "
                "that sequences are whole before them; or look positions up in an nn.Embedding of "
                "the style 'sequence_positions', or do without sequence parallelism"
            )


def present_layers(model: nn.Module) -> tuple[int, ...]:
    """Return the layers that a model's lists hold now: each chunk of a pipeline has its own."""
    lists: list[nn.Module] | None = vars(model).get("_lists")
    if lists is None:
        found = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        within = {inner for each in found for inner in [*each.modules()][1:]}
        lists = vars(model)["_lists"] = [each for each in found if each not in within]
    return tuple(id(layer) for each in lists for layer in each._modules.values())


def _slices(name: str, args: Sequence[Any]) -> bool:
    """Return whether a call takes a slice: rows that an index names are not the first ones.

    Rows of one expert may be as many as a rank has tokens, by chance and on one rank alone.
    """
    if name == "narrow":
        return True
    index = args[1] if name == "__getitem__" and len(args) > 1 else None
    places = index if isinstance(index, tuple) else (index,)
    return any(isinstance(place, slice) for place in places) and not any(
        isinstance(place, list | Tensor) for place in places
    )


def _is_start(table: Tensor, out: Tensor, own: int) -> bool:
    """Return whether a call took as many rows of a table as this rank has tokens."""
    if table.ndim < 2 or (table.ndim > 2 and table.shape[0] > 1) or not table.is_floating_point():
        return False
    return table.shape[-2] > own and out.shape[-2:] == (own, table.shape[-1])


def _fits(tensors: Sequence[Tensor], hidden: Sequence[Tensor], own: int) -> bool:
    """Return whether one that is combined with hidden states has something for each token."""
    others = [x for x in tensors if not any(x is each for each in hidden)]
    return any(x.ndim == 0 or own in (*x.shape[-2:-1], *x.shape[1:2]) for x in others)


def _attends(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return bool(x.ndim > 2 and x.shape[-2] == own)


def _is_hidden(x: Any, own: int) -> bool:
    if not isinstance(x, Tensor):
        return False
    return x.ndim == 3 and x.shape[1] == own and x.is_floating_point()


def _recurs(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return bool(x.is_floating_point() and own in x.shape[:2])


def _picks(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether an index takes some of the tokens of hidden states, such as the last one."""
    place = args[0][1:2] if isinstance(args[0], tuple) else ()
    if torch.is_grad_enabled() and not x.requires_grad:
        return False  # a mask, in blocks perhaps as many as a rank has tokens
    if not place or not _is_hidden(x, own) or args[0][0] is None or args[0][0] is Ellipsis:
        return False
    whole = isinstance(place[0], slice) and place[0].indices(own) == (0, own, 1)
    return not whole and place[0] is not None and place[0] is not Ellipsis


def _normalizes(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 1)
    return _is_hidden(x, own) and dim in (1, -2)


def _rolls(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return _along(x, {"dim": kwargs.get("dims", args[1] if len(args) > 1 else None)}, (), own)


def _contracts(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether tokens of hidden states are summed up in a product."""
    other = args[0] if args else None
    return isinstance(other, Tensor) and other.grad_fn is not None and _is_hidden(other, own)


def _whole_dims(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether a norm is of more than the features of each token."""
    shape = args[0] if args else kwargs.get("normalized_shape", ())
    return _is_hidden(x, own) and isinstance(shape, tuple | list | torch.Size) and len(shape) > 1


def _channels(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return bool(x.ndim == 3 and own in x.shape[1:])


def _anywhere(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return _is_hidden(x, own)


def _frequencies(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return _is_hidden(x, own) and dim not in (-1, 2)


def _sums_up(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether the tokens of an operand of einsum are summed up."""
    taken, _, given = str(x).replace(" ", "").partition("->")
    operands = args[0] if args and isinstance(args[0], tuple | list) else args
    pairs = zip(taken.split(","), operands, strict=False)
    return any(
        _is_hidden(operand, own) and len(name) == 3 and name.isalpha() and name[1] not in given
        for name, operand in pairs
    )


def _scores(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return _along(x, kwargs, args, own) or bool(x.ndim > 3 and x.shape[-2:] == (own, own))


def _convolves(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    weight = args[0] if args else kwargs.get("weight")
    kernel = weight.shape[-1] if isinstance(weight, Tensor) else 0
    return bool(kernel > 1 and x.ndim > 1 and own <= x.shape[-1] < own + kernel)


def _pools(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    return bool(x.ndim > 1 and x.shape[-1] == own)


def _along(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether the sequence is the dim, or one of the dims, of a call for hidden states."""
    dim = kwargs.get("dim", kwargs.get("dims", args[0] if args else None))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return _is_hidden(x, own) and any(type(each) is int and each % 3 == 1 for each in dims)


def _shifts(x: Any, kwargs: Mapping[str, Any], args: Sequence[Any], own: int) -> bool:
    """Return whether tokens of hidden states are moved along the sequence, or some added."""
    pad = args[0] if args else kwargs.get("pad", ())
    moved = isinstance(pad, tuple | list) and len(pad) > 3 and any(pad[2:4])
    return moved and _is_hidden(x, own)


_RECURRENCES = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_COUNTS = frozenset({"arange", "linspace", "logspace"})
_DIM_FIRST = (
    *("mean", "sum", "amax", "amin", "max", "min", "std", "var", "logsumexp", "sort", "argsort"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "select", "narrow"),
    *("unbind", "index_select"),
)


_MIXING: dict[Any, Seen] = {
    F.scaled_dot_product_attention: _attends,
    F.pad: _shifts,
    F.normalize: _normalizes,
    F.layer_norm: _whole_dims,
    torch.einsum: _sums_up,
    torch.fft.fft: _frequencies,
    torch.fft.fft2: _anywhere,
    torch.fft.fftn: _anywhere,
    **dict.fromkeys((torch.matmul, Tensor.matmul, torch.bmm, Tensor.__matmul__), _contracts),
    **dict.fromkeys((F.group_norm, F.instance_norm), _channels),
    Tensor.__getitem__: _picks,
    **dict.fromkeys((torch.roll, Tensor.roll), _rolls),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, F.log_softmax), _scores),
    **dict.fromkeys((F.conv1d, torch.conv1d), _convolves),
    **dict.fromkeys((torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu), _recurs),
    **dict.fromkeys((F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d), _pools),
    **dict.fromkeys(
        (getattr(place, name) for place in (torch, Tensor) for name in _DIM_FIRST),
        _along,
    ),
}
