"""LoRA on a model that is parallel already: drawn as of the plain model, then cut as its layers."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from ..dist.building import agree
from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel.building import adopt
from ..parallel.tensor_parallel import TensorParallelLayer
from ..parallel.tensor_parallel.building import (
    ADAPTED,
    Adapter,
    check_adapters,
    layer_of,
    shard_adapters,
)
from .digests import written
from .experts import expert_names
from .forward import Terms, manager_of, pipeline_of, terms_of
from .parallelize import copy_plain, wrap
from .plain import base_of, outline_of

_BESIDE = ("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")
_DRAWN = (True, False, "gaussian", "orthogonal")  # the others read the base's weights
_INSTEAD = "put it on the plain model, parallelize(get_peft_model(plain, config), manager)"
_MERGED = ("lora_A", "lora_B", "lora_dropout")


def add_adapters(
    model: DataParallelBucket, config: Any, adapter_name: str = "default"
) -> DataParallelBucket:
    """Put LoRA of peft on a model that `parallelize` returned, and train it alone.

    It is what peft's `inject_adapter_in_model` of the plain model gives in one process: each rank
    draws the matrices of all layers from torch's default generator, which has to be in the same
    state on all ranks, and keeps those of its own layers, cut as these are. The base is frozen, its
    gradients are dropped, and other adapters become inactive. Make the optimizer afterwards.

    Args:
        model: The model; what was returned for it before is not to be used any more.
        config: A `peft.LoraConfig`, of linear layers alone.
        adapter_name: A new one.

    Returns:
        The model, wrapped anew.

    Raises:
        InvalidArgumentError: No such model, an adapter of that name, or one that is more than two
            matrices beside a linear layer; the model is as before.
        MismatchError: Ranks drew, or ask for, something else; on every rank.
    """
    plain = terms_of(model).outline if isinstance(model, DataParallelBucket) else None
    if plain is None:
        raise InvalidArgumentError(
            f"add_adapters takes what parallelize returned, and this {type(model).__name__} is "
            f"something else: {_INSTEAD}"
        )
    manager, terms, stage = manager_of(model, None), terms_of(model), pipeline_of(model)
    stage.select_all()
    base, drawn, failed = base_of(stage.module), nn.Module(), None
    found: list[Adapter] = []
    try:
        _require_plain(base, config, adapter_name)
        # Of the model before anything was cut, on every rank, so that all layers are drawn.
        inject = import_module("peft").inject_adapter_in_model
        drawn = inject(config, outline_of(plain), adapter_name)
        found = _found_here(drawn, base, terms, manager)
    except Exception as error:  # of peft, too; the other ranks are told
        failed = error
    _require_alike(drawn, manager, failed)
    trained = {_plain(n) for n, p in drawn.named_parameters() if p.requires_grad}
    model.wait_for_parameters()
    model.release()
    shard_adapters(found, manager.tp_group, {}, sequence_parallel=terms.shares_sequences)
    for each in found:
        _put(each, base, adapter_name)
    vars(base).setdefault("peft_config", {})[adapter_name] = config
    _train_alone(trained, base, adapter_name)
    adopt(stage)
    if terms.plain is not None:
        model_of_one = terms.plain.model
        with torch.random.fork_rng():  # the weights are the ranks'
            inject(config, base_of(model_of_one), adapter_name)
        terms.plain = copy_plain(model_of_one)
        terms.rehearses = terms.plain is not None
    wrapped = wrap(stage, terms, manager)
    wrapped.training = model.training
    return wrapped


def _require_plain(base: nn.Module, config: Any, adapter_name: str) -> None:
    """Refuse what is no plain LoRA, or not to be put on this model, before anything is drawn."""
    if adapter_name in getattr(base, "peft_config", {}):
        raise InvalidArgumentError(f"the model has an adapter {adapter_name!r} already")
    kind = getattr(config, "peft_type", type(config).__name__)
    beside = [name for name in _BESIDE if getattr(config, name, None)]
    init = getattr(config, "init_lora_weights", True)
    if getattr(kind, "value", kind) != "LORA":
        reason = f"this config is of kind {getattr(kind, 'value', kind)}"
    elif beside:
        reason = f"this config has {' and '.join(beside)}"
    elif init not in _DRAWN:
        reason = f"init_lora_weights={init!r} reads weights, of which a rank has shards"
    else:
        return
    raise InvalidArgumentError(f"add_adapters puts plain LoRA on a model, and {reason}: {_INSTEAD}")


def _found_here(
    drawn: nn.Module, base: nn.Module, terms: Terms, manager: ProcessGroupManager
) -> list[Adapter]:
    """Return the drawn adapters of this rank's layers; refuse those that cannot be put there."""
    here, experts, found = dict(base.named_modules()), expert_names(base), []
    for name, module in drawn.named_modules():
        place = here.get(name)
        if layer_of(module) is module or place is None or next(place.parameters(), None) is None:
            continue  # another stage has it
        layer, parts = layer_of(place), {n.partition(".")[0] for n, _ in module.named_parameters()}
        reason = None
        if any(each.startswith(f"{name}.") for each in experts):
            reason = "it is in experts, which are divided"
        elif parts != {ADAPTED, "lora_A", "lora_B"} or getattr(module, "lora_variant", None):
            reason = (
                f"it is more than two matrices beside a linear layer ({', '.join(sorted(parts))})"
            )
        elif layer is not place and type(place) is not type(module):
            reason = f"there is a {type(place).__name__} already"
        elif any(each.is_meta for each in layer.parameters()):
            reason = "its layer has no weights yet"
        if reason is not None:
            raise InvalidArgumentError(
                f"the adapter {name!r} cannot be added: {reason}; {_INSTEAD}"
            )
        found.append(Adapter(name, module, layer))
    kinds = {
        each.layer: type(each.layer) if isinstance(each.layer, TensorParallelLayer) else None
        for each in found
    }
    check_adapters(found, kinds, sequence_parallel=terms.shares_sequences)
    return found


def _require_alike(drawn: nn.Module, manager: ProcessGroupManager, error: Exception | None) -> None:
    """Refuse ranks that drew other matrices, or one that found a mistake; on every rank."""
    named = [(n, p) for n, p in drawn.named_parameters() if ".lora_" in n]
    lines = [f"{name} {tuple(p.shape)} has values {written(p)}" for name, p in named]
    agree(
        "the adapters that add_adapters draws (call torch.manual_seed before it, alike on all "
        "ranks)", lines, manager.world_group, error=error,
    )  # fmt: skip


def _put(adapter: Adapter, base: nn.Module, adapter_name: str) -> None:
    """Put an adapter in its layer's place, or into the one that stands there already."""
    path, _, own = adapter.name.rpartition(".")
    owner, module = base.get_submodule(path), cast(Any, adapter.module)
    place: Any = owner._modules[own]
    for part in _MERGED:
        module._modules[part][adapter_name].to(next(adapter.layer.parameters()).device)
    if place is adapter.layer:
        module._modules[ADAPTED] = place
        owner._modules[own] = module
        return
    for part in _MERGED:
        place._modules[part].update(module._modules[part])
    for name, value in vars(module).items():
        if isinstance(value, dict) and not name.startswith("_"):  # such as scaling, by adapter
            vars(place)[name].update(value)


def _train_alone(trained: Collection[str], base: nn.Module, adapter_name: str) -> None:
    """Let the new adapter be the active one, and train what peft trains with it."""
    for module in base.modules():
        if layer_of(module) is not module:
            cast(Any, module).set_adapter(adapter_name)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(_plain(name) in trained)


def _plain(name: str) -> str:
    return name.replace(f".{ADAPTED}", "")
