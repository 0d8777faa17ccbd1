"""Checks of a run's settings before any rank starts."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import torch

from ..dist import devices
from ..dist.errors import InvalidArgumentError
from ..parallel.pipeline_parallel import SCHEDULES
from ..parallel.tensor_parallel import explain
from .config import PretrainConfig, plain_model, sizes_of
from .data import check_paths

_POSITIVE = (
    "tp", "cp", "pp", "dp", "ep", "top_k", "steps", "batch_size", "micro_batches", "seq_len",
)  # fmt: skip
_COUNTS = ("experts", "warmup_steps", "decay_steps", "save_every", "keep", "seed", "check_every")


def check_config(config: PretrainConfig) -> None:
    """Refuse settings that cannot work.

    Raises:
        InvalidArgumentError: A setting is invalid; the message names it and a valid value.
    """
    _check_words(config)
    _check_numbers(config)
    _check_folders(config)
    _check_backend(config.backend)
    _check_experts(config)
    _check_model(config)
    check_paths(config.data, config.tokenizer)


def _check_words(config: PretrainConfig) -> None:
    hints: dict[str, Any] = get_type_hints(type(config))
    for name in ("schedule", "zero", "dtype", "resume"):
        value, known = getattr(config, name), get_args(hints[name])
        if value not in known:
            shown = ", ".join(map(str, known))
            raise InvalidArgumentError(f"{name} must be one of {shown}; got {value!r}")


def _check_numbers(config: PretrainConfig) -> None:
    _at_least(config, _POSITIVE, 1)
    _at_least(config, _COUNTS, 0)
    for name, least in (("lr", "above 0"), ("clip", "above 0"), ("weight_decay", "at least 0")):
        value = getattr(config, name)
        fine = isinstance(value, int | float) and math.isfinite(value) and value >= 0
        if not fine or (value == 0 and least == "above 0"):
            raise InvalidArgumentError(f"{name} must be a number, {least}, got {value!r}")


def _at_least(config: PretrainConfig, names: tuple[str, ...], least: int) -> None:
    values = {name: getattr(config, name) for name in names}
    if odd := [f"{name}={value!r}" for name, value in values.items() if type(value) is not int]:
        raise InvalidArgumentError(f"must be whole numbers: {', '.join(odd)}")
    if low := [f"{name}={value}" for name, value in values.items() if value < least]:
        raise InvalidArgumentError(f"must be at least {least}: {', '.join(low)}")


def _check_folders(config: PretrainConfig) -> None:
    if config.out is None and (config.resume == "auto" or config.save_every):
        raise InvalidArgumentError("checkpoints need a folder: pass --out")
    if config.keep and not config.save_every:
        raise InvalidArgumentError(
            f"keep={config.keep} has no checkpoints to keep: pass --save-every"
        )
    if config.out is not None and config.out.exists() and not config.out.is_dir():
        raise InvalidArgumentError(f"out {config.out} is a file; pass a folder")


def _check_backend(backend: str) -> None:
    for device, name in devices.resolve_backend(backend):
        devices.backend_problem(name)
        devices.check_pair(device, name)


def _check_experts(config: PretrainConfig) -> None:
    """Check the expert parallel size; reading `grid` checks that ep folds the other axes."""
    experts = getattr(sizes_of(config), "num_experts", 0)
    if config.ep > 1 and not experts:
        raise InvalidArgumentError(
            f"ep {config.ep} divides experts, and the model has none: pass --experts"
        )
    if config.ep > max(experts, 1):
        raise InvalidArgumentError(f"ep {config.ep} must be at most experts = {experts}")
    _ = config.grid


def _check_model(config: PretrainConfig) -> None:
    """Shard the model as the ranks would, on the meta device."""
    stages = SCHEDULES[config.schedule](config.pp, config.micro_batches).num_stages
    if config.pp > 1 and stages > config.model.num_layers:
        raise InvalidArgumentError(
            f"pp {config.pp} with schedule {config.schedule} makes {stages} stages, and the model "
            f"has {config.model.num_layers} layers: at most one stage a layer; raise "
            "--model.num-layers or lower --pp"
        )
    if config.tp > 1:
        with torch.device("meta"):
            explain(plain_model(sizes_of(config)), config.tp)
