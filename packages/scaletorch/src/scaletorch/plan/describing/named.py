"""A model named on a command line: a config of transformers, or a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compose.experts import count_experts
from ...compose.naming import load
from ...dist.errors import InvalidArgumentError
from ...parallel.pipeline_parallel import meta_parameters


def named(given: str, dtype: str | None = None) -> tuple[str, Callable[[], nn.Module]]:
    """Return the model's name ("" for that of its class) and a function that builds it.

    Args:
        given: A folder with a `config.json` of transformers, the file itself, or
            `package.module:name` of a function or class that makes the module.
        dtype: Dtype of the parameters, such as "bfloat16"; None to keep them as built.

    Raises:
        InvalidArgumentError: There is no such model, or transformers is missing.
    """
    known = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise InvalidArgumentError(
            f"dtype {dtype!r} is none of torch's of floats, such as bfloat16"
        )
    path = Path(given)
    if path.exists():
        return _of_file(path, dtype)
    if ":" not in given:
        raise InvalidArgumentError(
            f"{given!r} is neither a folder or file with a config of transformers nor "
            "package.module:function; nothing is downloaded: get its config.json first"
        )
    made = load(given)
    if not callable(made):
        raise InvalidArgumentError(f"{given!r} makes nothing: it is a {type(made).__name__}")
    return "", lambda: _cast(made(), dtype)


def experts_of(build: Callable[[], nn.Module]) -> int:
    """Return the number of experts in a layer of the model; 1 for none."""
    try:
        with meta_parameters():
            model = build()
    except Exception:  # `describe` reports it in full
        return 1
    return count_experts(model) if isinstance(model, nn.Module) else 1


def _of_file(path: Path, dtype: str | None) -> tuple[str, Callable[[], nn.Module]]:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise InvalidArgumentError(f"the folder {path} has no config.json")
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(file)
    except Exception as error:  # validators raise other types than ValueError
        why = " ".join(str(error).split("\n")[:2])
        raise InvalidArgumentError(f"{file} is no config of transformers: {why}") from error
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    return name, lambda: _of_config(config, dtype)


def _of_config(config: Any, dtype: str | None) -> nn.Module:
    transformers = _transformers()
    config.use_cache = False  # training does not need a cache
    more = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    causal = transformers.AutoModelForCausalLM
    if type(config) not in causal._model_mapping and not getattr(config, "auto_map", None):
        raise InvalidArgumentError(
            f"transformers has no causal language model for {type(config).__name__}: name a "
            "function that makes yours, package.module:function"
        )
    model: nn.Module = causal.from_config(config, **more)
    return model


def _cast(module: nn.Module, dtype: str | None) -> nn.Module:
    for parameter in module.parameters() if dtype and isinstance(module, nn.Module) else ():
        parameter.data = parameter.data.to(getattr(torch, str(dtype)))
    return module


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InvalidArgumentError(
            'a config of transformers needs it: pip install "scaletorch[transformers]"'
        ) from error
