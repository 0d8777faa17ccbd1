"""Mutants drawn at random: a place among all places, and one of its changes."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .places import Place, changed, places


@dataclass(frozen=True, slots=True)
class Mutant:
    """A place and its replacement; `number` is its turn in the draw."""

    number: int
    place: Place
    after: str

    def data(self) -> dict[str, Any]:
        """Return the mutant as JSON values."""
        place = asdict(self.place)
        return {"mutant": self.number, **place, "after": self.after}

    def apply(self, source: bytes) -> bytes:
        """Return the file's source with the change."""
        return changed(source, self.place, self.after)


def all_places(folder: Path, files: list[str]) -> list[Place]:
    """Return the places of all files, in order."""
    return [place for file in files for place in places(file, (folder / file).read_bytes())]


def draw(found: list[Place], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants at different places, all equally likely.

    A longer draw with the same seed begins with the shorter one.
    """
    generator = random.Random(seed)
    order = list(range(len(found)))
    generator.shuffle(order)
    mutants = []
    for number, index in enumerate(order[:count], 1):
        place = found[index]
        mutants.append(Mutant(number, place, generator.choice(place.choices)))
    return mutants
