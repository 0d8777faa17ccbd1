"""All families one after another, on ranks that are started once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scaletorch.bisect import compare
from scaletorch.dist.errors import RankFailedError, ScaletorchError
from scaletorch.dist.testing import preload

from ...pools import Pools
from ..names import module_of
from ..verdicts import HANGS, described, of_failure
from .ranks import gaps, keep_plain, recorded, save
from .verdicts import ALONE, NO_PLAN, RAISES, RIGHT, UNJUDGED, WRONG, Family, Judgement

LIMIT = 60.0  # seconds for what is run at once


def families(names: Sequence[str]) -> Iterator[tuple[str, Family]]:
    """Yield each family's name and what was found of it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    modules = sorted({m for m in map(module_of, names) if m is not None})
    preload("torch._dynamo", "transformers", "tools.families.own_tp.ranks", *modules)
    with contextlib.closing(Pools()) as pools:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                yield name, try_one(pools, name, Path(folder))


def try_one(pools: Pools, name: str, folder: Path) -> Family:
    """Train a family and compare; nothing that it raises goes further."""

    def on(ranks: int, function: Callable[..., Any], *more: Any) -> list[Any]:
        return pools.run(ranks, function, name, folder, *more, timeout=LIMIT)

    try:
        [has_plan] = on(1, save)
        if not has_plan:
            return Family(NO_PLAN)
        [as_written] = on(1, keep_plain)
        if not as_written:
            return Family(ALONE, "it reads other weights than it wrote")
    except RankFailedError as error:
        return Family(ALONE, _short(error))
    try:
        said = on(2, gaps)
    except RankFailedError as error:
        return Family(RAISES, _short(error))
    apart = {kind: max(each[kind] for each in said) for kind in said[0]}
    found = Family(
        cut=apart.pop("cut")[0],
        apart={kind: (float(f"{error:.1e}"), where) for kind, (error, where) in apart.items()},
    )
    try:
        on(1, recorded, "one")
        on(2, recorded, "two")
    except RankFailedError as error:
        return found.judged(dict.fromkeys(("float64", "float32"), Judgement(RAISES, _short(error))))
    return found.judged(
        {"float64": judge(folder, "float64"), "float32": judge(folder, "float32", noise=True)}
    )


def judge(folder: Path, dtype: str, *, noise: bool = False) -> Judgement:
    """Compare the ranks' recording with one process in float64."""
    lost = folder / f"one.{dtype}" if noise else None
    try:
        report = compare(folder / "one.float64", folder / f"two.{dtype}", noise=lost)
    except ScaletorchError as error:
        return Judgement(UNJUDGED, described(error))
    except Exception as error:
        return Judgement(UNJUDGED, f"compare raises {described(error)}")
    if report.found:
        first = report.found[0]
        line, born = str(first).splitlines()[:2]
        return Judgement(WRONG, line, born.strip(), first.how)
    if report.unjudged:
        return Judgement(UNJUDGED, f"{len(report.unjudged)} results: {report.unjudged[0]}")
    return Judgement(RIGHT, f"{len(report.judged)} tensors, {report.count('unseen')} not compared")


def _short(error: RankFailedError) -> str:
    verdict = of_failure(error)
    return f"{verdict.word}: {verdict.words}" if verdict.word == HANGS else verdict.words.strip()
