"""Calls of models that would mean something else than over whole sequences."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..layouts.layout import layout_of_shards
from .settings import Settings, refusal, settings_of


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of `transformers`, which is not imported for that."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def forward_of(module: nn.Module) -> inspect.Signature:
    """Return what a module's forward takes, also if subclasses pass all on to it."""
    passing = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    found = inspect.signature(type(module).forward)
    bases: tuple[Any, ...] = type(module).__mro__
    for base in bases:
        if "forward" in vars(base):
            found = inspect.signature(base.forward)
            if not {p.kind for p in [*found.parameters.values()][1:]} <= passing:
                return found
    return found


def require_no_labels(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse labels: a model of transformers shifts them within the shard, and takes its mean."""
    if is_pretrained(model) and given.get("labels") is not None:
        raise refusal(
            f"{type(model).__name__} was given labels, which it would shift within this rank's "
            "shard: compute the loss from its logits and the labels of the shard, which are "
            "targets already"
        )


def require_documents_kept(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse documents that one rank would lose in silence, where several ranks keep them."""
    if given.get("cu_seq_lens_q") is None:
        return
    config = getattr(model, "config", None)
    if not is_pretrained(model) or given.get("use_cache", getattr(config, "use_cache", False)):
        raise refusal(
            f"{type(model).__name__} on one rank would not keep the documents of cu_seq_lens_q "
            "apart: call a model of transformers with use_cache=False and position_ids that "
            "restart, or run it within ShardedSequences.inside"
        )


def require_computable(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse, before it runs, what a context-parallel model would refuse of its batch in forward.

    A rank's own batch alone may be refused, while other ranks wait for it in the middle of the
    model: a caller of all ranks calls this first, and lets them know.

    Args:
        model: What `apply_context_parallel` returned; of models of `transformers` it is known what
            they do with their arguments, others are left alone.
        given: `input_ids` [B, L / N] and what else the model is to be called with by name.

    Raises:
        InvalidArgumentError: An attention mask with zeros, or positions that are not the shard's.
    """
    settings = settings_of(model)
    if settings is None or settings.ring.size == 1:
        return
    if not is_pretrained(model):
        return
    part = given["input_ids"].shape[1]
    if isinstance(given.get("attention_mask"), Tensor):
        require_no_padding(given["attention_mask"], part, settings)
    told = settings.told is not None or given.get("cu_seq_lens_q") is not None
    if given.get("position_ids") is not None:
        require_positions(given["position_ids"], part, settings, told=told)


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
