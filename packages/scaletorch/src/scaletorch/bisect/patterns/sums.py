"""Guesses about several ranks together: a sum or a mean over them that is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...compose.words import RUNS, listed
from .parts import Case, Finding, same_index
from .words import batches_of, rank_list

Groups = Mapping[str, Sequence[tuple[int, ...]]]


def sums(case: Case) -> Iterator[Finding]:
    """Find parts of ranks, or of micro-batches, that add up to the right one or have it as mean."""
    for over, clusters in _clusters(case):
        for word, comes_to, test in (
            ("sum", "that add up to the right one", _adds_up),
            ("sum", "that add up to the right one and a bias counted each time", _adds_up_biased),
            ("mean", "whose mean is the right one", _has_as_mean),
        ):
            right = [cluster for cluster in clusters if test(case, cluster)]
            if right:
                covers = frozenset(i for cluster in right for i in cluster)
                whose = _whose(case, right, over)
                yield Finding(covers, f"{whose} parts {comes_to}: a {word} over {over} is missing")
                break


def _adds_up(case: Case, cluster: Sequence[int]) -> bool:
    return _is_right(case, cluster, _total(case, cluster))


def _has_as_mean(case: Case, cluster: Sequence[int]) -> bool:
    return _is_right(case, cluster, _total(case, cluster) / len(cluster))


def _adds_up_biased(case: Case, cluster: Sequence[int]) -> bool:
    """Return whether the sum is off by a vector that is the same wherever it is added."""
    total, want = _total(case, cluster), case.wrong[cluster[0]].want
    if want.ndim < 2:
        return False
    bias = (total - want).mean(list(range(want.ndim - 1)), keepdim=True)
    return _is_right(case, cluster, total - bias, bias.numel())


def _total(case: Case, cluster: Sequence[int]) -> Tensor:
    return torch.stack([case.wrong[i].have for i in cluster]).sum(0)


def _is_right(case: Case, cluster: Sequence[int], total: Tensor, fitted: int = 0) -> bool:
    parts = [case.wrong[i] for i in cluster]
    return all(case.agrees(total, p.want, p.have, fitted) for p in parts)


def _clusters(case: Case) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield for each axis, or some together, the wrong parts that its sum would add."""
    same = same_index(case.wrong)
    for name, groups in _axes(case).items():
        place = {rank: at for at, group in enumerate(groups) for rank in group}
        found: dict[tuple[int, int, int], list[int]] = {}
        for i, part in enumerate(case.wrong):
            if part.piece.rank in place:
                key = same[i], part.piece.micro_batch, place[part.piece.rank]
                found.setdefault(key, []).append(i)
        yield name, [cluster for cluster in found.values() if _one_each(case, cluster)]
    by_rank: dict[tuple[int, int], list[int]] = {}
    for i, part in enumerate(case.wrong):
        by_rank.setdefault((same[i], part.piece.rank), []).append(i)
    yield "micro-batches", [cluster for cluster in by_rank.values() if len(cluster) > 1]


def _one_each(case: Case, cluster: Sequence[int]) -> bool:
    return len(cluster) > 1 and len({case.wrong[i].piece.rank for i in cluster}) == len(cluster)


def _axes(case: Case) -> Groups:
    """Return each axis, each two together, and all ranks."""
    found: dict[str, Sequence[tuple[int, ...]]] = {}
    axes = {n: [tuple(g) for g in groups] for n, groups in case.groups.items()}
    axes = {n: groups for n, groups in axes.items() if any(len(g) > 1 for g in groups)}
    pairs = {listed(pair): _joined(*(axes[n] for n in pair)) for pair in combinations(axes, 2)}
    every = {"all ranks": [tuple(sorted({p.piece.rank for p in case.parts}))]}
    known: list[set[tuple[int, ...]]] = []
    for name, groups in {**axes, **pairs, **every}.items():
        if set(groups) not in known:
            known.append(set(groups))
            found[name] = groups
    return found


def _joined(*axes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return groups that hold all ranks which groups of the axes connect."""
    joined: list[set[int]] = []
    for group in (set(g) for groups in axes for g in groups):
        touching = [each for each in joined if each & group]
        joined = [each for each in joined if not each & group] + [group.union(*touching)]
    return [tuple(sorted(each)) for each in joined]


def _whose(case: Case, clusters: Sequence[Sequence[int]], over: str) -> str:
    """Return 'ranks 0 and 1 (tp) have', or the ranks of several groups."""
    parts = [[case.wrong[i].piece for i in cluster] for cluster in clusters]
    if over == "micro-batches":
        batches = batches_of({p.micro_batch for cluster in parts for p in cluster})
        return f"{batches} of {rank_list({p.rank for cluster in parts for p in cluster})} have"
    groups = list(dict.fromkeys(rank_list({p.rank for p in cluster}) for cluster in parts))
    if len(groups) == 1:
        return f"{groups[0]} ({over}) have"
    shown = [*groups[: RUNS - 1], "and so on"] if len(groups) > RUNS else groups
    return f"each group of {over} ({'; '.join(shown)}) has"
