"""The fenced blocks of READMEs and guides, and what their languages mean.

python   a program: it runs by itself in a folder of its own, and prints what the `output` block
         after it shows. Where its first line is a comment `# NAME.py`, the other blocks find it
         under that name.
bash     commands: they run in such a folder too, with `python` and `torchrun` of this environment.
output   what the program or the commands before it print on stdout, to the letter.
console  commands that are shown only: they need a cluster, a device, pip or many minutes.
text …   shown only, as are the others of `SHOWN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "examples/README.md",
    "packages/*/README.md",
)
# Pages whose blocks need each other, and the test that runs them.
RUN_ELSEWHERE = {"docs/vendoring.md": "tests/test_vendoring.py"}
TRANSLATED = {"README.zh-CN.md": "README.md"}  # and docs/zh/X.md of docs/X.md
RUN = ("python", "bash")
SHOWN = ("console", "ini", "json", "mermaid", "text", "toml", "yaml")

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.S | re.M)
_NAME = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    code: str
    output: str | None = None

    @property
    def name(self) -> str | None:
        """The file name that a program gives itself."""
        found = _NAME.match(self.code) if self.language == "python" else None
        return found and found[1]


def pages() -> list[str]:
    """Return the pages whose blocks run, by their paths from the root."""
    found = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found]


def translations() -> dict[str, str]:
    """Return the translated pages, and the page that each is a translation of."""
    guides = {str(p.relative_to(ROOT)): f"docs/{p.name}" for p in sorted(ROOT.glob("docs/zh/*.md"))}
    return {page: of for page, of in {**TRANSLATED, **guides}.items() if (ROOT / page).exists()}


def blocks(page: str) -> list[Block]:
    """Return a page's blocks, an `output` block as part of the one before it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        indent, language, code = match.groups()
        code = re.sub(f"^{indent}", "", code, flags=re.M)
        if language == "output" and found and found[-1].language in RUN:
            last = found.pop()
            found.append(Block(page, last.line, last.language, last.code, code))
        else:
            found.append(Block(page, line, language, code))
    return found


def prose(page: str) -> str:
    """Return a page without its blocks, with as many lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
