"""Masks that models of `transformers` request: their meaning, and checks of their inputs.

No mask tensor is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..attention import require_agreement
from ..layouts import layout_for_shards
from .override import is_pretrained, running_override
from .settings import Settings, refusal, settings_of


@dataclass(frozen=True, slots=True)
class Pattern:
    """The meaning of a mask, in place of a tensor; a model that computes with it is refused."""

    causal: bool
    window: int | None
    chunk: int | None = None

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Refuse all computation."""
        raise _mask_change_error(getattr(func, "__name__", "a function"))

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes and methods of tensors."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise _mask_change_error(name)

    def __getitem__(self, _: Any) -> Any:
        """Refuse to be indexed."""
        raise _mask_change_error("an index")


def _mask_change_error(by: str) -> InvalidArgumentError:
    return refusal(
        f"the model changes its attention mask by {by}, and no mask is built over shards: "
        "attention with a bias of its own, or with keys that it chooses, cannot be computed"
    )


def context_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Pattern | None:
    """Return the meaning of the mask that a model requests; None if "sdpa" would build none."""
    override = running_override()
    if override is None:
        raise foreign_model_error("a mask")
    settings = override.settings
    try:
        if attention_mask is not None:
            _require_no_padding(attention_mask, q_length, settings)
        if int(q_offset) or kv_offset or kv_length != q_length:
            raise refusal(
                f"{q_length} queries from position {int(q_offset)} on and {kv_length} keys: "
                "neither decoding with a cache nor cross attention can be computed; use_cache=False"
            )
        _require_positions(override.position_ids, q_length, settings, override.given)
        pattern = _pattern(mask_function)
    except InvalidArgumentError as error:  # one rank's shard may be refused; the others continue
        tensors = (attention_mask, override.position_ids)
        devices = (x.device for x in tensors if isinstance(x, Tensor))
        require_agreement((), next(devices, torch.device("cpu")), settings.ring, error)
        raise
    skip = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
    return None if skip and pattern.window is None and pattern.chunk is None else pattern


def require_computable(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse, before it runs, a batch that a context-parallel model would refuse in its forward.

    One rank alone may refuse its batch, while others would wait in the middle of the model. So the
    caller shares the error. Only models of `transformers` are checked, with `input_ids` [B, L / N].
    """
    settings = settings_of(model)
    if settings is None or settings.ring.size == 1 or not is_pretrained(model):
        return
    length = given["input_ids"].shape[1]
    if isinstance(given.get("attention_mask"), Tensor):
        _require_no_padding(given["attention_mask"], length, settings)
    if given.get("position_ids") is not None:
        _require_positions(given["position_ids"], length, settings, given)


def _require_no_padding(attention_mask: Tensor, length: int, settings: Settings) -> None:
    """Refuse zeros in a shard's mask, except at the padding of the active batch."""
    if attention_mask.ndim != 2 or attention_mask.shape[1] != length:
        raise refusal(
            f"attention_mask must be this rank's shard, [B, {length}], or None; it is "
            f"{list(attention_mask.shape)}"
        )
    real = attention_mask.bool()
    if settings.batch is not None:
        layout = settings.batch.layout
        held = layout.positions(settings.ring.index, attention_mask.device)
        real = real | (held >= layout.length)
    if not real.all():
        raise refusal(
            "attention_mask must hold no zeros: pad sequences only with ShardedSequences, and run "
            "the model within its inside()"
        )


def _require_positions(ids: Any, length: int, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse positions that one process would take for packed documents, if none are given."""
    if ids is None and settings.ring.size > 1:
        raise refusal(
            "the model was called without position_ids, and would count its positions from 0 on "
            "every rank: pass those of the shard, which shard_batch and ShardedSequences make"
        )
    known = settings.batch is not None or given.get("cu_seq_lens_q") is not None
    if known or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != length:
        return
    layout = layout_for_shards(settings.layout, length, None, settings.ring.size)
    ahead = ids - layout.positions(settings.ring.index, ids.device)
    padding = (ids == 0).int().flip(1).cumprod(1).flip(1).bool()  # as ShardedSequences pads
    if (((ahead != ahead[:, :1]) | (ahead < 0)) & ~padding).any():
        raise refusal(
            f"position_ids are not those of this rank's {settings.layout} shard of one sequence: "
            "shard the batch in the model's layout; if they restart where packed documents "
            "begin, pass the documents as cu_seq_lens_q of the whole sequence, or run the "
            "model within ShardedSequences.inside"
        )


def _pattern(mask_function: Any) -> Pattern:
    """Read a mask function of transformers, except packing, which it guesses from positions."""
    causal, window, chunk = False, None, None
    for name, held in _components(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = held["sliding_window"]
        elif name == "sliding_window_bidirectional_overlay":
            window = held["sliding_window"] + 1  # it counts the positions on one side
        elif name == "chunked_overlay":
            chunk = held["chunk_size"]
        elif name not in ("bidirectional_mask_function", "packed_sequence_mask_function"):
            raise refusal(
                f"the model masks by {name}; causal and full attention, sliding windows and chunks "
                "can be computed, but not blocks of images"
            )
    return Pattern(causal, window, chunk)


def _components(mask_function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the closure variables of each function whose conditions must all hold."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".<locals>")[0]
    code = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if name == "or_masks" and all(map(_has_no_images, held["mask_functions"][1:])):
        yield from _components(held["mask_functions"][0])
    elif name == "and_masks":
        for each in held["mask_functions"]:
            yield from _components(each)
    elif name == "remap_positions_for_packed_sequence":
        yield from _components(held["mask_function"])
    else:
        yield name, held


def _has_no_images(mask_function: Any) -> bool:
    """Return whether a function adds blocks of images, and there are none."""
    ids = next(iter(_components(mask_function)))[1].get("block_sequence_ids")
    return isinstance(ids, Tensor) and not bool((ids >= 0).any())


def foreign_model_error(name: str) -> StateError:
    """Return the error for a model that requests this attention and is not context parallel."""
    return StateError(
        f"{describe_rank()}: {name} of a model that is not context parallel asks for the "
        'attention of one that is; give each model a config of its own, or select "sdpa" again'
    )
