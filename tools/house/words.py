"""Check docstrings for plain English that a newcomer reads at once.

`python -m tools.house.words FILES` prints the docstrings to change; 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PHRASES = {
    r"\bTell (whether|if)\b": 'say "Return whether"',
    r"\bNone where\b": 'say "or None if"',
    r"\bwhere (it|they|one|none|there)\b": 'say "if" for a condition',
    r"\balike\b": 'say "the same"',
    r"``": "code stands in single backticks",
}
OPENING = re.compile(r"(What|Which|How|Who|Whose|Whether|Where)\b")
SECTIONS = re.compile(r"^(Args|Attributes):$")
ENTRY = re.compile(r"^    (\*{0,2}\w+(?: \([^)]*\))?): +([a-z]\S*)")


def offences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of each phrase to change in a module's docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            first = node.body[0].lineno
            for offset, reason in _in(text):
                yield first + offset, reason


def _in(text: str) -> Iterator[tuple[int, str]]:
    in_section = False
    if found := OPENING.match(text):
        yield 0, f"{found[0]!r}: open with a noun, or a verb such as Return"
    for offset, line in enumerate(text.splitlines()):
        for phrase, reason in PHRASES.items():
            if found := re.search(phrase, line):
                yield offset, f"{found[0]!r}: {reason}"
        if line and not line.startswith(" "):
            in_section = SECTIONS.match(line) is not None
        if in_section and (entry := ENTRY.match(line)):
            yield offset, f"{entry[1]}: {entry[2]!r} begins with a capital letter"


def main(names: list[str]) -> int:
    """Print phrases of docstrings to change; return 1 if there are any."""
    found = [f"{name}:{line}: {reason}" for name in names for line, reason in offences(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
