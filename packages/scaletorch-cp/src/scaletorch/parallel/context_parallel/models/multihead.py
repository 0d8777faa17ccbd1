"""Attention of `nn.MultiheadAttention`, whose products no function mode sees.

No rank has all attention weights, so none are returned. Options that shards cannot compute are
refused by name.
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


def _require_supported(given: Mapping[str, Any]) -> None:
    """Refuse options that shards cannot compute, and name the alternative.

    Raises:
        InvalidArgumentError: Padding, a mask without `is_causal`, dropout, or keys that belong to
            no token.
    """
    if given["key_padding_mask"] is not None:
        raise refusal(
            f"{_NAME} is given a key_padding_mask: leave it out and give padding labels of -100 "
            "with a causal mask, or keep sequences whole"
        )
    if given["attn_mask"] is not None and not given["is_causal"]:
        raise refusal(
            f"{_NAME} is given an attn_mask, which is of this rank's shard: also pass "
            "is_causal=True if it is causal, otherwise keep sequences whole"
        )
    dropout = given["dropout_p"] if given["training"] else 0.0
    if dropout:
        raise refusal(f"{_NAME} has dropout {dropout} of attention weights: set it to 0")
    if given["add_zero_attn"] or any(given[name] is not None for name in ("bias_k", "static_k")):
        raise refusal(
            f"{_NAME} adds a key without a token: build it without add_bias_kv and add_zero_attn"
        )


def attend_projected(sdpa: Callable[..., Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute `F.multi_head_attention_forward` with another attention function.

    Args:
        sdpa: Takes query, key and value [B, H, L, D] and `is_causal`.
        args: Positional arguments of that function.
        kwargs: Keyword arguments of that function.

    Raises:
        InvalidArgumentError: An option that shards cannot compute.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    _require_supported(given)
    batched = given["query"].dim() == 3
    heads = []
    for x in _projections(given):  # each [L, B, E] or [L, E]
        x = x if batched else x[:, None]
        heads.append(x.unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3))
    out = sdpa(*heads, given["is_causal"]).permute(2, 0, 1, 3).flatten(2)
    out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
    return (out if batched else out[:, 0]), None


def _projections(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values, each [L, B, E] or [L, E]."""
    inputs = [given[name] for name in ("query", "key", "value")]
    if not given["use_separate_proj_weight"]:
        return tuple(_project_packed(*inputs, given["in_proj_weight"], given["in_proj_bias"]))
    weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    projected: tuple[Tensor, ...] = _project(*inputs, *weights, *biases)
    return projected


def without_weights(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward, or one that never asks for attention weights.

    The latter for a subclass of `nn.MultiheadAttention` with its own forward, as tensor parallelism
    has. To return weights, it would attend by matrix products instead of torch's function.
    """
    subclass = isinstance(module, nn.MultiheadAttention)
    if not subclass or type(module).forward is nn.MultiheadAttention.forward:
        return forward

    @functools.wraps(forward)
    def weightless(*args: Any, **kwargs: Any) -> Any:
        bound = _FORWARD.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments["need_weights"] = False
        return forward(*bound.args, **bound.kwargs)

    return weightless
