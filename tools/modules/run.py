"""Runs of settings, and the search for the parts of a module that a fault needs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from refusals.layouts import Layout

from scaletorch.dist.errors import RankFailedError
from scaletorch.dist.testing import preload

from ..families.verdicts import ALONE, HANGS, Verdict, described, of_failure
from ..gaps import Figures
from ..pools import Pools
from . import layouts
from .cell import cell, refer
from .recipe import USUAL, Recipe, fitting, odd, shown
from .verdicts import FOUND, after, of_ranks

LIMIT = 25.0  # seconds for a setting; one that takes longer is run again with twice the time


@dataclass(frozen=True)
class Setting:
    """A module on a layout."""

    recipe: Recipe
    seed: int
    layout: Layout

    def __str__(self) -> str:
        return f"{self.seed:5} {layouts.shown(self.layout):44} {shown(self.recipe)}"

    def again(self, *, drawn: bool) -> str:
        """Return the command that runs it again."""
        command = f'hatch run modules --seeds {self.seed} --layouts "{layouts.shown(self.layout)}"'
        return command if drawn else f"{command} --recipe {shown(self.recipe)}"


def layouts_of(seed: int, count: int) -> list[Layout]:
    """Return `count` different layouts, drawn by a seed."""
    source = random.Random(f"layouts {seed}")
    found: dict[str, Layout] = {}
    while len(found) < count:
        layout = layouts.draw(source)
        found.setdefault(layouts.shown(layout), layout)
    return [*found.values()]


@dataclass
class Runner:
    """Runs settings on persistent ranks."""

    limit: float = LIMIT
    pools: Pools = field(default_factory=Pools)
    _known: dict[str, Figures | Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        preload("tools.modules.cell")

    def run(self, setting: Setting) -> Verdict:
        """Return the verdict on a setting."""
        expected = self._expected(setting)
        if isinstance(expected, Verdict):
            return expected
        verdict = self._once(setting, expected)
        if verdict.word == FOUND:
            return after(verdict, self._once(setting, expected, rehearse=False))
        return verdict

    def _expected(self, setting: Setting) -> Figures | Verdict:
        key = f"{setting.seed} {setting.layout.depth} {sorted(setting.recipe.items())}"
        if key not in self._known:
            self._known.clear()
            try:
                self._known[key] = refer(setting.recipe, setting.seed, setting.layout.depth)
            except Exception as error:
                self._known[key] = Verdict(ALONE, words=described(error))
        return self._known[key]

    def _once(self, setting: Setting, expected: Figures, *, rehearse: bool = True) -> Verdict:
        own = (setting.recipe, setting.seed, setting.layout)
        for limit in (self.limit, 2 * self.limit):  # the machine may be busy
            try:
                return of_ranks(
                    self.pools.run(
                        setting.layout.ranks, cell, *own, expected, rehearse=rehearse, timeout=limit
                    )
                )
            except RankFailedError as error:
                verdict = of_failure(error)
                if verdict.word != HANGS:
                    break
        return verdict

    def shrink(self, setting: Setting, verdict: Verdict) -> Setting:
        """Return the setting with as few odd parts as possible that has the same verdict."""
        for part in odd(setting.recipe):
            less = Setting(
                fitting({**setting.recipe, part: USUAL[part]}), setting.seed, setting.layout
            )
            if odd(less.recipe) != odd(setting.recipe) and self.run(less).word == verdict.word:
                setting = less
        return setting
