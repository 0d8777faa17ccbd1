"""Masks and positions of a rank's shard that cannot be attended by."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layouts.layout import layout_of_shards
from .settings import Settings, refusal


def require_no_padding(attention_mask: Tensor, part: int, settings: Settings) -> None:
    """Refuse zeros, but those of padding that is told: it is seen by nothing anyway."""
    if attention_mask.ndim != 2 or attention_mask.shape[1] != part:
        raise refusal(
            f"attention_mask must be this rank's shard, [B, {part}], or None; it is "
            f"{list(attention_mask.shape)}"
        )
    real = attention_mask.bool()
    if settings.told is not None:
        layout = settings.told.layout
        held = layout.positions(settings.ring.index, attention_mask.device)
        real = real | (held >= layout.length)
    if not real.all():
        raise refusal(
            "attention_mask must hold no zeros: pad no sequences but through ShardedSequences, "
            "and run the model within its inside()"
        )


def require_positions(ids: Any, part: int, settings: Settings, *, told: bool) -> None:
    """Refuse positions that one process would take for packed documents, if none are told."""
    if ids is None and settings.ring.size > 1:
        raise refusal(
            "the model was called without position_ids, and would count its positions from 0 on "
            "every rank: pass those of the shard, which shard_batch and ShardedSequences make"
        )
    if told or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != part:
        return
    layout = layout_of_shards(settings.layout, part, None, settings.ring.size)
    ahead = ids - layout.positions(settings.ring.index, ids.device)
    padding = (ids == 0).int().flip(1).cumprod(1).flip(1).bool()  # as ShardedSequences pads
    if (((ahead != ahead[:, :1]) | (ahead < 0)) & ~padding).any():
        raise refusal(
            f"position_ids are not those of this rank's {settings.layout} shard of one sequence: "
            "shard the batch in the model's layout; if they restart where packed documents "
            "begin, tell the documents, as cu_seq_lens_q of the whole sequence or by "
            "ShardedSequences.inside"
        )
