"""Compare the Chinese pages with the English ones.

`python -m tools.pages.translations` prints their differences: headings, kinds of blocks, code,
numbers, names in backticks, links; and English sections that changed since their translation.
`python -m tools.pages.translations --record` records that the Chinese pages are up to date: run it
after translating.
"""

from __future__ import annotations

import argparse
import hashlib
import posixpath
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path("tools") / "pages" / "translated.txt"
TABLE_LEFT_OUT = {"docs/mutants.md"}  # a program writes this table; the Chinese page links to it
PICTURES = ("```text", "```mermaid")  # contain words, which are translated
CODE, TABLE, LIST, TEXT, PICTURE = "code", "table", "list", "text", "picture"
ITEM = re.compile(r"^(?:\||[-*] |\d+\. )", re.M)  # a table row, or a list item
FENCE = re.compile(r"\s*(`{3,})")
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
NAME = re.compile(r"`[^`]+`")


class Section(NamedTuple):
    """A heading and the blocks below it, each as (kind, text)."""

    heading: str
    blocks: list[tuple[str, str]]

    def of(self, *kinds: str) -> list[str]:
        """Return the texts of the blocks of these kinds."""
        return [text for kind, text in self.blocks if kind in kinds]

    def form(self) -> str:
        """Describe the section's blocks."""
        sizes = {TABLE: " of {} rows", LIST: " of {} items"}
        return ", ".join(
            kind + sizes.get(kind, "").format(len(ITEM.findall(text))) for kind, text in self.blocks
        )


def pages(root: Path = ROOT) -> list[str]:
    """Return the English pages that need a Chinese one."""
    return ["README.md", *(f"docs/{path.name}" for path in sorted(root.glob("docs/*.md")))]


def chinese_of(page: str) -> str:
    """Return the path of the Chinese page for an English one."""
    return page.replace("README.md", "README.zh-CN.md").replace("docs/", "docs/zh/")


def english_of(path: str) -> str:
    """Return the English page of a Chinese one; other paths are unchanged."""
    return path.replace("README.zh-CN.md", "README.md").replace("docs/zh/", "docs/")


def _end(lines: list[str], start: int) -> int:
    """Return the number of the line after the block that starts at `start`."""
    end = start + 1
    if fence := FENCE.match(lines[start]):
        while end < len(lines) and lines[end].strip() != fence[1]:
            end += 1
        return end + 1
    if not lines[start].strip() or lines[start].startswith("#"):
        return end
    while end < len(lines) and lines[end].strip():
        if FENCE.match(lines[end]) or lines[end].startswith("#"):
            break
        end += 1
    return end


def _kind(text: str) -> str:
    if text.lstrip().startswith(PICTURES):
        return PICTURE
    if FENCE.match(text) or text.startswith("    "):
        return CODE
    return TABLE if text.startswith("|") else LIST if ITEM.match(text) else TEXT


def sections(text: str) -> list[Section]:
    """Split a page into sections; anchors and comments are no blocks."""
    found, lines, at = [Section("its beginning", [])], text.split("\n"), 0
    while at < len(lines):
        end = _end(lines, at)
        block = "\n".join(lines[at:end])
        if block.startswith("#"):
            found.append(Section(block, []))
        elif block.strip() and not ANCHOR.fullmatch(block) and not block.startswith("<!--"):
            found[-1].blocks.append((_kind(block), block))
        at = end
    return found


def _links(text: str, page: str) -> list[tuple[str, str]]:
    """Return path and anchor of each link to a file, the path relative to the root."""
    found = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            joined = posixpath.join(posixpath.dirname(page), path)
            found.append((posixpath.normpath(joined) if path else page, anchor))
        else:
            found.append((target, ""))
    return found


def _odd(what: str, english: Counter[str], chinese: Counter[str]) -> list[str]:
    """Return a line for each page with items that the other page lacks."""
    sides = ("only in English", english - chinese), ("only in Chinese", chinese - english)
    return [f"{what} {side}: {', '.join(only)}" for side, only in sides if only]


def _compare_block(kind: str, english: str, chinese: str) -> list[str]:
    """Return the differences: of code in all characters, else of the numbers, by table row."""
    if kind == CODE:
        return [] if english == chinese else [f"code differs: {english[:60]!r}"]
    both = [text.split("\n") if kind == TABLE else [text] for text in (english, chinese)]
    found: list[str] = []
    for one, other in zip(*both, strict=True):
        counts = [Counter(NUMBER.findall(LINK.sub("]", text))) for text in (one, other)]
        found += _odd(f"numbers of {one[:40]!r}", *counts)
    return found


def _compare_section(page: str, english: Section, chinese: Section) -> list[str]:
    levels = [len(each.heading) - len(each.heading.lstrip("#")) for each in (english, chinese)]
    if levels[0] != levels[1]:
        return [f"levels of the heading: {levels[0]} in English, {levels[1]} in Chinese"]
    if english.form() != chinese.form():
        return [f"English is {english.form()}; Chinese is {chinese.form()}"]
    found: list[str] = []
    for (kind, one), (_, other) in zip(english.blocks, chinese.blocks, strict=True):
        found += _compare_block(kind, one, other)
    words = ["\n".join(section.of(TABLE, LIST, TEXT)) for section in (english, chinese)]
    found += _odd("names", *(Counter(set(NAME.findall(" ".join(text.split())))) for text in words))
    links = _links(words[0], page), _links(words[1], chinese_of(page))
    as_english = [Counter(f"{english_of(path)}#{to}" for path, to in each) for each in links]
    return found + _odd("links", *as_english)


def compare(page: str, english: str, chinese: str) -> list[str]:
    """Return the differences between an English page and its Chinese one, by section."""
    both = sections(english), sections(chinese)
    if len(both[0]) != len(both[1]):
        return [f"{page}: {len(both[0]) - 1} headings in English, {len(both[1]) - 1} in Chinese"]
    if page in TABLE_LEFT_OUT:
        return []
    return [
        f"{page}, {one.heading!r}: {difference}"
        for one, other in zip(*both, strict=True)
        for difference in _compare_section(page, one, other)
    ]


def _misled(page: str, text: str, root: Path) -> list[str]:
    """Return links of a Chinese page to English pages, or to missing anchors."""
    found, here = [], chinese_of(page)
    for path, anchor in _links(text, here):
        is_chinese = path != english_of(path) and (root / path).exists()
        if path in pages(root) and path not in {page, *TABLE_LEFT_OUT}:
            found.append(f"{here}: links to {path} in place of {chinese_of(path)}")
        elif is_chinese and anchor and anchor not in ANCHOR.findall((root / path).read_text()):
            found.append(f'{path}: needs <a id="{anchor}"></a>, since {here} links to it')
    return found


def digests(page: str, english: str) -> dict[str, str]:
    """Return a digest of each section's words, independent of line breaks."""
    kinds = (LIST, TEXT) if page in TABLE_LEFT_OUT else (TABLE, LIST, TEXT, PICTURE)
    found = {}
    for number, section in enumerate(sections(english)):
        words = " ".join(" ".join([section.heading, *section.of(*kinds)]).split())
        digest = hashlib.sha256(words.encode()).hexdigest()
        found[f"{page} {number} {section.heading}"] = digest[:12]
    return found


def differences(root: Path = ROOT) -> list[str]:
    """Return all differences, as lines."""
    lines = (root / RECORD).read_text().splitlines()
    known = {name: digest for digest, name in (line.split(" ", 1) for line in lines)}
    found, wanted = [], {chinese_of(page) for page in pages(root)}
    for page in pages(root):
        english, path = (root / page).read_text(), root / chinese_of(page)
        if not path.exists():
            found.append(f"{page}: there is no {chinese_of(page)}")
            continue
        chinese, now = path.read_text(), digests(page, english)
        found += compare(page, english, chinese) + _misled(page, chinese, root)
        changed = [name for name, digest in now.items() if known.get(name) != digest]
        found += [f"{name}: changed in English since it was translated" for name in changed]
    there = [f"docs/zh/{path.name}" for path in root.glob("docs/zh/*.md")]
    return found + [f"{page}: there is no English page" for page in there if page not in wanted]


def main() -> int:
    """Print the differences; with --record, first record the pages as translated."""
    parser = argparse.ArgumentParser(description="Hold the Chinese pages against the English ones.")
    parser.add_argument("--record", action="store_true", help="Chinese is right as it is")
    if parser.parse_args().record:
        there = [page for page in pages() if (ROOT / chinese_of(page)).exists()]
        found = [
            item for page in there for item in digests(page, (ROOT / page).read_text()).items()
        ]
        (ROOT / RECORD).write_text("".join(f"{digest} {name}\n" for name, digest in found))
    for difference in (left := differences()):
        print(difference)
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
