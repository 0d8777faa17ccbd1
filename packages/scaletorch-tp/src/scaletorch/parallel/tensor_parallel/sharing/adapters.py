"""Low-rank adapters of peft, base(x) + B(A(x)), sharded like the layers that they wrap.

A plan is matched without the adapters. Then for a column-parallel layer, B [out, r] is sharded like
its outputs; for a row-parallel one, A [r, in] like its inputs, and its r outputs are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import ProcessGroup

from ....dist.errors import InvalidArgumentError
from ..layers.base import Memo, TensorParallelLayer
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..regions.random import CommonRandom, ShardedRandom
from ..regions.region import ADAPTED, layer_of
from ..regions.surround import Surrounded, surround

_A, _B, _DROPOUT = "lora_A", "lora_B", "lora_dropout"

# Layer -> the adapter matrix that is sharded like it, the option that both share, and the mixin of
# dropout: the inputs of column-parallel layers are replicated, those of row-parallel ones shards.
_FOLLOWED: Mapping[type[TensorParallelLayer], tuple[str, str, type[Surrounded]]] = {
    ColumnParallelLinear: (_B, "gather_output", CommonRandom),
    RowParallelLinear: (_A, "input_is_parallel", ShardedRandom),
}


class Adapter(NamedTuple):
    """A module that replaces a layer and holds it as its `base_layer`, perhaps nested."""

    name: str
    module: nn.Module
    layer: nn.Module


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[list[Adapter]]:
    """Replace adapters by their layers inside the block; yield the adapters."""
    found: dict[nn.Module, Adapter] = {}
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for name, owner in [*model.named_modules()]:
        for child_name, child in owner._modules.items():
            layer = layer_of(child)
            if child is not None and layer is not child:
                if child_name != ADAPTED:  # else it is nested in another adapter
                    places.append((owner, child_name, child))
                found.setdefault(child, Adapter(f"{name}.{child_name}".lstrip("."), child, layer))
    try:
        for owner, child_name, child in places:
            owner._modules[child_name] = layer_of(child)
        yield [*found.values()]
    finally:
        for owner, child_name, child in places:
            owner._modules[child_name] = child


def check_adapters(
    adapters: list[Adapter],
    layers: Mapping[nn.Module, type[TensorParallelLayer] | None],
) -> None:
    """Refuse adapters that cannot be sharded like their layers."""
    for adapter in adapters:
        kind = layers.get(adapter.layer)
        if kind is None:
            continue  # replicated like its layer
        reason = _why_not(adapter, kind)
        if reason is not None:
            raise InvalidArgumentError(
                f"the adapter '{adapter.name}' ({type(adapter.module).__name__}) cannot be tensor "
                f"parallel: {reason}; leave it out of target_modules"
            )


def _why_not(adapter: Adapter, kind: type[TensorParallelLayer]) -> str | None:
    if not issubclass(kind, ColumnParallelLinear | RowParallelLinear):
        return f"its layer becomes a {kind.__name__}, and only linear ones can be sharded"
    names = [name for name, _ in adapter.module.named_parameters()]
    unknown = [name for name in names if name.partition(".")[0] not in (ADAPTED, _A, _B)]
    if unknown or not {_A, _B} <= adapter.module._modules.keys():
        return f"it is none of plain LoRA, lora_A and lora_B alone (it has {', '.join(unknown)})"
    misfits = (ColumnParallelLinear.misfit(m) for m in _modules(adapter, _A, _B))
    return next((f"of its matrices {misfit}" for misfit in misfits if misfit is not None), None)


def shard_adapters(adapters: list[Adapter], group: ProcessGroup | None, memo: Memo) -> None:
    """Shard adapters like their layers, in place."""
    for adapter in adapters:
        layer: Any = adapter.layer
        kind = next((kind for kind in _FOLLOWED if isinstance(layer, kind)), None)
        if kind is None:
            continue
        matrix, option, draws = _FOLLOWED[kind]
        for module in _modules(adapter, matrix):
            options = {option: getattr(layer, option)}
            kind.convert(module, group, memo, layer.cut, **options).sequence = layer.sequence
        for module in _modules(adapter, _DROPOUT) if layer.sequence is None else ():
            surround(module, draws, group)


def _modules(adapter: Adapter, *names: str) -> list[nn.Module]:
    """Return the named submodules of all adapters that a peft layer holds by name."""
    held = [adapter.module._modules.get(name) for name in names]
    return [child for children in held if children is not None for child in children.children()]
