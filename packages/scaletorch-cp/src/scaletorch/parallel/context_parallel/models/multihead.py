"""The function of torch's `nn.MultiheadAttention`, whose attention no mode sees.

It returns no weights, of which no rank has all. What it is asked for beside a causal mask is
refused by its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .settings import refusal

FUNCTION = F.multi_head_attention_forward
_NAME = "nn.MultiheadAttention"
_project_packed, _project = vars(F)["_in_projection_packed"], vars(F)["_in_projection"]
_SIGNATURE = inspect.signature(FUNCTION)
_FORWARD = inspect.signature(nn.MultiheadAttention.forward)


def _require_known(given: Mapping[str, Any]) -> None:
    """Refuse what attention over shards does not compute, and say how to do without.

    Raises:
        InvalidArgumentError: Padding, a mask that is not said to be causal, dropout, or keys that
            are no token's.
    """
    if given["key_padding_mask"] is not None:
        raise refusal(
            f"{_NAME} is given a key_padding_mask: leave it out, and padding to labels of -100 "
            "behind a causal mask, or keep sequences whole"
        )
    if given["attn_mask"] is not None and not given["is_causal"]:
        raise refusal(
            f"{_NAME} is given an attn_mask, which is of this rank's shard: pass is_causal=True "
            "beside it if it is causal, else keep sequences whole"
        )
    dropout = given["dropout_p"] if given["training"] else 0.0
    if dropout:
        raise refusal(f"{_NAME} drops attention weights: set its dropout to 0, which is {dropout}")
    if given["add_zero_attn"] or any(given[name] is not None for name in ("bias_k", "static_k")):
        raise refusal(
            f"{_NAME} adds a key that is no token's: build it without add_bias_kv and add_zero_attn"
        )


def attend_projected(sdpa: Callable[..., Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute `F.multi_head_attention_forward` with another attention.

    Args:
        sdpa: Takes query, key and value [B, H, L, D] and `is_causal`.
        args: Of that function, by place.
        kwargs: Of that function, by name.

    Raises:
        InvalidArgumentError: It is asked for what is not computed.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    _require_known(given)
    query: Tensor = given["query"]
    batched = query.dim() == 3
    out = sdpa(*map(_by_head(given["num_heads"]), _projections(given)), given["is_causal"])
    out = F.linear(
        out.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"]
    )
    return (out if batched else out[:, 0]), None


def _projections(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values, each [L, B, E] or [L, E]."""
    inputs = [given[name] for name in ("query", "key", "value")]
    if not given["use_separate_proj_weight"]:
        packed = _project_packed(*inputs, given["in_proj_weight"], given["in_proj_bias"])
        return tuple(packed)
    weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    made: tuple[Tensor, ...] = _project(*inputs, *weights, *biases)
    return made


def _by_head(heads: int) -> Callable[[Tensor], Tensor]:
    def split(x: Tensor) -> Tensor:
        x = x if x.dim() == 3 else x[:, None]
        by_head: Tensor = x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        return by_head

    return split


def without_weights(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a module as it is, or one that is never asked for attention's weights.

    The latter for an `nn.MultiheadAttention` of a class with a forward of its own, as tensor
    parallelism has: it calls no function of torch's, and attends by products to make weights.
    """
    own = isinstance(module, nn.MultiheadAttention)
    if not own or type(module).forward is nn.MultiheadAttention.forward:
        return forward

    @functools.wraps(forward)
    def attended(*args: Any, **kwargs: Any) -> Any:
        bound = _FORWARD.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments["need_weights"] = False
        return forward(*bound.args, **bound.kwargs)

    return attended
