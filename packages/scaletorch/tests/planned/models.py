"""The tiny models that are planned and trained."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from scaletorch.dist.transport import ways
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.plan import Description
from scaletorch.plan.describing import describe

from .drawing import Case

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
WIDE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176}
LARGE = {"vocab_size": 256, "hidden_size": 160, "intermediate_size": 440}  # of several buckets


def model_of(case: Case) -> Llama:
    """Return the plain model."""
    layers, tied = case.layers, case.tied
    sizes = {"wide": WIDE, "large": LARGE}.get(case.family.split()[0], SIZES)
    if case.family.endswith("mixture"):
        model: Llama = Mixture(MixtureConfig(**sizes, num_layers=layers, tie_embeddings=tied))
    else:
        model = Llama(LlamaConfig(**sizes, num_layers=layers, tie_embeddings=tied))
    return model.to(getattr(torch, case.dtype))


def described_on_gloo(case: Case) -> Description:
    """Describe it with the memory that gloo takes: what it lacks is done another way."""
    real = ways.route
    as_gloo = lambda *of: replace(real(*of), backend="gloo")  # noqa: E731
    with patch.object(ways, "route", as_gloo):
        return described(case)


def described(case: Case) -> Description:
    """Describe what a case trains, in its cut."""
    return describe(lambda: model_of(case), case.length, cuts=[case.layout.cut])
