"""Modules that mix tokens, by what they say of themselves: they must see whole sequences."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ..layers.base import TensorParallelLayer
from ..regions.surround import own_class
from .heads import has_heads

_NAMES = frozenset(
    {"attn", "attention", "self_attn", "self_attention", "cross_attn", "linear_attn"}
)
_OF_CLASSES = ("attention", "attn")


def find_whole(model: nn.Module, regions: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost attention modules that are no regions, and neither hold nor are in one.

    Args:
        model: The whole model, or already this rank's shard of it.
        regions: Its regions, which gather for themselves.
    """
    inside = {inner for region in regions for inner in region.modules()}
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if module in inside or module is model or not _attends(name, module):
            continue
        inner = {*module.modules()}
        if not inside & inner and not any(isinstance(m, nn.Embedding) for m in inner):
            found.append(module)
            inside |= inner
    return found


def _attends(name: str, module: nn.Module) -> bool:
    """Tell attention by its attributes, its place or its class; a norm or a dropout is none."""
    if isinstance(module, TensorParallelLayer) or not any(True for _ in module.children()):
        return False
    if not any(True for _ in module.parameters()):
        return False
    kind = own_class(module).__name__.lower()
    named = name.rpartition(".")[2] in _NAMES or any(part in kind for part in _OF_CLASSES)
    return has_heads(module) or named
