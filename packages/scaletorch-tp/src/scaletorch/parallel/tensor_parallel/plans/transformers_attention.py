"""Attention in plans of transformers: its own parameters, and keys that all its heads share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.per_head import PerHead
from ..sharing.shared_tail import SharedTail
from .attention import SHARED_KEYS, latent_heads
from .plan import Match, look_up

PER_HEAD = "local_params"  # the style of a module of which single parameters have one
SHARED_TAIL = "mla_kv_a_proj"

# What latent attention has beside projections that are cut: on every rank the same.
_WHOLE = ("indexer", "q_a_layernorm", "kv_a_layernorm")


def per_head_of(name: str, module: nn.Module, styles: Mapping[str, str]) -> PerHead | None:
    """Return how a plan of transformers cuts the parameters of attention; None if it has none.

    Args:
        name: The module's.
        module: The module.
        styles: Those of its parameters that the plan names -> their style there.

    Raises:
        InvalidArgumentError: A parameter has another style than that of heads, or none.
    """
    own = [n for n, parameter in module._parameters.items() if parameter is not None]
    wrong = [n for n in own if styles.get(n) != "colwise"]
    if wrong:
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives '{name}.{wrong[0]}' the style "
            f"{styles.get(wrong[0])!r}, which is not 'colwise'; pass a plan of your own"
        )
    return PerHead(*own) if own else None


def shared_tail_of(name: str, modules: Mapping[str, nn.Module]) -> SharedTail:
    """Return how many features of a layer's output its attention takes for keys of all heads.

    Raises:
        InvalidArgumentError: Its attention does not say.
    """
    parent = name.rpartition(".")[0]
    features = vars(modules[parent]).get(SHARED_KEYS)
    if not isinstance(features, int):
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives '{name}' the style {SHARED_TAIL!r}, but "
            f"'{parent}' has no {SHARED_KEYS}; pass a plan of your own"
        )
    return SharedTail(features)


def latent_wholes(modules: Mapping[str, nn.Module], attentions: Iterable[str]) -> Iterator[Match]:
    """Yield what is whole on every rank in multi-head latent attention."""
    for attention in (name for name in attentions if latent_heads(modules[name])):
        for name in (f"{attention}.{child}" for child in _WHOLE):
            module = modules.get(name)
            if module is not None:
                yield look_up(name, module, name, "replicate")
