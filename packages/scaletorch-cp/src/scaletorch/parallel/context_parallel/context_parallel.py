"""Context parallelism: each rank holds one shard of every sequence, and attention is exact."""

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..pg_manager.building import refuse_generate
from .attention import Request, attend, cast_for_autocast, check_inputs, require_method
from .cp_comms import connect_ring, ring_of
from .kernels.block import update_out_and_lse
from .layouts import Layout, layout_for_length, require_name
from .models.override import install
from .models.settings import Settings, mark, require_unmarked
from .models.transformers_attention import replace_attention
from .models.whole_sequences import find_whole, keep_whole
from .sharding import local_shard, resolve_layout

__all__ = [
    "apply_context_parallel",
    "ring_attention",
    "update_out_and_lse",
    "update_rope_for_context_parallel",
]

M = TypeVar("M", bound=nn.Module)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str | None = None,
) -> Tensor:
    """Attend this rank's queries to the keys and values of the whole sequence.

    Equals `F.scaled_dot_product_attention` of the joined shards, forward and backward; on one rank
    it is that function. K and V travel un-expanded. Under autocast the inputs are cast as that
    function casts them. Precision, the order of calls and errors are those of `attention`.

    Args:
        q: This rank's queries [B, H, L, D] in float16, bfloat16, float32 or float64.
        k: This rank's keys [B, K, L, D]; K divides H, and each key head serves H / K query heads.
        v: This rank's values [B, K, L, D].
        sm_scale: Factor of the scores; 1 / sqrt(D) by default.
        is_causal: Each position of the whole sequence sees itself and those before it.
        group: The ranks in order of their shards; by default the manager's cp axis.
        layout: A `Layout`, or a name of `LAYOUTS`. By default the layout in which this group's
            sequences were sharded, and contiguous if none were.

    Returns:
        The output [B, H, L, D] for this rank's queries, in their dtype.
    """
    ring = ring_of(group)
    if ring.size == 1:
        q, k, v = (cast_for_autocast(x) for x in (q, k, v))
        check_inputs(q, k, v)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=sm_scale, enable_gqa=grouped
        )
    request = Request(
        is_causal, sm_scale, layout=layout, method="ring", call="ring_attention",
        default_layout="contiguous",
    )  # fmt: skip
    return attend(q, k, v, request, ring)


def apply_context_parallel(
    model: M,
    group: ProcessGroup | None = None,
    *,
    layout: str | None = None,
    method: str = "ring",
) -> M:
    """Make every attention inside `model` attend to the whole sequence, and return the model.

    That is every `F.scaled_dot_product_attention`, with its `is_causal` and `scale`; every
    `nn.MultiheadAttention`, which returns no weights; and the attention of models of
    `transformers`, which build no mask and keep their `sliding_window`. Their argument
    `cu_seq_lens_q` gives the first positions of documents in the whole sequence.

    In place: modules get a wrapped `forward`, and models of `transformers` copies of their configs;
    class, parameters, names and `state_dict` stay. With one rank nothing changes, except within
    `ShardedSequences.inside`. Apply it after tensor, before pipeline and data parallelism. Call the
    model with its shard of the batch and of `position_ids`: see `shard_batch`.

    Modules of transformers that pass a state along (depthwise convolutions, linear attention) see
    whole sequences of some rows. OTHER MODULES ARE NOT CHECKED: a module that mixes or counts
    positions otherwise sees its shard alone. `parallelize` of `scaletorch.compose` refuses it. The
    README lists the refused models and calls.

    Args:
        model: Any module; plain `nn.Module` code without changes.
        group: The ranks in order of their shards; by default the manager's cp axis.
        layout: A name of `LAYOUTS`; shards in other layouts are then refused. By default as in
            `ring_attention`.
        method: "ring", "all_gather", "ulysses", "hybrid", or "auto": see `choose_method`.

    Raises:
        InvalidArgumentError: No such layout or method, or attention that cannot be replaced.
        StateError: A module of the model is context parallel already; or there are several ranks,
            and neither a group nor a manager.
        NotInGroupError: This rank is outside `group`.
    """
    ring = ring_of(group)
    if layout is not None:  # refused before the model runs
        require_name(layout)
    require_method(method)
    require_unmarked(model)
    if ring.size > 1:
        replace_attention(model)
        refuse_generate(model, "each rank has its shard of a sequence, and no cache of the others'")
    mark(model, Settings(layout, method, ring))
    whole = find_whole(model)
    keep_whole(whole)
    install(model)
    connect_ring(ring, method, all_pairs=bool(whole))
    return model


def update_rope_for_context_parallel(
    cos: Tensor,
    sin: Tensor,
    group: ProcessGroup | None = None,
    *,
    length: int | None = None,
    layout: Layout | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of rotary tables for this rank's positions.

    For models that keep tables and rotate position i by row i. Models that take `position_ids`
    do not need it.

    Args:
        cos: Table [..., L, D] over global positions.
        sin: Table of the same shape.
        group: The ranks; by default the manager's cp axis.
        length: Length of the whole sequence, if the tables are longer: a longer table divided by N
            would give wrong positions.
        layout: As in `unshard_sequence`.

    Returns:
        [..., L / N, D]; views if the layout is contiguous.
    """
    length = cos.shape[-2] if length is None else length
    ring = ring_of(group)
    layout = resolve_layout(layout, ring, "update_rope_for_context_parallel")
    found = layout_for_length(layout, length, ring.size)
    cos, sin = (local_shard(x.narrow(-2, 0, length), -2, found, ring.index) for x in (cos, sin))
    return cos, sin
