"""The families, and the classes of their models."""

from __future__ import annotations

import importlib
from typing import Any

import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .tiny import tiny


def names() -> list[str]:
    """Return every family with a causal language model in transformers, by transformers' name."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def model_class(name: str) -> Any:
    """Return the class of a family's causal language model."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])


def module_of(name: str) -> str | None:
    """Return the name of the module with a family's model, or None if it cannot be imported."""
    try:
        return str(importlib.import_module(model_class(name).__module__).__name__)
    except Exception:
        return None


def config_of(name: str) -> Any:
    """Return the configuration of a family's tiny model."""
    kind, config = model_class(name), tiny(CONFIG_MAPPING[name], name)
    if not isinstance(config, kind.config_class) and name == config.model_type:
        config = config.get_text_config(decoder=True)  # as AutoModelForCausalLM does
    return config


def plain_model(name: str) -> nn.Module:
    """Return a family's model, tiny and untrained."""
    model: nn.Module = model_class(name)(config_of(name))
    return model
