"""The comparison at construction: every rank must wrap the same parameters in the same way."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_gather_object
from ...dist.errors import MismatchError
from ..pg_manager import describe_rank

_SHOWN = 12  # lines of difference for each rank


def describe_parameters(
    parameters: Iterable[tuple[str, Tensor]], options: Mapping[str, object]
) -> list[str]:
    """Write what ranks must agree on: a line for the options and one for each parameter."""
    lines = [", ".join(f"{name}={value}" for name, value in options.items())]
    for name, parameter in parameters:
        frozen = "" if parameter.requires_grad else " frozen"
        lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}{frozen}")
    return lines


def compare_across_ranks(lines: Sequence[str], group: ProcessGroup | None) -> None:
    """Raise on every rank of the group unless all have the same lines.

    A digest goes round first, the lines only where the digests differ.

    Raises:
        MismatchError: With what differs from the most common lines, rank by rank.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = all_gather_object(digest, group=group)
    if len(set(digests)) == 1:
        return
    everyone: list[tuple[str, list[str]]] = all_gather_object(
        (describe_rank(), list(lines)), group=group
    )
    common, _ = Counter(digests).most_common(1)[0]
    right = digests.index(common)
    report = [
        "the ranks wrap different models for data parallelism: names, shapes, dtypes, order and "
        "options must be the same everywhere",
        *_differences(everyone, digests, right),
        f"build the same model in the same order on every rank (this is {describe_rank()})",
    ]
    raise MismatchError("\n".join(report))


def _differences(
    everyone: Sequence[tuple[str, list[str]]], digests: Sequence[str], right: int
) -> list[str]:
    """Say for each rank that differs from rank ``right`` of the group what differs."""
    report = []
    seen = {digests[right]}
    for (_, lines), digest in zip(everyone, digests, strict=True):
        if digest in seen:
            continue
        seen.add(digest)
        same = [name for (name, _), other in zip(everyone, digests, strict=True) if other == digest]
        report.append(f"{', '.join(same)} has (+), {everyone[right][0]} has (-):")
        diff = difflib.unified_diff(everyone[right][1], lines, n=0, lineterm="")
        shown = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
        report += [f"  {line[0]} {line[1:]}" for line in shown[:_SHOWN]]
        if len(shown) > _SHOWN:
            report.append(f"  … and {len(shown) - _SHOWN} lines more")
    return report
