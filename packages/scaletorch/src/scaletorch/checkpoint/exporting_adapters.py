"""Adapters out: the two files that peft loads, whatever the layout that trained them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..compose import full_state_dict
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import ProcessGroupManager
from .errors import CheckpointError
from .format.files import flush, flush_folder, plan_file, write_tensor
from .format.folders import UNFINISHED
from .state.place import control_group
from .together import all_or_none, on_first_rank

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of a PeftModel, which the files' names are of
_BESIDE = ("modules_to_save", "bias", "trainable_token_indices")  # peft would write these too


def export_adapter(
    model: nn.Module,
    folder: str | Path,
    manager: ProcessGroupManager | None = None,
    *,
    adapter: str = "default",
) -> None:
    """Write a LoRA adapter as peft's `save_pretrained` does; all ranks call it.

    The adapter alone is gathered, on every rank, and rank 0 writes `adapter_model.safetensors` and
    `adapter_config.json`.

    Args:
        model: What `parallelize` returned.
        folder: Where to; made if need be.
        manager: The grid; by default the model's.
        adapter: The adapter's name.

    Raises:
        InvalidArgumentError: The model has no such adapter, or it has more than low-rank matrices.
        CheckpointError: `folder` has an adapter already, or rank 0 could not write; the same on
            every rank.
    """
    group, root = control_group(), Path(folder)
    config = all_or_none(f"the export to {folder}", lambda: _config(model, adapter), group)
    state = full_state_dict(model, manager, only=lambda name: _saved_as(name, adapter) is not None)
    named = {saved: x for name, x in state.items() if (saved := _saved_as(name, adapter))}
    on_first_rank(lambda: _write(root, named, config), group)


def _saved_as(name: str, adapter: str) -> str | None:
    """Return the name in peft's file of a tensor of an adapter; None for any other tensor."""
    found = re.fullmatch(rf"(.*\blora_\w+)\.{re.escape(adapter)}(\..+)?", name)
    if found is None:
        return None
    where, last = found.groups(default="")
    # A vector of DoRA is a module in peft, and was a parameter when its files got their names.
    last = "" if where.endswith("lora_magnitude_vector") else last
    return _PREFIX + where.removeprefix(_PREFIX) + last


def _config(model: nn.Module, adapter: str) -> Any:
    """Return peft's config of an adapter.

    Raises:
        InvalidArgumentError: There is none, or peft would write more than low-rank matrices.
    """
    found = [getattr(module, "peft_config", None) for module in model.modules()]
    held = [configs for configs in found if isinstance(configs, dict)]
    config = next((configs[adapter] for configs in held if adapter in configs), None)
    if config is None:
        names = sorted({name for configs in held for name in configs})
        raise InvalidArgumentError(
            f"{type(model).__name__} has no adapter {adapter!r} of peft; it has "
            f"{', '.join(names) or 'none'}"
        )
    kind = getattr(config.peft_type, "value", config.peft_type)
    beside = [name for name in _BESIDE if getattr(config, name, None) not in (None, [], "none")]
    if kind != "LORA" or beside:
        what = f"has {' and '.join(beside)}" if beside else f"is of kind {kind}"
        raise InvalidArgumentError(
            f"adapter {adapter!r} {what}, and of adapters only the matrices of LoRA are exported: "
            "save checkpoints of it (scaletorch.checkpoint.save), or export the whole model "
            "(export_safetensors)"
        )
    return config


def _write(root: Path, tensors: dict[str, Tensor], config: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    if (root / WEIGHTS).exists():
        raise CheckpointError(f"{root} has an adapter already; export to another folder")
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize)  # aligned
    slots = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered]
    unfinished = root / f"{WEIGHTS}{UNFINISHED}"
    with unfinished.open("wb") as file:
        file.write(plan_file(slots, {"format": "pt"})[0])
        for _, tensor in ordered:
            write_tensor(file, tensor)
        flush(file)
    trains, config.inference_mode = config.inference_mode, True  # as peft writes it
    try:
        config.save_pretrained(str(root))
    finally:
        config.inference_mode = trains
    os.replace(unfinished, root / WEIGHTS)
    flush_folder(root)
