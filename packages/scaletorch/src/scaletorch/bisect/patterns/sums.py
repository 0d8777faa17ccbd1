"""Guesses about several ranks together: a sum or a mean over them that is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...compose.words import RUNS, listed
from .parts import Case, Finding, common
from .words import has, numbered

BATCHES = "micro-batches"


def sums(case: Case) -> Iterator[Finding]:
    """Find parts of ranks, or of micro-batches, that add up to the right one or have it as mean."""
    for over, clusters in _clusters(case):
        found: dict[str, list[list[int]]] = {}
        for cluster in clusters:
            parts = [case.wrong[i] for i in cluster]
            total = torch.stack([p.have for p in parts]).sum(0)
            for said, guess, fitted in _guesses(total, parts[0].want, len(parts)):
                if all(case.agrees(guess, p.want, p.have, fitted) for p in parts):
                    found.setdefault(said, []).append(cluster)
                    break
        for said, right in found.items():
            covers = frozenset(i for cluster in right for i in cluster)
            yield Finding(covers, f"{_whose(case, right, over)} {said} over {over} is missing")


def _guesses(total: Tensor, want: Tensor, count: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield words, what would be right by them, and how many numbers of that were fitted."""
    bias = common(total - want)
    yield "parts that add up to the right one: a sum", total, 0
    said = "parts that add up to the right one and a bias counted each time: a sum"
    yield said, total - bias, bias.numel()
    yield "parts whose mean is the right one: a mean", total / count, 0


def _clusters(case: Case) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield for each axis, or some together, the wrong parts that its sum would add."""
    for name, groups in _axes(case).items():
        found: dict[object, list[int]] = {}
        for i, part in enumerate(case.wrong):
            group = next((at for at, g in enumerate(groups) if part.piece.rank in g), None)
            batch = None if name == BATCHES else part.piece.micro_batch
            if group is not None:
                found.setdefault((part.place, batch, group), []).append(i)
        yield name, [cluster for cluster in found.values() if len(cluster) > 1]


def _axes(case: Case) -> dict[str, list[set[int]]]:
    """Return the groups of each axis, of each two together, all ranks, and each on its own."""
    axes = {n: [set(g) for g in gs] for n, gs in case.groups.items() if any(len(g) > 1 for g in gs)}
    pairs = {listed(pair): _joined(*(axes[n] for n in pair)) for pair in combinations(axes, 2)}
    ranks = {p.piece.rank for p in case.parts}
    found: dict[str, list[set[int]]] = {}
    for name, groups in {**axes, **pairs, "all ranks": [ranks]}.items():
        if groups not in found.values():
            found[name] = groups
    return {**found, BATCHES: [{rank} for rank in ranks]}


def _joined(*axes: Sequence[set[int]]) -> list[set[int]]:
    """Return groups that hold all ranks which groups of the axes connect."""
    joined: list[set[int]] = []
    for group in (group for groups in axes for group in groups):
        touching = [each for each in joined if each & group]
        joined = [each for each in joined if not each & group] + [group.union(*touching)]
    return joined


def _whose(case: Case, clusters: Sequence[Sequence[int]], over: str) -> str:
    """Return 'ranks 0 and 1 (tp) have', or the ranks of several groups."""
    ranks = [[case.wrong[i].piece.rank for i in cluster] for cluster in clusters]
    if over == BATCHES:
        ranks = [[rank for each in ranks for rank in each]]
    groups = list(dict.fromkeys(numbered("rank", each) for each in ranks))
    more = "; and so on" if len(groups) > RUNS else ""
    return has(f"{'; '.join(groups[:RUNS])}{more} ({over})")
