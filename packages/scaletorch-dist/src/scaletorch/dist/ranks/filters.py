"""Warnings on ranks: they meet the caller's filters, so that what is an error there is one here."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator


def own_filters() -> list[bytes]:
    """This process's filters of warnings, the first that applies first, each pickled by itself.

    A filter of a category that does not pickle is left out: ranks cannot have it either.
    """
    found = []
    for action, message, category, module, line in warnings.filters:
        words = (action, _pattern(message), category, _pattern(module), line)
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            found.append(pickle.dumps(words))
    return found


def _pattern(text: str | re.Pattern[str] | None) -> str:
    """Return a filter's text as a pattern: those of Python itself name a module as it is."""
    if isinstance(text, str):
        return re.escape(text) + r"\Z"
    return "" if text is None else text.pattern


@contextlib.contextmanager
def filtered(filters: Iterable[bytes]) -> Iterator[None]:
    """Have these filters, and no others, for as long as this is entered."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for each in filters:
            with contextlib.suppress(ImportError, AttributeError):  # nobody here can warn by it
                action, message, category, module, line = pickle.loads(each)
                warnings.filterwarnings(action, message, category, module, line, append=True)
        yield
