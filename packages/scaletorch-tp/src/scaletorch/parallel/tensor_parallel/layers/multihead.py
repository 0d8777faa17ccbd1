"""torch's `nn.MultiheadAttention` with heads sharded over the ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled
from ...placement import ModelView
from ..regions.random import sharded_random
from ..regions.region import enter
from .base import TensorParallelLayer


class ParallelMultiheadAttention(TensorParallelLayer, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with heads sharded over the ranks, and a row-parallel `out_proj`.

    `embed_dim` and `num_heads` keep their full values. There is no fast path as in torch's forward.
    """

    plain_class = nn.MultiheadAttention
    _known = ("in_proj_weight", "in_proj_bias")
    sharded_size = "embed_dim"
    shard_dims: ClassVar[dict[str, int]] = {"in_proj_weight": 0, "in_proj_bias": 0}
    packed: ClassVar[dict[str, int]] = {"in_proj_weight": 3, "in_proj_bias": 3}

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become this layer, or None if it can."""
        if getattr(module, "add_zero_attn", False):
            return "add_zero_attn adds a key of no token; give it the style 'replicate'"
        return super().misfit(module)

    @around_compiled
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute torch's attention; arguments are torch's, the same full tensors on every rank.

        With sequence parallelism `query`, `key` and `value` are one tensor, this rank's shard of
        the tokens. Masks are of the whole batch and all heads. Several ranks return no
        attention weights.
        """
        if self.tp_size == 1:
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        self._check_parameters()
        if is_causal and attn_mask is None:
            raise InvalidArgumentError(
                f"{describe_rank()}: nn.MultiheadAttention takes is_causal only with an attn_mask"
            )
        q, k, v = self._projected(query, key, value)
        causal = is_causal and key_padding_mask is None and not need_weights  # as torch has it
        mask = None if causal else self._mask(key_padding_mask, attn_mask, q, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        with sharded_random(self.group) if dropout else nullcontext():
            if need_weights:  # as in torch, which differentiates this twice
                scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
                weights = torch.softmax(scores if mask is None else scores + mask, -1)
                out = functional.dropout(weights, dropout) @ v
            else:
                out = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
            out = out.transpose(1, 2).flatten(2)
            if query.dim() == 2:
                out = out[0]
            elif not self.batch_first:
                out = out.transpose(0, 1)
            return self.out_proj(out), None

    def _projected(self, *given: Tensor) -> list[Tensor]:
        """Return the queries, keys and values of this rank's heads, each [B, heads, L, D]."""
        entered = {id(x): x for x in given}
        if self.sequence is not None and len(entered) > 1:
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism nn.MultiheadAttention must be "
                "called with one tensor as query, key and value, since a second tensor may be the "
                "full sequence or a rank's shard; do without sequence parallelism"
            )
        entered = {own: enter(x, self.group, self.sequence) for own, x in entered.items()}
        query, key, value = (entered[id(x)] for x in given)
        if query is key is value:
            found = functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights: Any = self.in_proj_weight.chunk(3)
            biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            found = tuple(map(functional.linear, (query, key, value), weights, biases))
        return [self._by_head(x) for x in found]

    def _by_head(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x[None]
        elif not self.batch_first:
            x = x.transpose(0, 1)
        by_head: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return by_head

    def _mask(
        self, padding: Tensor | None, mask: Tensor | None, q: Tensor, keys: int
    ) -> Tensor | None:
        """Return the mask to add to the scores of this rank's heads, [B or 1, heads or 1, L, S]."""
        batch, _, length, _ = q.shape
        none_or_dtype = functional._none_or_dtype
        padding = functional._canonical_mask(
            padding, "key_padding_mask", none_or_dtype(mask), "attn_mask", q.dtype
        )
        added = functional._canonical_mask(mask, "attn_mask", None, "", q.dtype, False)
        if added is not None:
            whole = (batch * self.num_heads, length, keys)
            if tuple(added.shape) not in (whole, whole[1:]):
                raise InvalidArgumentError(
                    f"{describe_rank()}: expected an attn_mask of shape {list(whole[1:])}, or "
                    f"{list(whole)} of all heads, got {list(added.shape)}"
                )
            if added.dim() == 3:  # one mask for each head
                first = self.cut.start(self.tp_rank) // self.head_dim
                added = added.view(batch, -1, length, keys).narrow(1, first, q.shape[1])
        if padding is not None:
            padding = padding.view(batch, 1, 1, keys)
            return padding if added is None else added + padding
        return added


def leave_fast_paths(view: ModelView) -> None:
    """Disable the fast path of torch's encoder layers, which would skip the sum in eval mode."""
    for module in view.names:
        slow = {nn.TransformerEncoderLayer: "activation_relu_or_gelu",
                nn.TransformerEncoder: "use_nested_tensor"}  # fmt: skip
        names = [name for kind, name in slow.items() if isinstance(module, kind)]
        if names and any(isinstance(m, TensorParallelLayer) for m in module.modules()):
            vars(module).update(dict.fromkeys(names, 0))
