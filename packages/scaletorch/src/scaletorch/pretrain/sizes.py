"""Which model a run trains: a Llama, or one with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..models import Llama, LlamaConfig, Mixture, MixtureConfig
from .config import PretrainConfig


def sizes_of(config: PretrainConfig) -> LlamaConfig:
    """Return the sizes of a run's model, with its experts if it has any.

    Raises:
        InvalidArgumentError: They make no model.
    """
    if not config.experts:
        return config.model
    experts = {"num_experts": config.experts, "top_k": config.top_k}
    return MixtureConfig(**{**asdict(config.model), **experts})


def read_sizes(saved: Mapping[str, Any]) -> LlamaConfig:
    """Return the sizes of which a checkpoint has the fields."""
    return MixtureConfig(**saved) if "num_experts" in saved else LlamaConfig(**saved)


def plain_model(sizes: LlamaConfig) -> Llama:
    """Return the plain model of these sizes."""
    return Mixture(sizes) if isinstance(sizes, MixtureConfig) else Llama(sizes)
