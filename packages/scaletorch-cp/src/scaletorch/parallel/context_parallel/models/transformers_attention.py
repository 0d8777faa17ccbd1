"""Attention of models of `transformers` over the whole sequence, through their own registries.

The library is not imported: for a model of transformers it is loaded already. An attention function
and a mask function are registered under this module's name when a model needs them.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ..attention import Request
from .override import REFUSED, AttentionOverride, is_pretrained, running_override
from .settings import refusal, settings_of
from .transformers_mask import Pattern, context_mask, foreign_model_error
from .whole_sequences import find_whole

NAME = __name__

# Arguments that models pass to their attention and that do not change its result.
_WITHOUT_EFFECT = frozenset({
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "shift_labels", "use_cache",
})  # fmt: skip
_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # types of rotary embeddings
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_POOLING = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering")
_TEXT = ("input_ids", "inputs_embeds")


def replace_attention(model: nn.Module) -> list[tuple[Any, str | None]]:
    """Make the models of transformers in `model` attend by `context_attention`.

    Their configs become copies, as other models may share them. A vision or audio tower that cannot
    be sharded is refused when it is called, since it numbers its own positions.
    Return the configs, each with the name of its previous attention.
    """
    library = sys.modules.get("transformers.modeling_utils")
    masks = sys.modules.get("transformers.masking_utils")
    pretrained: list[Any] = [each for each in model.modules() if is_pretrained(each)]
    if library is None or masks is None or not pretrained:  # without registries they call F.sdpa
        return []
    inside = {inner for outer in pretrained for inner in outer.modules() if inner is not outer}
    for each in pretrained:
        try:
            _require_shardable(each)
        except InvalidArgumentError as error:
            if each not in inside or _takes(each, *_TEXT):
                raise
            vars(each)[REFUSED] = (
                f"{type(each).__name__} is run, and text alone can be divided in this model: pass "
                f"no other inputs, or keep sequences whole ({error})"
            )
    library.ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)
    previous = [(config, config._attn_implementation) for config in _copy_configs(model)]
    for each in pretrained:
        if each._can_set_attn_implementation() and each.config._attn_implementation != NAME:
            each.set_attn_implementation(NAME)
    return previous


@contextmanager
def temporary_attention(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Replace a model's attention until the end of the context, if `enabled`."""
    previous = replace_attention(model) if enabled else []
    try:
        yield
    finally:
        for config, name in previous:
            config._attn_implementation_internal = name


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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as `transformers` requests: q, k and v [B, heads, L, D] to [B, L, heads, D]."""
    settings = settings_of(module)
    if settings is None:
        raise foreign_model_error(type(module).__name__)
    override = running_override(settings) or AttentionOverride(settings, {})
    options["output_attentions"] = override.given.get("output_attentions")
    _require_supported(attention_mask, dropout, options)
    _require_known_positions(module, query.shape[2] * settings.ring.size)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    chunk = None
    if attention_mask is not None:
        causal, sliding_window = attention_mask.causal, attention_mask.window
        chunk = attention_mask.chunk
    if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
        queries, keys = cu_seq_lens_q, cu_seq_lens_k
        if queries is None or override.documents(queries) != override.documents(keys):
            raise refusal("cu_seq_lens_k must equal cu_seq_lens_q: attention is of one sequence")
    request = Request(
        bool(causal), scaling, sliding_window, cu_seq_lens_q, softcap=softcap, sinks=s_aux,
        chunk=chunk,
    )  # fmt: skip
    out = override.attend(query, key, value, request)
    return out.transpose(1, 2).contiguous(), None


def _require_supported(mask: Any, dropout: float, options: Mapping[str, Any]) -> None:
    if mask is not None and not isinstance(mask, Pattern):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise refusal(f"attention_mask must be None, and is {got}: use no padding")
    if dropout > 0:
        raise refusal(f"attention dropout must be 0, and is {dropout}; set it to 0 in the config")
    for name, value in options.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise refusal(f"the model asks its attention for {name}, which cannot be computed")


def _require_known_positions(module: nn.Module, length: int) -> None:
    """Refuse a sequence so long that Llama 4 scales its queries by positions it counts itself."""
    floor = getattr(module, "floor_scale", None)
    counts = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    if counts and isinstance(floor, int | float) and length >= floor:
        raise refusal(
            f"{type(module).__name__} scales its queries by positions that it counts itself, from "
            f"0 on every rank, and from {floor} on (floor_scale) they matter: set "
            "attn_temperature_tuning=False in the config, or keep sequences shorter"
        )


def _copy_configs(model: nn.Module) -> list[Any]:
    """Replace the configs in `model` by copies, and return these and the configs inside them."""
    base = sys.modules["transformers.configuration_utils"].PretrainedConfig
    memo: dict[int, Any] = {}
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, base):
                vars(module)[name] = copy.deepcopy(value, memo)
                found.append(vars(module)[name])
    for config in found:  # grows
        inner = (getattr(config, name, None) for name in config.sub_configs)
        found += [each for each in inner if each is not None]
    return found


def _require_shardable(model: Any) -> None:
    """Refuse models of transformers that would see this rank's shard alone."""
    name, config, whole = type(model).__name__, model.config, find_whole(model)
    if whole and not _has_attention(model, whole):
        return
    if name.endswith(_POOLING):
        raise refusal(f"{name} pools over the sequence, of which this rank has a shard")
    rope = getattr(config, "rope_parameters", None) or {}  # of the model, or of each type of layer
    each_rope = (each for each in (rope, *rope.values()) if isinstance(each, Mapping))
    kinds = {str(each.get("rope_type")) for each in each_rope} & _LENGTH_DEPENDENT
    if kinds:
        raise refusal(
            f"{name} has rotary embeddings of type {', '.join(sorted(kinds))}, which depend on "
            "the length of the whole sequence, and each rank knows only that of its shard"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds and not whole:
        raise refusal(
            f"{name} has layers of {', '.join(sorted(kinds))}, which would mix the positions of "
            "this rank's shard alone"
        )
    inner = [each for each in model.modules() if is_pretrained(each) and each is not model]
    if not any(_takes(each, "position_ids") for each in (model, *inner)):
        taken = getattr(model, "main_input_name", _TEXT[0])
        why = f"takes {taken}, and cp divides the positions of tokens"
        if taken == _TEXT[0]:
            why = "takes no position_ids and would count its positions from 0 on every rank"
        raise refusal(f"{name} {why}: take cp_size=1, and the ranks for dp, tp or pp")
    if inner and not _has_attention(model, inner):
        return  # the inner models are checked too
    if not (model._can_set_attn_implementation() or config._attn_implementation in (NAME, "sdpa")):
        raise refusal(
            f"{name} computes its attention itself ({config._attn_implementation!r}), and it would "
            "see this rank's shard alone: take a model that uses the attention registry of "
            "transformers or F.scaled_dot_product_attention, or cp_size=1"
        )


def _takes(module: nn.Module, *names: str) -> bool:
    """Return whether a module's forward names one of these arguments.

    If a subclass passes on *args, **kwargs, its base is checked.
    """
    passing = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    bases: tuple[Any, ...] = type(module).__mro__
    for base in bases:
        if "forward" in vars(base):
            _, *arguments = inspect.signature(base.forward).parameters.values()
            if not {each.kind for each in arguments} <= passing:
                return any(each.name in names for each in arguments)
    return False


def _has_attention(model: nn.Module, outside: Iterable[nn.Module]) -> bool:
    """Return whether a model has attention outside of some of its modules."""
    excluded = {inner for outer in outside for inner in outer.modules()}
    return any("Attention" in type(each).__name__ for each in {*model.modules()} - excluded)
