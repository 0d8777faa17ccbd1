"""Attention of models of `transformers` over the whole sequence, through their own registries.

Nothing is imported: if a model is one of transformers, that is loaded already. An attention
function and a mask function are registered when a model needs them, under this module's name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ..attention import Asked
from .calls import forward_of, is_pretrained
from .override import AttentionOverride, running_override
from .settings import refusal, settings_of
from .transformers_mask import Pattern, context_mask, stranger
from .whole_sequences import find_whole

NAME = __name__

# Arguments that models pass on to their attention and that do not change its result.
_WITHOUT_EFFECT = frozenset({
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "shift_labels", "use_cache",
})  # fmt: skip
_LENGTHY = ("dynamic", "longrope")  # types of rotary embeddings
# Kinds of layers whose attention over the whole sequence can be asked for.
_KNOWN = {"full_attention", "sliding_attention", "chunked_attention"}
_POOLING = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering")
_TEXT = ("input_ids", "inputs_embeds")


Before = list[tuple[Any, str | None]]  # each config, and which attention it named


def adopt(model: nn.Module) -> Before:
    """Let the models of transformers in `model` attend by `context_attention`.

    Their configs become copies, as other models may share them.

    Returns:
        What its configs named before.

    Raises:
        InvalidArgumentError: A part cannot be computed over shards.
    """
    library = sys.modules.get("transformers.modeling_utils")
    masks = sys.modules.get("transformers.masking_utils")
    parts: list[Any] = [part for part in model.modules() if is_pretrained(part)]
    if library is None or masks is None or not parts:  # without registries they call F.sdpa
        return []
    library.ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)
    before = [(config, config._attn_implementation) for config in _own_configs(model)]
    towers = _towers(model)
    for part in parts:
        if part._can_set_attn_implementation() and part.config._attn_implementation != NAME:
            part.set_attn_implementation(NAME)
        try:
            _require_adopted(part)
        except InvalidArgumentError as error:
            if part not in towers:
                _restore(before)
                raise
            part.register_forward_pre_hook(_refusing(str(error)))
    return before


@contextmanager
def adopted(model: nn.Module, *, for_a_while: bool) -> Iterator[None]:
    """Adopt a model until the end of the context, if asked to."""
    before = adopt(model) if for_a_while else []
    try:
        yield
    finally:
        _restore(before)


def _towers(model: nn.Module) -> set[nn.Module]:
    """Return models within a model that text does not run, as those of images or sound.

    They are beside its decoder, or in it and take no ids. A tower numbers its own positions, so
    one that cannot be context parallel is refused when it is called, not with the model.
    """
    found: set[nn.Module] = set()
    for part in filter(is_pretrained, model.modules()):
        tell: Any = getattr(part, "get_decoder", None)
        decoder = tell() if callable(tell) else None
        if not isinstance(decoder, nn.Module):
            continue
        inside = {*decoder.modules()}
        for other in filter(is_pretrained, part.modules()):
            holds = any(module is decoder for module in other.modules())
            takes = any(name in forward_of(other).parameters for name in _TEXT)
            if other is not part and not holds and not (other in inside and takes):
                found.add(other)
    return found


def _refusing(why: str) -> Callable[[nn.Module, Any], None]:
    def refuse(tower: nn.Module, _: Any) -> None:
        settings = settings_of(tower)
        if settings is not None and settings.active:
            raise refusal(
                f"{type(tower).__name__} is run, and text alone can be divided in this model: call "
                f"it without other inputs, or keep sequences whole ({why})"
            )

    return refuse


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
    for config, name in before:
        config._attn_implementation_internal = name


def _require_adopted(part: Any) -> None:
    """Refuse parts whose attention would be of this rank's shard alone."""
    name, config, whole = type(part).__name__, part.config, find_whole(part)
    if whole and not _attends(part, whole):
        return
    if name.endswith(_POOLING):
        raise refusal(f"{name} pools over the sequence, of which this rank has a shard")
    lengthy = set(_rope_types(getattr(config, "rope_parameters", None))) & set(_LENGTHY)
    if lengthy:
        raise refusal(
            f"{name} has rotary embeddings of type {', '.join(sorted(lengthy))}, which depend on "
            "the length of the whole sequence, and this rank knows its shard's"
        )
    others = set(getattr(config, "layer_types", None) or ()) - _KNOWN
    if others and not whole:
        raise refusal(
            f"{name} has layers of {', '.join(sorted(others))}, which would mix the positions of "
            "this rank's shard alone"
        )
    within = [each for each in part.modules() if is_pretrained(each) and each is not part]
    if not any("position_ids" in forward_of(each).parameters for each in (part, *within)):
        taken = getattr(part, "main_input_name", _TEXT[0])
        if taken != _TEXT[0]:
            raise refusal(
                f"{name} takes {taken}, and cp divides the positions of tokens: take cp_size=1, "
                "and the ranks for dp, tp or pp"
            )
        raise refusal(
            f"{name} takes no position_ids and would count its positions from 0 on every rank: "
            "take cp_size=1, and the ranks for dp, tp or pp"
        )
    if within and not _attends(part, within):
        return  # those are looked at too
    if config._attn_implementation not in (NAME, "sdpa"):
        raise refusal(
            f"{name} computes its attention itself ({config._attn_implementation!r}), and it would "
            "see this rank's shard alone: take a model that uses the attention registry of "
            "transformers or F.scaled_dot_product_attention, or cp_size=1"
        )


def _attends(part: nn.Module, without: Iterable[nn.Module]) -> bool:
    """Return whether a model has attention beside that in some of its modules."""
    kept = {inner for outer in without for inner in outer.modules()}
    return any(
        "Attention" in type(module).__name__ for module in part.modules() if module not in kept
    )


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the types of rotary embeddings in a config, of the model or of each kind of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)
