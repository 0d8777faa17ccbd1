"""Check that replicas hold the same weights, gradients, learning rates and batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..dist import all_gather_object, group_ranks
from ..dist.errors import InvalidArgumentError, MismatchError, NonFiniteError
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from .digests import (
    Key,
    Sides,
    nonfinite_parameters,
    optimizer_lines,
    parted_sides,
    tensor_digests,
    text_hash,
    value_lines,
)
from .forward import manager_of, wait_for_parameters

SHOWN = 4  # tensors, and ranks per group, that an error names
ADVICE = (
    "They were given other weights, batches, seeds or rates, made other calls, or a memory is "
    "faulty; go on from a checkpoint from before."
)

_agreed: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()  # last step that agreed


def check_replicas(
    model: nn.Module,
    manager: ProcessGroupManager | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    every: int = 1,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Raise on every rank unless ranks that should hold the same tensors hold the same bits.

    Compared are: over cp x dp every parameter, every whole gradient and every persistent buffer;
    over tp replicated parameters; over pp tied ones. Call it on all ranks between backward and
    `optimizer.step()`, when gradients are the same on all ranks. It reads all of these once, and
    each rank sends 8 bytes and a hash of the name for each tensor.

    It finds ranks that drift apart because they have other weights, rates or seeds, swapped
    collectives or faulty memory. Different batches within tp or pp show in no tensor, since ranks
    share the sums of gradients: pass the whole batch in `values`. It cannot find errors that are
    the same on all ranks, nor errors in shards that only one rank has, except for parameters that
    are not finite.

    Args:
        model: The model that `parallelize` returned.
        manager: The grid; by default the model's.
        optimizer: An optimizer, whose hyperparameters are compared within a stage.
        step: The number of the step, for the error and for `every`.
        every: Compare only at steps that are multiples of this.
        values: Other values that must be the same on every rank, by name: numbers, strings, or
            tensors such as the whole batch.

    Raises:
        InvalidArgumentError: `every` is not a positive integer.
        MismatchError: Ranks differ; names the step, tensors and ranks, and the minority.
        NonFiniteError: A parameter is infinite or NaN on some rank.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidArgumentError(f"every must be a number of steps, at least 1, got {every!r}")
    if step is not None and step % every:
        return
    manager = manager_of(model, manager)
    wait_for_parameters(model)
    told = [] if optimizer is None else optimizer_lines(optimizer)
    texts = {Key("optimizer", "optimizer", (manager.pp_rank,)): "; ".join(told)}
    texts |= {Key("value", name): line for name, line in value_lines(values or {}).items()}
    digests = [*tensor_digests(model, manager), *((k, text_hash(t)) for k, t in texts.items())]
    infinite = all_gather_object(nonfinite_parameters(model), manager.world_group)
    if any(infinite):
        _refuse_nonfinite(infinite, manager, step)
    parted = parted_sides(digests, manager)
    if parted:
        before = _agreed.get(model)
        since = "" if before is None else f"; at step {before} they were the same"
        refuse(parted, texts, manager, f"{_at(step)}ranks that should hold the same do not{since}")
    _agreed[model] = step


def _refuse_nonfinite(
    everyone: Sequence[Sequence[str]], manager: ProcessGroupManager, step: int | None
) -> NoReturn:
    """Raise an error that names the parameters that are not finite, and their ranks."""
    places: dict[str, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs:
            places.setdefault(name, []).append(rank)
    shown = [f"{name} on {_named(ranks, manager)}" for name, ranks in places.items()]
    raise NonFiniteError(
        f"{describe_rank()}: {_at(step)}parameters are not finite: {_some(shown)}; go back to a "
        "checkpoint from before, and look at these ranks' batches and the learning rate"
    )


def refuse(
    parted: Mapping[Key, Sides],
    texts: Mapping[Key, str],
    manager: ProcessGroupManager,
    what: str = "ranks that should hold the same do not",
    advice: str = ADVICE,
) -> NoReturn:
    """Raise an error that names the tensors that differ, and their ranks; all ranks call it.

    Raises:
        MismatchError: Always.
    """
    told = all_gather_object(dict(texts), manager.world_group)
    shown = []
    for key in sorted(parted, key=lambda key: key.kind in ("parameter", "gradient")):
        said = [told[ranks[0]].get(key) for ranks in parted[key]]
        shown.append(f"{key}: {_sides(parted[key], said, manager)}")
    guilty = _minority(parted.values())
    suspects = f"Look at {_named(guilty, manager)} first. " if guilty else ""
    raise MismatchError(
        f"{describe_rank()}: {what}.\n  "
        + "\n  ".join(shown[:SHOWN])
        + (f"\n  and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
        + f"\n{suspects}{advice}"
    )


def _sides(
    sides: Sequence[Sequence[int]], said: Sequence[str | None], manager: ProcessGroupManager
) -> str:
    """Describe which ranks differ; ranks in the majority are only counted."""
    most, *others = sides
    total = sum(map(len, sides))
    words = [f" ({text})" if text else "" for text in said]
    odd = "; ".join(
        f"{_named(ranks, manager)}{word}" for ranks, word in zip(others, words[1:], strict=True)
    )
    if 2 * len(most) > total:
        return f"on {odd} not as on the other {len(most)} of {total}{words[0]}"
    return f"on {_named(most, manager)}{words[0]} not as on {odd}; no majority tells who is right"


def _minority(parted: Iterable[Sides]) -> list[int]:
    """Return the ranks that are most often outside a majority; [] if there is no majority."""
    counts: Counter[int] = Counter()
    for most, *others in parted:
        if len(most) > sum(map(len, others)):
            counts.update(rank for ranks in others for rank in ranks)
    highest = max(counts.values(), default=0)
    return sorted(rank for rank, count in counts.items() if count == highest)


def _named(ranks: Sequence[int], manager: ProcessGroupManager) -> str:
    of = group_ranks(manager.world_group)
    shown = [f"rank {of[each]} ({manager.grid.coordinates(of[each])})" for each in ranks[:SHOWN]]
    more = len(ranks) - SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _some(shown: Sequence[str]) -> str:
    more = len(shown) - SHOWN
    return "; ".join(shown[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "
