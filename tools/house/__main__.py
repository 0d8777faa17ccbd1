"""`hatch run house`: files and lines of every wheel, the longest ones, and the files a call enters.

`--no-calls` leaves out the calls, `--words` lists docstrings that break the rules for words.
"""

from __future__ import annotations

import argparse

from ..packages import PACKAGES, ROOT, folder
from .measure import file_lengths, function_lengths, sources, too_long
from .words import offences


def wheels(names: list[str]) -> None:
    """Print a row for each wheel."""
    print("| wheel | files | lines | longest file | longest function |")
    print("| --- | --- | --- | --- | --- |")
    files = lines = 0
    for name in names:
        source = folder(name) / "src"
        paths = sources(source)
        found = list(file_lengths(paths, source))
        longest = max(found)
        function = max(function_lengths(paths, source))
        files, lines = files + len(found), lines + sum(each.lines for each in found)
        print(
            f"| {name} | {len(found)} | {sum(each.lines for each in found)} | "
            f"{longest.lines}, {longest.name} | {function.lines}, {function.name} |"
        )
    print(f"| all | {files} | {lines} | | |")


def offenders(names: list[str]) -> None:
    """Print files and functions that are too long."""
    for name in names:
        for each in too_long(folder(name) / "src", ROOT):
            print(f"{each.name}: {each.lines} lines")


def calls() -> None:
    """Print how many library files a warm call enters, by folder."""
    from .walk import WALKS, rooms, walk

    for name, (_, ranks, most) in WALKS.items():
        files = walk(name)
        print(f"\n{name} on {ranks} ranks enters {len(files)} files (at most {most})", flush=True)
        for room, count in sorted(rooms(files).items()):
            print(f"  {count:3} {room}")


def words(names: list[str]) -> None:
    """Print docstrings that break the rules for words."""
    for name in names:
        for path in sources(folder(name) / "src"):
            for line, reason in offences(path):
                print(f"{path.relative_to(ROOT)}:{line}: {reason}")


def main() -> None:
    """Print the requested reports."""
    parser = argparse.ArgumentParser("hatch run house", description=__doc__)
    parser.add_argument("packages", nargs="*", help="all by default")
    parser.add_argument("--no-calls", action="store_true", help="leave the calls out")
    parser.add_argument("--words", action="store_true", help="docstrings alone")
    given = parser.parse_args()
    names = given.packages or PACKAGES
    if given.words:
        words(names)
        return
    wheels(names)
    offenders(names)
    if not given.no_calls:
        calls()


if __name__ == "__main__":
    main()
