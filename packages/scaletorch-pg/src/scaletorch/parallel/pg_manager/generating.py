"""`generate` of a model that is divided so that the model's own forward alone is not the model."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn

from ...dist.errors import StateError
from .axis import describe_rank

_STEP = "prepare_inputs_for_generation"  # by which models of transformers generate


def refuse_generate(model: nn.Module, why: str) -> None:
    """Let `generate` of a model, and of models of transformers within it, raise; in place.

    Args:
        model: Its own `generate`, if it has one, calls its forward for every token.
        why: What each rank has, for the error.
    """
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "generate") and (module is model or hasattr(kind, _STEP)):
            vars(module)["generate"] = partial(_refuse, kind.__name__, why)


def _refuse(name: str, why: str, *_: Any, **__: Any) -> NoReturn:
    """Raise whatever is asked for.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{describe_rank()}: {name}.generate calls the model's own forward for each token, and "
        f"{why}: generate on a grid of tensor and data parallelism alone (cp_size=1, pp_size=1), "
        "or export the weights and generate in one process"
    )
