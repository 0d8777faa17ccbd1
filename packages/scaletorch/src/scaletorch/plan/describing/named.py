"""A model named on a command line: a config of transformers, or a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compose.experts import count_experts
from ...compose.naming import load
from ...dist.errors import InvalidArgumentError
from .describe import built


def model_named(given: str, dtype: str | None = None) -> tuple[str, Callable[[], nn.Module], int]:
    """Return a model's name, a function that builds it, and the number of experts in a layer.

    Args:
        given: A folder with a `config.json` of transformers, or `package.module:name` of a function
            or class that makes the module.
        dtype: Dtype of the parameters, such as "bfloat16"; None to keep them as built.

    Raises:
        InvalidArgumentError: There is no such model or dtype, the model cannot be built on the meta
            device, or transformers is missing.
    """
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise InvalidArgumentError(
            f"dtype {dtype!r} is none of torch's of floats, such as bfloat16"
        )
    folder = Path(given)
    if (folder / "config.json").exists():
        name, make = folder.resolve().name, _of_config(folder)
    elif ":" in given:
        name, make = "", load(given)
        if not callable(make):
            raise InvalidArgumentError(f"{given!r} makes nothing: it is a {type(make).__name__}")
    else:
        raise InvalidArgumentError(
            f"{given!r} is neither a folder with a config.json of transformers nor "
            "package.module:function; nothing is downloaded: get its config.json first"
        )

    def build() -> nn.Module:
        module: nn.Module = make()
        for parameter in module.parameters() if kind else ():
            parameter.data = parameter.data.to(kind)
        return module

    return name, build, count_experts(built(build))


def _of_config(folder: Path) -> Callable[[], nn.Module]:
    try:
        import transformers
    except ImportError as error:
        raise InvalidArgumentError(
            'a config of transformers needs it: pip install "scaletorch[transformers]"'
        ) from error
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # validators raise other types than ValueError
        why = " ".join(str(error).split("\n")[:2])
        raise InvalidArgumentError(f"{folder} has no config of transformers: {why}") from error
    config.use_cache = False  # training does not need a cache
    return lambda: transformers.AutoModelForCausalLM.from_config(config)
