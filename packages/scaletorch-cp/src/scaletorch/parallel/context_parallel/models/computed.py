"""Which models of `transformers` compute their attention on whole sequences of some rows.

They compute it themselves; or choose what is seen as they go, as sparse attention does, within the
modules of their attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from .calls import is_pretrained
from .towers import find_towers
from .whole_attention import find_attention
from .whole_mask import NAME as WHOLE
from .whole_sequences import find_whole

# Kinds of layers whose attention over the whole sequence can be asked for.
KNOWN = ("full_attention", "sliding_attention", "chunked_attention")
# Models that give attention a mask or a bias of their own, which depends on tokens or on how far
# apart they are, or that say of a tower's attention alone that it can be replaced.
_ADDING = (
    "doge",
    "falcon",
    "git",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "qwen4_exp_text",
)


def find_computed(model: nn.Module) -> dict[nn.Module, int]:
    """Return attention modules that are to see whole sequences, and their config's heads."""
    found: dict[nn.Module, int] = {}
    towers = find_towers(model)
    for part in filter(is_pretrained, model.modules()):
        if part not in towers and not only_holds_others(part) and computes(part):
            heads = getattr(part.config, "num_attention_heads", 1)
            found |= dict.fromkeys(find_attention(part), heads)
    return found


def computes(part: Any) -> bool:
    """Return whether the attention of a model is to see whole sequences."""
    config = part.config
    made = config._attn_implementation == WHOLE or config.model_type in _ADDING
    made |= config._attn_implementation == "eager" and not part._can_set_attn_implementation()
    if not made and not other_layers(config):  # as of most models, and what follows takes longer
        return False
    whole = find_whole(part)
    if whole and not attends(part, whole):
        return False
    return made or (not whole and bool(find_attention(part)))


def other_layers(config: Any) -> list[str]:
    """Return the kinds of layers of a config whose attention cannot be asked for by a mask."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - set(KNOWN))


def compute_whole(part: Any) -> list[tuple[nn.Module, Any]]:
    """Let a model have masks of whole sequences; its attention modules know of none.

    Returns:
        The attention modules with the configs that they had.
    """
    config = part.config
    if only_holds_others(part):
        return []
    config._attn_implementation_internal = "eager"
    own = copy.deepcopy(config)
    config._attn_implementation_internal = WHOLE
    within = [inner for module in find_attention(part) for inner in module.modules()]
    before = [(inner, config) for inner in within if vars(inner).get("config") is config]
    for inner, _ in before:
        vars(inner)["config"] = own
    return before


def only_holds_others(part: nn.Module) -> bool:
    """Return whether all attention in a model is in models within it, which are looked at too."""
    others = [each for each in part.modules() if is_pretrained(each) and each is not part]
    return bool(others) and not attends(part, others)


def attends(part: nn.Module, without: Iterable[nn.Module]) -> bool:
    """Return whether a model has attention beside that in some of its modules."""
    kept = {inner for outer in without for inner in outer.modules()}
    return any(
        "Attention" in type(module).__name__ for module in part.modules() if module not in kept
    )
