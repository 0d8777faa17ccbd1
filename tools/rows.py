"""Checks as rows of a table: the check, its finding, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Row = tuple[str, str, bool]


class CheckError(Exception):
    """A check that found a fault; the message says which."""


def row(what: str, check: Callable[[], str]) -> Row:
    """Run a check, which returns its finding or raises."""
    try:
        return what, check(), True
    except CheckError as error:
        return what, str(error), False
    except Exception as error:  # a check that crashes has failed; others go on
        return what, f"{type(error).__name__}: {error}", False


def found(faults: Iterable[str], otherwise: str) -> str:
    """Raise `CheckError` with all faults if there are any, else return `otherwise`."""
    if wrong := list(faults):
        raise CheckError("\n".join(wrong))
    return otherwise


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, followed by all faults in full."""
    cells = [("", "checked", "found")]
    cells += [("ok" if ok else "WRONG", what, brief(seen)) for what, seen, ok in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [" | ".join(map(str.ljust, line, widths)) for line in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    wrong = [f"\n{what}:\n{seen}" for what, seen, ok in rows if not ok]
    total = f"\n{len(rows) - len(wrong)} passed, {len(wrong)} failed"
    return "\n".join([*(f"| {line} |" for line in lines), *wrong, total])


def brief(text: str) -> str:
    """Return the first line of a text, short enough for a table."""
    line = text.split("\n", 1)[0]
    return line if len(line) <= 100 else f"{line[:97]}..."
