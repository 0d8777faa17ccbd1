"""Runs of cells: ranks start once, and the reference is computed once for each family."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import transformers

from scaletorch.dist.errors import RankFailedError
from scaletorch.dist.testing import preload

from ..gaps import Figures
from ..pools import Pools
from .axes import AXES, Axis
from .names import module_of
from .ranks import run_cell
from .reference import refer
from .verdicts import ALONE, HANGS, NONE, Verdict, described, of_failure, of_ranks

LIMIT = 25.0  # seconds for a cell; one that takes longer is run again with twice the time
_EVERYWHERE = ("torch._dynamo", "transformers", "tools.families.ranks")


def run(pools: Pools, name: str, axis: Axis, expected: Figures, limit: float) -> Verdict:
    """Run one cell."""
    try:
        said = pools.run(axis.ranks, run_cell, name, axis, expected, timeout=limit)
    except RankFailedError as error:
        return of_failure(error)
    return of_ranks(said)


def cells(names: Sequence[str], axes: Iterable[str]) -> Iterator[tuple[str, str, Verdict]]:
    """Yield each cell's family, axis and verdict, family by family."""
    axes = [*axes]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    preload(*_EVERYWHERE, *sorted({m for m in map(module_of, names) if m is not None}))
    with contextlib.closing(Pools()) as pools, ThreadPoolExecutor(1) as ahead:
        coming = [ahead.submit(refer, name) for name in names[:1]]
        for name, after in zip(names, [*names[1:], None], strict=True):
            found = coming.pop()
            if after is not None:  # compute the next reference while the ranks run this family
                coming.append(ahead.submit(refer, after))
            yield from ((name, *cell) for cell in _family(name, found, axes, pools))


def _family(
    name: str, found: Future[tuple[Figures, bool]], axes: Iterable[str], pools: Pools
) -> Iterator[tuple[str, Verdict]]:
    try:
        expected, has_experts = found.result()
    except Exception as error:
        alone = Verdict(ALONE, words=described(error))
        yield from ((axis, alone) for axis in axes)
        return
    for axis in axes:
        if "ep_size" in AXES[axis].sizes and not has_experts:
            yield axis, Verdict(NONE)
            continue
        verdict = run(pools, name, AXES[axis], expected, LIMIT)
        if verdict.word == HANGS:  # perhaps the machine is busy
            verdict = run(pools, name, AXES[axis], expected, 2 * LIMIT)
        yield axis, verdict
