"""Attention of models of `transformers` over the whole sequence, through their own registries.

Nothing is imported: if a model is one of transformers, that is loaded already. An attention
function and a mask function are registered when a model needs them, under this module's name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ..attention import Asked
from .calls import is_pretrained
from .computed import attends, compute_whole, computes, other_layers
from .override import AttentionOverride, running_override
from .settings import refusal, settings_of
from .towers import find_towers, refuse_calls
from .transformers_mask import Pattern, context_mask, stranger
from .undivided import require_divisible
from .whole_mask import NAME as WHOLE
from .whole_mask import whole_mask
from .whole_sequences import find_whole

NAME = __name__

# Arguments that models pass on to their attention and that do not change its result.
_WITHOUT_EFFECT = frozenset({
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "shift_labels", "use_cache",
})  # fmt: skip
_LENGTHY = ("dynamic", "longrope")  # types of rotary embeddings


class Before(NamedTuple):
    """What a model was like.

    Attributes:
        names: Each config, and which attention it named.
        configs: Attention modules that got a config of their own, and the one that they had.
    """

    names: list[tuple[Any, str | None]]
    configs: list[tuple[nn.Module, Any]]


def adopt(model: nn.Module) -> Before:
    """Let the models of transformers in `model` attend by `context_attention`.

    Their configs become copies, as other models may share them.

    Returns:
        What it was like before.

    Raises:
        UndividedError: Nothing within it can be given a shard.
        InvalidArgumentError: A part mixes positions in layers that are no attention.
    """
    library = sys.modules.get("transformers.modeling_utils")
    masks = sys.modules.get("transformers.masking_utils")
    before = Before([], [])
    if library is None or masks is None:  # without registries they call F.sdpa
        return before
    parts: list[Any] = [part for part in model.modules() if is_pretrained(part)]
    if not parts:
        return before
    library.ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(WHOLE, whole_mask)
    before.names.extend((config, config._attn_implementation) for config in _own_configs(model))
    towers = find_towers(model)
    for part in parts:
        settable = part._can_set_attn_implementation()
        if settable and part.config._attn_implementation not in (NAME, WHOLE):
            part.set_attn_implementation(NAME)
        try:
            require_divisible(part)
            if part not in towers and computes(part):
                before.configs.extend(compute_whole(part))
            _require_adopted(part)
        except InvalidArgumentError as error:
            if part not in towers:
                _restore(before)
                raise
            refuse_calls(part, error)
    return before


@contextmanager
def adopted(model: nn.Module, *, for_a_while: bool) -> Iterator[None]:
    """Adopt a model until the end of the context; or do nothing, as for one that is undivided."""
    whole = any(each.undivided for each in map(settings_of, model.modules()) if each is not None)
    before = adopt(model) if for_a_while and not whole else Before([], [])
    try:
        yield
    finally:
        _restore(before)


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as `transformers` asks for it: q, k and v [B, heads, L, D] to [B, L, heads, D]."""
    settings = settings_of(module)
    if settings is None:
        raise stranger(type(module).__name__)
    override = running_override(settings) or AttentionOverride(settings, {})
    others["output_attentions"] = override.given.get("output_attentions")
    _require_computable(attention_mask, dropout, others)
    _require_no_count(module, query.shape[2] * settings.ring.size)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    chunk = None
    if attention_mask is not None:
        causal, sliding_window = attention_mask.causal, attention_mask.window
        chunk = attention_mask.chunk
    if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
        _require_equal(override, cu_seq_lens_q, cu_seq_lens_k)
    asked = Asked(
        bool(causal), scaling, sliding_window, cu_seq_lens_q, softcap=softcap, sinks=s_aux,
        chunk=chunk,
    )  # fmt: skip
    out = override.attend(query, key, value, asked)
    return out.transpose(1, 2).contiguous(), None


def _require_computable(mask: Any, dropout: float, asked: Mapping[str, Any]) -> None:
    if mask is not None and not isinstance(mask, Pattern):
        came = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise refusal(f"attention_mask must be None, and is {came}: use no padding")
    if dropout > 0:
        raise refusal(f"attention dropout must be 0, and is {dropout}; set it to 0 in the config")
    for name, value in asked.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise refusal(f"the model asks its attention for {name}, which cannot be computed")


def _require_no_count(module: nn.Module, length: int) -> None:
    """Refuse queries that are scaled by positions which the attention counts itself (Llama 4).

    They are as in one process up to `floor_scale` positions.
    """
    floor = getattr(module, "floor_scale", None)
    counts = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    if counts and isinstance(floor, int | float) and length >= floor:
        raise refusal(
            f"{type(module).__name__} scales its queries by positions that it counts itself, from "
            f"0 on every rank, and from {floor} on (floor_scale) they matter: set "
            "attn_temperature_tuning=False in the config, or keep sequences shorter"
        )


def _require_equal(override: AttentionOverride, queries: Tensor | None, keys: Tensor) -> None:
    if queries is None or override.documents(queries) != override.documents(keys):
        raise refusal("cu_seq_lens_k must equal cu_seq_lens_q: attention is of one sequence")


def _own_configs(model: nn.Module) -> list[Any]:
    """Give `model` configs of its own; return them."""
    base = sys.modules["transformers.configuration_utils"].PretrainedConfig
    memo: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, base):
                vars(module)[name] = copy.deepcopy(value, memo)
                _collect(vars(module)[name], found)
    return list(found.values())


def _collect(config: Any, found: dict[int, Any]) -> None:
    found[id(config)] = config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _collect(getattr(config, name), found)


def _restore(before: Before) -> None:
    for config, name in before.names:
        config._attn_implementation_internal = name
    for module, config in before.configs:
        vars(module)["config"] = config


def _require_adopted(part: Any) -> None:
    """Refuse parts whose attention would be of this rank's shard alone."""
    name, whole = type(part).__name__, find_whole(part)
    if whole and not attends(part, whole):
        return
    lengthy = set(_rope_types(getattr(part.config, "rope_parameters", None))) & set(_LENGTHY)
    if lengthy:
        raise refusal(
            f"{name} has rotary embeddings of type {', '.join(sorted(lengthy))}, which depend on "
            "the length of the whole sequence, and this rank knows its shard's"
        )
    others = other_layers(part.config)
    if others and not whole and not computes(part):
        raise refusal(
            f"{name} has layers of {', '.join(others)}, which would mix the positions of this "
            "rank's shard alone"
        )


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the types of rotary embeddings in a config, of the model or of each kind of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)
