"""Mixtures of experts on every layout of 8 ranks, compared with one process.

`python packages/scaletorch/tests/experts_on_eight.py` trains each layout once at least; families,
options and sizes of axes are spread over them so that every two of them meet in some case.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from test_experts import FAMILIES, trained

from scaletorch.dist import InvalidArgumentError, RankFailedError
from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.parallel.pipeline_parallel import SCHEDULES

RANKS = 8
BIASED = ("DeepseekV3", "Glm4Moe")  # have a bias by which one expert can get all tokens
AXES = ("dp", "pp", "cp", "tp", "ep", "etp")
CANDIDATES = 60  # drawn, of which the one is taken that brings most new pairs


class Case(NamedTuple):
    """A layout, a family and options; each field is a factor of which all pairs are tried."""

    dp: int
    pp: int
    cp: int
    tp: int
    ep: int
    etp: int
    family: str
    sequence_parallel: bool
    recompute: bool
    stage: int
    schedule: str
    micro_batches: int
    cp_method: str
    skewed: bool

    def __str__(self) -> str:
        """Return the layout and what else is not the plainest."""
        told = f"{self.dp}x{self.pp}x{self.cp}x{self.tp}-ep{self.ep}-etp{self.etp} {self.family}"
        told += f" zero{self.stage} m{self.micro_batches}"
        told += f" {self.schedule}" * (self.pp > 1) + f" {self.cp_method}" * (self.cp > 1)
        return told + "".join(
            f" {name}"
            for name in ("sequence_parallel", "recompute", "skewed")
            if getattr(self, name)
        )

    def train(self) -> None:
        """Train on 8 ranks.

        Raises:
            RankFailedError: A rank finds another figure than one process, or the case is refused.
        """
        stages = SCHEDULES[self.schedule](self.pp, self.micro_batches).num_stages
        options = {
            "sequence_parallel": self.sequence_parallel,
            "recompute": self.recompute,
            "schedule": self.schedule,
            "cp_method": self.cp_method,
        }
        sizes = {f"{axis}_size": getattr(self, axis) for axis in AXES}
        layers = max(2, stages)
        given = self.micro_batches, self.stage, layers, self.skewed
        trained(RANKS, self.family, sizes, options, *given)


def layouts() -> Iterator[Grid]:
    """Yield every layout of 8 ranks, with every fold of it for experts."""
    for plain in legal_layouts(RANKS):
        sizes = {axis: getattr(plain, axis) for axis in ("dp", "pp", "cp", "tp")}
        for etp in {1, plain.tp}:
            line = plain.dp * plain.cp * plain.tp // etp
            for ep in (1, 2, 4, 8):
                if line % ep == 0:
                    yield Grid(**sizes, ep=ep, etp=etp)


def values(grid: Grid) -> dict[str, list[object]]:
    """Return what each factor of a case on this layout can be."""
    schedules = [name for name in SCHEDULES if name != "forward_only"]
    schedules = [name for name in schedules if SCHEDULES[name](grid.pp, 4).num_stages <= RANKS]
    found: dict[str, list[object]] = {axis: [getattr(grid, axis)] for axis in AXES}
    return found | {
        "family": [name for name in FAMILIES if grid.cp == 1 or name != "GptOss"],  # sinks, refused
        "sequence_parallel": [False, True] if grid.tp > 1 else [False],
        "recompute": [False, True],
        "stage": [0, 1, 2],
        "schedule": schedules if grid.pp > 1 else ["1f1b"],
        "micro_batches": [m for m in (1, 2, 4) if grid.dp * m <= 16],
        "cp_method": ["ring", "all_gather", "ulysses"] if grid.cp > 1 else ["ring"],
        "skewed": [False, True],
    }


def pairs(factors: dict[str, list[object]]) -> set[tuple[object, ...]]:
    """Return all pairs of values of two factors."""
    named = [[(name, value) for value in some] for name, some in factors.items()]
    return {
        pair
        for one, other in itertools.combinations(named, 2)
        for pair in itertools.product(one, other)
    }


def pairs_of(case: Case) -> set[tuple[object, ...]]:
    """Return the pairs that a case has."""
    return pairs({name: [value] for name, value in case._asdict().items()})


def drawn(factors: dict[str, list[object]], rng: random.Random) -> Case:
    """Draw a case; only families with a bias are skewed."""
    case = Case(**{name: rng.choice(some) for name, some in factors.items()})
    return case._replace(skewed=case.skewed and case.family in BIASED)


def covering(seed: int = 0) -> list[Case]:
    """Return cases of every layout, with every pair of values that goes together."""
    rng, cases, every = random.Random(seed), [], list(layouts())
    rng.shuffle(every)
    left = set().union(*(pairs(values(grid)) for grid in every))
    left -= {
        p
        for p in left
        if ("skewed", True) in p and dict(p).get("family", "DeepseekV3") not in BIASED
    }

    def take(factors: dict[str, list[object]]) -> None:
        some = (drawn(factors, rng) for _ in range(CANDIDATES))
        best = max(some, key=lambda case: len(pairs_of(case) & left))
        cases.append(best)
        left.difference_update(pairs_of(best))

    for grid in every:
        take(values(grid))
    while left:
        wanted = dict(min(left, key=repr))
        found = rng.choice(
            [v for g in every if all(x in (v := values(g))[n] for n, x in wanted.items())]
        )
        found |= {name: [value] for name, value in wanted.items()}
        if found["skewed"] == [True]:
            found["family"] = [f for f in found["family"] if f in BIASED]
        take(found)
    return cases


def outcome(case: Case) -> str:
    """Train a case; return '' if it is one process's, or what is wrong; refusals begin so."""
    try:
        case.train()
    except RankFailedError as error:
        found = list(error.exceptions.values())
        refused = len(found) == RANKS and any(type(each) is InvalidArgumentError for each in found)
        return f"refused: {found[0]}" if refused else str(error)
    return ""


def main() -> int:
    """Run the command; 1 if a case trains otherwise than one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="only show the cases")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    arguments = parser.parse_args()
    counts = {"right": 0, "refused": 0, "WRONG": 0}
    for number, case in enumerate(covering()):
        if arguments.only and number not in arguments.only:
            continue
        if arguments.list:
            print(f"{number:3} {case}")
            continue
        began, wrong = time.monotonic(), outcome(case)
        verdict = "right" if not wrong else "refused" if wrong.startswith("refused") else "WRONG"
        counts[verdict] += 1
        print(f"{number:3} {verdict:8}{time.monotonic() - began:6.1f} s {case}", flush=True)
        if wrong:
            print(f"    {wrong}", flush=True)
    print(counts)
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
