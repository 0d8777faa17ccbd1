"""Objects as bytes: plain ones in a closed pickle, others in one of any kind if that is allowed."""

from __future__ import annotations

import io
import logging
import os
import pickle
from typing import Any, NamedTuple

from ..errors import InvalidArgumentError
from .beside_pickle import Named, NotPlainError
from .plain import MAGIC, NOTHING, decode, encode

VARIABLE = "SCALETORCH_ALLOW_PICKLE"

_YES = frozenset(("", "1", "true", "yes", "on"))
_WAY_OUT = (
    "send plain types instead (numbers, strings, lists, tuples, dicts, sets, tensors, numpy arrays)"
)
_logged: set[str] = set()

log = logging.getLogger(__package__)


class Terms(NamedTuple):
    """What a call takes for plain, and whether anything else may be pickled.

    Attributes:
        allow_pickle: As in the call; the environment may forbid it all the same.
        named: Dataclasses and enums that are plain too, of `named_types`.
    """

    allow_pickle: bool = True
    named: Named = NOTHING


def pickle_allowed(allow_pickle: bool) -> bool:
    """Return whether a call may pickle: its caller and the environment must both allow it."""
    return bool(allow_pickle) and os.environ.get(VARIABLE, "").strip().lower() in _YES


_ALL = Terms()


def refusal(who: str, allow_pickle: bool) -> str:
    """Return what to say if something would have to be pickled, and may not."""
    switch = "allow_pickle=True" if not allow_pickle else f"{VARIABLE}=1"
    return (
        f"{who} is not plain, so that it would have to be pickled, which is switched off: "
        f"{_WAY_OUT}, or allow it with {switch} on every rank, where all ranks are trusted"
    )


def dump_object(data: Any, terms: Terms = _ALL) -> tuple[memoryview, str]:
    """Serialise an object.

    Args:
        data: Anything plain, or that pickles.
        terms: What is plain, and whether anything else may be pickled.

    Returns:
        The bytes, which may be written to, and what is not plain in it: "" for nothing.

    Raises:
        InvalidArgumentError: It is not plain, and may not be pickled or does not pickle.
    """
    try:
        return encode(data, terms.named), ""
    except NotPlainError as found:
        reason = str(found)
    except RecursionError:
        reason = f"{type(data).__name__}, in which containers lie too deep in one another,"
    if not pickle_allowed(terms.allow_pickle):
        raise InvalidArgumentError(refusal(reason, terms.allow_pickle))
    if reason not in _logged:
        _logged.add(reason)
        log.info("%s is not plain: pickled, which every rank of the job must trust", reason)
    sink = io.BytesIO()  # its buffer can be sent as it is
    try:
        pickle.dump(data, sink, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the object's own methods raise
        message = f"{type(data).__name__} does not pickle: {type(error).__name__}: {error}"
        raise InvalidArgumentError(message) from error
    return sink.getbuffer(), reason


def load_object(data: bytearray | memoryview, terms: Terms = _ALL) -> Any:
    """Restore an object that `dump_object` serialised.

    Raises:
        InvalidArgumentError: It does not unpickle, or it is pickled and that is not allowed.
        MalformedError: The bytes are damaged.
    """
    if bytes(data[: len(MAGIC)]) == MAGIC:
        return decode(data, terms.named)
    if not pickle_allowed(terms.allow_pickle):
        raise InvalidArgumentError(refusal("what arrived", terms.allow_pickle))
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever the object's own methods raise
        message = f"what arrived does not unpickle: {type(error).__name__}: {error}"
        raise InvalidArgumentError(message) from error
