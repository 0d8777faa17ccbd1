"""Whether ranks that should hold the same still do: weights, gradients, rates, batches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..dist import all_gather, all_gather_object, get_comm_device, group_ranks
from ..dist.errors import InvalidArgumentError, MismatchError, NonFiniteError
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from .digests import Key, nonfinite_parameters, optimizer_lines, tensor_digests, value_lines
from .forward import manager_of, wait_for_parameters

SHOWN = 4  # tensors, and ranks of a side, that an error names
ADVICE = (
    "They were given other weights, batches, seeds or rates, made other calls, or a memory is "
    "faulty; go on from a checkpoint from before."
)
HEAD = 2  # numbers before a rank's digests: of its keys, and of tensors that are not finite


class Table:
    """The keys of every rank's numbers, and which of them are to be equal.

    Args:
        keys: Each rank's, in the order of its digests.
    """

    def __init__(self, keys: Sequence[Sequence[Key]]) -> None:
        self.keys = keys
        self.hashes = [key_hash(each) for each in keys]
        self.length = max(map(len, keys))
        self.agreed: int | None = None  # the last step at which all was well
        first: dict[Key, tuple[int, int]] = {}
        pairs = [
            (rank, at, *first.setdefault(key, (rank, at)))
            for rank, named in enumerate(keys)
            for at, key in enumerate(named)
        ]
        later = [pair for pair in pairs if pair[:2] != pair[2:]]
        self._pairs = torch.tensor(later, dtype=torch.int64).view(-1, 4).T

    def unequal(self, numbers: Tensor) -> list[Key]:
        """Return the keys whose digests differ, in the order in which ranks have them.

        Args:
            numbers: [ranks, length] int64.
        """
        rank, at, first, place = self._pairs
        unlike = numbers[rank, at] != numbers[first, place]
        found = self._pairs[:, unlike].T.tolist()
        return list(dict.fromkeys(self.keys[rank][at] for rank, at, _, _ in found))

    def sides(self, key: Key, numbers: Tensor) -> list[list[int]]:
        """Return the ranks that have one digest, for each; the largest side first."""
        held: dict[int, list[int]] = {}
        for rank, named in enumerate(self.keys):
            if key in named:
                held.setdefault(int(numbers[rank, named.index(key)]), []).append(rank)
        return sorted(held.values(), key=len, reverse=True)


_tables: WeakKeyDictionary[nn.Module, Table] = WeakKeyDictionary()


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

    Over cp x dp these are every parameter, every gradient that is whole, and every buffer that is
    saved; over tp parameters that are replicated there, over pp those that are tied. Call it on all
    ranks between backward and `optimizer.step()`, when all ranks' gradients are the same. It reads
    all of these once, and costs one all-gather of 8 bytes for each; the first call also exchanges
    their names.

    Ranks that were given other weights, rates or seeds, swapped collectives, or have a faulty
    memory, drift apart in silence: this says so. Other batches within tp or pp show in no tensor,
    since their sums are the same on all ranks: pass the whole batch in `values`. It cannot see
    errors that are the same on all ranks, nor shards that one rank alone has, except for parameters
    that are not finite.

    Args:
        model: What `parallelize` returned.
        manager: The grid; by default the model's.
        optimizer: Its rates and other numbers are compared too, within a stage.
        step: To be named in the error, and to be counted by `every`.
        every: Compare at steps that this divides, and return at once at others.
        values: What else must be the same on every rank: numbers, texts, or tensors such as the
            whole batch, by the names that an error gives them.

    Raises:
        InvalidArgumentError: `every` is no number of steps.
        MismatchError: Ranks differ; it names step, tensors and ranks, and who is in the minority.
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
    infinite = nonfinite_parameters(model)
    table, numbers = exchange(model, digests, len(infinite), manager)
    if int(numbers[:, 1].sum()):
        refuse_nonfinite(infinite, manager, step)
    unequal = table.unequal(numbers[:, HEAD:])
    if unequal:
        refuse(unequal, table, numbers[:, HEAD:], texts, manager, step)
    table.agreed = step


def exchange(
    model: nn.Module,
    digests: Sequence[tuple[Key, Tensor | int]],
    infinite: int,
    manager: ProcessGroupManager,
) -> tuple[Table, Tensor]:
    """Return the keys of all ranks' numbers, and the numbers: [ranks, 2 + length] int64."""
    keys = [key for key, _ in digests]
    table = _tables.get(model)
    if table is None:
        table = _tables[model] = Table(all_gather_object(keys, manager.world_group))
    row = [key_hash(keys), infinite, *_numbers([number for _, number in digests])]
    numbers = _gather(row, HEAD + table.length, manager)
    if numbers[:, 0].tolist() != table.hashes:  # some rank's model has changed
        table = _tables[model] = Table(all_gather_object(keys, manager.world_group))
        numbers = _gather(row, HEAD + table.length, manager)
    return table, numbers


