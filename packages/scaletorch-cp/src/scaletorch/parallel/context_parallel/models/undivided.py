"""Which models of `transformers` cannot be divided: they run on whole sequences of some rows."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from .calls import forward_of, is_pretrained
from .computed import attends, computes, only_holds_others
from .counted_positions import find_counted
from .settings import UndividedError, refusal, undivided
from .towers import find_towers
from .whole_attention import find_attention, takes_positions
from .whole_sequences import find_whole

_TOKENS = "input_ids"  # what a model is given first, if it says nothing else
_POOLING = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering")
# Models that attend between tokens and patches of them, which end where tokens say.
_OF_PATCHES = ("blt",)
# Models whose head takes more of the model within than a hidden state of each position.
_WITH_HEAD = ("prophetnet",)


def find_undivided(model: nn.Module) -> nn.Module | None:
    """Return the module of a model that is to run on whole sequences of some rows, if one is.

    It is what its head gets hidden states of. There is none in a model that can be divided, that
    takes no ids, whose outputs are not of positions, or that is several models side by side.
    """
    parts: list[Any] = [*filter(is_pretrained, model.modules())]
    if not parts or "transformers.masking_utils" not in sys.modules:
        return None
    outermost, towers = parts[0], find_towers(model)
    try:
        for part in parts:
            if part not in towers:
                require_divisible(part)
    except UndividedError:
        alone = {*parts} <= {*outermost.modules()}
        reads = "input_ids" in forward_of(outermost).parameters
        return _body(outermost) if alone and reads else None
    except InvalidArgumentError:  # whoever adopts the model says why
        return None
    return None


def _body(model: Any) -> nn.Module:
    """Return the model within that is called: some hold a decoder alone, to give it a name."""
    body: nn.Module = model
    if model.config.model_type not in _WITH_HEAD:
        body = model.base_model
        while len(within := [*body.children()]) == 1 and is_pretrained(within[0]):
            body = within[0]
    return body


def require_divisible(part: Any) -> None:
    """Refuse a model of which nothing can be given a shard.

    Raises:
        UndividedError: It makes its masks or its patches itself, or counts its own positions.
        InvalidArgumentError: It pools, so that whole sequences would not help either.
    """
    name, config, whole = type(part).__name__, part.config, find_whole(part)
    passes_states = bool(whole) and not attends(part, whole)
    if name.endswith(_POOLING) and not passes_states:
        raise refusal(f"{name} pools over the sequence, of which this rank has a shard")
    if config.model_type in _OF_PATCHES:
        raise undivided(f"{name} divides sequences itself, into patches that end where tokens say")
    if any("BlockSparse" in type(module).__name__ for module in part.modules()):
        raise undivided(f"{name} chooses itself which blocks of a sequence see which")
    if computes(part) and not only_holds_others(part):
        if not find_attention(part):
            raise undivided(
                f"{name} neither uses the attention registry of transformers nor "
                "F.scaled_dot_product_attention, and makes its own masks, which would be of this "
                f"rank's shard; its attention is {config._attn_implementation!r}"
            )
        if config.model_type == "falcon" and config.alibi:
            raise undivided(f"{name} adds ALiBi to its masks, which would be of this rank's shard")
    if not passes_states and not _told_positions(part):
        taken = getattr(part, "main_input_name", _TOKENS)
        if taken != _TOKENS:
            raise undivided(
                f"{name} takes {taken}, and cp divides the positions of tokens: take cp_size=1, "
                "and the ranks for dp, tp or pp"
            )
        raise undivided(
            f"{name} takes no position_ids and would count its positions from 0 on every rank"
        )


def _told_positions(part: Any) -> bool:
    """Return whether a model can be told its positions; else every rank would begin with 0."""
    if computes(part) and takes_positions(find_attention(part)):
        return True
    forwards = (type(model).forward for model in part.modules() if is_pretrained(model))
    return bool(find_counted(part)) or any(
        "position_ids" in inspect.signature(forward).parameters for forward in forwards
    )
