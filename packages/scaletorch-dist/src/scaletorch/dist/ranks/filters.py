"""Apply the caller's warning filters on ranks, so that the same warnings become errors."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator


def own_filters() -> list[bytes]:
    """Return this process's warning filters in order of precedence, each pickled by itself.

    Leave out a filter whose category does not pickle: ranks cannot have that category either.
    """
    found = []
    for action, message, category, module, line in warnings.filters:
        words = (action, _pattern(message), category, _pattern(module), line)
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            found.append(pickle.dumps(words))
    return found


def _pattern(text: str | re.Pattern[str] | None) -> str:
    """Return a filter's text as a regular expression; Python's own filters have literal names."""
    if isinstance(text, str):
        return re.escape(text) + r"\Z"
    return "" if text is None else text.pattern


@contextlib.contextmanager
def filtered(filters: Iterable[bytes]) -> Iterator[None]:
    """Use these warning filters, and no others, inside the context."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for each in filters:
            with contextlib.suppress(ImportError, AttributeError):  # no such category here
                action, message, category, module, line = pickle.loads(each)
                warnings.filterwarnings(action, message, category, module, line, append=True)
        yield
