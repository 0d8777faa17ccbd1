"""The tiny models that are planned and trained."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import torch

from scaletorch.dist.transport import ways
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Cut, Description, Layout
from scaletorch.plan.describing import describe

from .drawing import Case

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
WIDE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176}
NONE = Layout(Grid())
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


def described(case: Case) -> Description:
    """Describe what a case trains, in its cut, with gloo: what that lacks is done another way."""
    return _described(replace(case, layout=NONE, sum_item=None), case.layout.cut)


@cache
def _described(case: Case, cut: Cut) -> Description:
    real = ways.route
    with patch.object(ways, "route", lambda *of: replace(real(*of), backend="gloo")):
        return describe(lambda: model_of(case), case.length, cuts=[cut], kernels="cpu")
