"""Guess example inputs of a model from its argument names and its config."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn


def examples(model: nn.Module) -> Iterator[Any]:
    """Yield possible inputs of a forward, by argument names: token ids, images or audio."""
    names, config = signature(model.forward).parameters, getattr(model, "config", None)
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    ids = torch.arange(6, device="cpu")[None] % getattr(table, "num_embeddings", 1)
    found: dict[str, Any] = {n: ids for n in ("input_ids", "decoder_input_ids") if n in names}
    yield found or ids
    drawn = partial(torch.rand, generator=torch.Generator().manual_seed(0), device="cpu")
    for each in (config, getattr(config, "vision_config", None)):
        size, channels = (getattr(each, name, None) for name in ("image_size", "num_channels"))
        if "pixel_values" in names and type(size) is int and channels:
            yield {**found, "pixel_values": drawn(1, channels, size, size)}
    bins, length = (getattr(config, n, None) for n in ("num_mel_bins", "max_source_positions"))
    if "input_features" in names and bins and length:
        found.pop("input_ids", None)
        yield {**found, "input_features": drawn(1, bins, 2 * length)}


def structure(model: nn.Module) -> tuple[Any, ...]:
    """Return a cache key for suggestions: classes, int attributes, shapes, and the config."""
    numbers = (
        (name, type(module), *((n, v) for n, v in vars(module).items() if type(v) is int))
        for name, module in model.named_modules()
    )
    shapes = ((name, parameter.shape) for name, parameter in model.named_parameters())
    return *numbers, *shapes, str(getattr(model, "config", ""))
