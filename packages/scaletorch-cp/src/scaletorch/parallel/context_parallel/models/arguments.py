"""Checks of the arguments that models are called with, which must fit whole sequences."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..layouts.layout import layout_for_shards
from .settings import Settings, refusal, settings_of


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of `transformers`, without importing the library."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's forward, also if subclasses pass on *args, **kwargs."""
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
    """Refuse documents that a model would silently join on one rank, but not on several."""
    if given.get("cu_seq_lens_q") is None:
        return
    config = getattr(model, "config", None)
    if not is_pretrained(model) or given.get("use_cache", getattr(config, "use_cache", False)):
        raise refusal(
            f"{type(model).__name__} on one rank would join the documents of cu_seq_lens_q: call "
            "a model of transformers with use_cache=False and position_ids that restart, or run "
            "it within ShardedSequences.inside"
        )


def require_computable(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse, before it runs, a batch that a context-parallel model would refuse in its forward.

    One rank alone may refuse its batch while other ranks wait for it in the middle of the model. A
    caller that runs on all ranks calls this first, and shares the error.

    Args:
        model: The result of `apply_context_parallel`. Only models of `transformers` are checked,
            whose use of their arguments is known.
        given: `input_ids` [B, L / N] and the other keyword arguments of the model.

    Raises:
        InvalidArgumentError: An attention mask with zeros, or positions that are not the shard's.
    """
    settings = settings_of(model)
    if settings is None or settings.ring.size == 1 or not is_pretrained(model):
        return
    length = given["input_ids"].shape[1]
    if isinstance(given.get("attention_mask"), Tensor):
        require_no_padding(given["attention_mask"], length, settings)
    if given.get("position_ids") is not None:
        require_positions(given["position_ids"], length, settings, given)


def require_no_padding(attention_mask: Tensor, length: int, settings: Settings) -> None:
    """Refuse zeros, except at the padding of the active batch, which nothing sees anyway.

    Args:
        attention_mask: The mask of this rank's shard.
        length: Positions of the shard.
        settings: The settings of the model.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[1] != length:
        raise refusal(
            f"attention_mask must be this rank's shard, [B, {length}], or None; it is "
            f"{list(attention_mask.shape)}"
        )
    real = attention_mask.bool()
    if settings.batch is not None:
        layout = settings.batch.layout
        held = layout.positions(settings.ring.index, attention_mask.device)
        real = real | (held >= layout.length)
    if not real.all():
        raise refusal(
            "attention_mask must hold no zeros: pad sequences only with ShardedSequences, and run "
            "the model within its inside()"
        )


def require_positions(ids: Any, length: int, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse positions that one process would take for packed documents, if none are given.

    Args:
        ids: The positions of this rank's shard, or None.
        length: Positions of the shard.
        settings: The settings of the model.
        given: The keyword arguments of the model.
    """
    if ids is None and settings.ring.size > 1:
        raise refusal(
            "the model was called without position_ids, and would count its positions from 0 on "
            "every rank: pass those of the shard, which shard_batch and ShardedSequences make"
        )
    known = settings.batch is not None or given.get("cu_seq_lens_q") is not None
    if known or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != length:
        return
    layout = layout_for_shards(settings.layout, length, None, settings.ring.size)
    ahead = ids - layout.positions(settings.ring.index, ids.device)
    padding = (ids == 0).int().flip(1).cumprod(1).flip(1).bool()  # as ShardedSequences pads
    if (((ahead != ahead[:, :1]) | (ahead < 0)) & ~padding).any():
        raise refusal(
            f"position_ids are not those of this rank's {settings.layout} shard of one sequence: "
            "shard the batch in the model's layout; if they restart where packed documents "
            "begin, tell the documents, as cu_seq_lens_q of the whole sequence or by running the "
            "model within ShardedSequences.inside"
        )
