"""Descriptions in files: a small JSON, a line for each number, so that two can be compared."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..dist.errors import InvalidArgumentError
from .description import Behaviour, Cut, Description
from .reading import json_of, read_as

VERSION = 8


def write(description: Description, path: Path) -> None:
    """Write a description."""
    content = {name: getattr(description, name) for name in Description.__slots__}
    content["blocks"] = [asdict(block) for block in description.blocks]
    content["cuts"] = [
        {"cut": asdict(cut), "kinds": [asdict(kind) for kind in kinds]}
        for cut, kinds in description.cuts.items()
    ]
    content["refused"] = [[asdict(cut), why] for cut, why in description.refused.items()]
    path.write_text(json.dumps({"version": VERSION, **content}, indent=1) + "\n")


def read(path: Path) -> Description:
    """Read what `write` wrote.

    Raises:
        InvalidArgumentError: It is no description, or one of another version.
    """
    content = json_of(path)
    if (version := content.pop("version", "none")) != VERSION:
        raise InvalidArgumentError(
            f"{path} is no description of version {VERSION}, but of {version}: describe the model "
            "again"
        )
    cuts, refused = content.get("cuts", ()), content.get("refused", ())
    try:
        pairs = [(each["cut"], each["kinds"]) for each in cuts]
        named = [(cut, why) for cut, why in refused]
    except (KeyError, TypeError, ValueError):
        raise InvalidArgumentError(f"{path}: cuts have a cut and kinds each") from None
    found: Description = read_as(Description, {**content, "cuts": {}, "refused": {}}, str(path))
    where = f"{path}: cuts"
    for cut, kinds in pairs:
        own = read_as(tuple[Behaviour, ...], kinds, where)
        found.cuts[read_as(Cut, cut, where)] = own
    found.refused.update((read_as(Cut, cut, where), str(why)) for cut, why in named)
    count = 1 + max((block.kind for block in found.blocks), default=0)
    if {count} != {len(kinds) for kinds in found.cuts.values()}:
        raise InvalidArgumentError(f"{path}: its blocks are of other kinds than its cuts")
    return found