def _gather(row: Sequence[int], length: int, manager: ProcessGroupManager) -> Tensor:
    mine = torch.zeros(length, dtype=torch.int64)
    mine[: len(row)] = torch.tensor(row[:length])
    group = manager.world_group
    return torch.stack(all_gather(mine.to(get_comm_device(group)), group=group)).cpu()


def _numbers(digests: Iterable[Tensor | int]) -> list[int]:
    """Return numbers that lie on devices, fetched at once."""
    digests = list(digests)
    there = [each for each in digests if isinstance(each, Tensor)]
    fetched = iter(torch.stack(there).tolist() if there else [])
    return [next(fetched) if isinstance(each, Tensor) else each for each in digests]


def refuse_nonfinite(names: list[str], manager: ProcessGroupManager, step: int | None) -> NoReturn:
    """Raise with the parameters that are not finite, and their ranks."""
    everyone = all_gather_object(names, manager.world_group)
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
    unequal: Sequence[Key],
    table: Table,
    numbers: Tensor,
    texts: Mapping[Key, str],
    manager: ProcessGroupManager,
    step: int | None,
    advice: str = ADVICE,
) -> NoReturn:
    """Raise with the tensors that differ, and the ranks.

    Raises:
        MismatchError: Always.
    """
    told = all_gather_object(dict(texts), manager.world_group)
    shown = []
    for key in sorted(unequal, key=lambda key: key.kind in ("parameter", "gradient")):
        sides = table.sides(key, numbers)
        said = [told[ranks[0]].get(key) for ranks in sides]
        shown.append(f"{key}: {_sides(sides, said, manager)}")
    before = "" if table.agreed is None else f"; at step {table.agreed} they were the same"
    guilty = _minority(unequal, table, numbers)
    suspects = f"Look at {_named(guilty, manager)} first. " if guilty else ""
    raise MismatchError(
        f"{describe_rank()}: {_at(step)}ranks that should hold the same do not{before}.\n  "
        + "\n  ".join(shown[:SHOWN])
        + (f"\n  and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
        + f"\n{suspects}{advice}"
    )


def _sides(
    sides: Sequence[Sequence[int]], said: Sequence[str | None], manager: ProcessGroupManager
) -> str:
    """Write who has what; the ranks in the majority are only counted."""
    most, *others = sides
    total = sum(map(len, sides))
    words = [f" ({text})" if text else "" for text in said]
    odd = "; ".join(
        f"{_named(ranks, manager)}{word}" for ranks, word in zip(others, words[1:], strict=True)
    )
    if 2 * len(most) > total:
        return f"on {odd} not as on the other {len(most)} of {total}{words[0]}"
    return f"on {_named(most, manager)}{words[0]} not as on {odd}; no majority tells who is right"


def _minority(unequal: Iterable[Key], table: Table, numbers: Tensor) -> list[int]:
    """Return the ranks that are most often outside a majority; none if there never is one."""
    counts: Counter[int] = Counter()
    for key in unequal:
        most, *others = table.sides(key, numbers)
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


def key_hash(keys: Iterable[Key]) -> int:
    """Return a number for a rank's keys."""
    return text_hash("\n".join(map(repr, keys)))


def text_hash(text: str) -> int:
    """Return a number for a text."""
    content = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)
