"""Objects as bytes: plain ones by the codec, others by pickle where that is allowed.

This is the one file that pickles what ranks send each other.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from typing import Any

from ..errors import InvalidArgumentError
from .codec import MAGIC as PLAIN
from .codec import NotPlainError, decode, encode

VARIABLE = "SCALETORCH_ALLOW_PICKLE"

_YES = frozenset(("", "1", "true", "yes", "on"))
_WAY_OUT = (
    "send plain types instead (numbers, strings, lists, tuples, dicts, sets, tensors, numpy arrays)"
)
_logged: set[str] = set()

log = logging.getLogger(__package__)


def pickle_allowed(allow_pickle: bool) -> bool:
    """Tell whether a call may pickle: its caller and the environment must both allow it."""
    return bool(allow_pickle) and os.environ.get(VARIABLE, "").strip().lower() in _YES


def refusal(who: str, allow_pickle: bool) -> str:
    """Return what to say where something would have to be pickled, and may not."""
    switch = "allow_pickle=True" if not allow_pickle else f"{VARIABLE}=1"
    return (
        f"{who} is not plain, so that it would have to be pickled, which is switched off: "
        f"{_WAY_OUT}, or allow it with {switch} on every rank, where all ranks are trusted"
    )


def dump_object(data: Any, allow_pickle: bool = True) -> tuple[bytearray | memoryview, str]:
    """Serialise an object.

    Args:
        data: anything plain, or that pickles.
        allow_pickle: whether what is not plain may be pickled.

    Returns:
        The bytes, which may be written to, and what is not plain in it: "" for nothing.

    Raises:
        InvalidArgumentError: it is not plain, and may not be pickled or does not pickle.
    """
    try:
        return encode(data), ""
    except (NotPlainError, RecursionError) as found:
        reason = str(found)
    if not pickle_allowed(allow_pickle):
        raise InvalidArgumentError(refusal(reason, allow_pickle))
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


def load_object(data: bytearray | memoryview, allow_pickle: bool = True) -> Any:
    """Restore an object that `dump_object` serialised.

    Raises:
        InvalidArgumentError: it does not unpickle, or it is pickled and that is not allowed.
        MalformedError: the bytes are damaged.
    """
    if bytes(data[: len(PLAIN)]) == PLAIN:
        return decode(data)
    if not pickle_allowed(allow_pickle):
        raise InvalidArgumentError(refusal("what arrived", allow_pickle))
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever the object's own methods raise
        message = f"what arrived does not unpickle: {type(error).__name__}: {error}"
        raise InvalidArgumentError(message) from error
