"""Calls of models that would mean something else than over whole sequences."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from .settings import refusal


def is_pretrained(module: nn.Module) -> bool:
    """Tell whether a module is a model of `transformers`, which is not imported for that."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


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
