"""Check that ranks which should hold the same tensors do, by digests of weights and gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..dist import all_gather_object, group_ranks
from ..dist.building import map_tensors
from ..dist.errors import MismatchError, NonFiniteError
from ..parallel.data_parallel.building import ShardedGradient
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import digest, digest_text
from ..parallel.tensor_parallel import split_by_owner
from .experts import expert_names
from .forward import manager_of, wait_for_parameters

Sides = list[list[int]]  # ranks grouped by digest, the largest group first
ABSENT = 1  # stands for a gradient that is None
SHOWN = 4  # tensors, and ranks per group, that an error names
ADVICE = (
    "They had different weights, batches, seeds or rates, made different calls, or a memory is "
    "faulty; go back to a checkpoint from before."
)


class Key(NamedTuple):
    """The identity of a digested tensor; ranks with the same key should hold the same bits."""

    kind: str  # "parameter", "gradient", "buffer", "optimizer" or "value"
    name: str  # in the plain model
    # Parameters and gradients: number of the shard, its first tp rank, and for experts the ep rank.
    # Buffers: pp, tp and ep ranks. Optimizers: pp rank.
    place: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return kind and name."""
        return self.kind if self.kind == self.name else f"{self.kind} {self.name}"


def check_replicas(
    model: nn.Module,
    manager: ProcessGroupManager | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Raise on every rank unless ranks that should hold the same tensors hold the same bits.

    It compares every parameter, whole gradient and persistent buffer over cp x dp, replicated
    parameters over tp, and tied ones over pp. Call it on all ranks between backward and
    `optimizer.step()`, when gradients are the same on all ranks. It reads all of these once, and
    each rank sends 8 bytes and a hash of the name for each tensor.

    Different batches within tp or pp show in no tensor, since ranks share the sums of gradients:
    pass the whole batch in `values`. It cannot find errors that are the same on all ranks, nor
    errors in shards that only one rank has, except for parameters that are not finite.

    Args:
        model: The model that `parallelize` returned.
        manager: The grid; by default the model's.
        optimizer: An optimizer, whose hyperparameters are compared within a stage.
        step: The number of the step, for the error.
        values: Other values that must be the same on every rank, by name: numbers, strings, or
            tensors such as the whole batch.

    Raises:
        MismatchError: Ranks differ; names the step, tensors and ranks.
        NonFiniteError: A parameter is infinite or NaN on some rank.
    """
    manager = manager_of(model, manager)
    wait_for_parameters(model)
    groups = [] if optimizer is None else optimizer.param_groups
    line = "; ".join(map(_group_line, groups))
    texts = {Key("optimizer", "optimizer", (manager.pp_rank,)): line}
    texts |= {
        Key("value", name): value_text(each) if isinstance(each, Tensor) else repr(each)
        for name, each in (values or {}).items()
    }
    digests = [*tensor_digests(model, manager), *((k, text_hash(t)) for k, t in texts.items())]
    finite = {n: p.isfinite().all() for n, p in model.named_parameters() if p.numel()}
    own = [n for n, holds in zip(finite, as_numbers(finite.values()), strict=True) if not holds]
    told = enumerate(all_gather_object(own, manager.world_group))
    places = [f"{name} on {_named([rank], manager)}" for rank, names in told for name in names]
    at_step = "" if step is None else f"step {step}: "
    if places:
        raise NonFiniteError(
            f"{describe_rank()}: {at_step}parameters are not finite: {some(places, '; ')}; go back "
            "to a checkpoint from before, and look at these ranks' batches and the learning rate"
        )
    parted = differing_sides(digests, manager)
    if parted:
        refuse(parted, texts, manager, f"{at_step}ranks that should hold the same do not")


def refuse(
    parted: Mapping[Key, Sides],
    texts: Mapping[Key, str],
    manager: ProcessGroupManager,
    what: str = "ranks that should hold the same do not",
    advice: str = ADVICE,
) -> NoReturn:
    """Raise an error that names the tensors that differ, and their ranks; all ranks call it."""
    everyone = all_gather_object(dict(texts), manager.world_group)
    shown = []
    for key in sorted(parted, key=lambda key: key.kind in ("parameter", "gradient")):
        words = [f" ({t})" if (t := everyone[side[0]].get(key)) else "" for side in parted[key]]
        usual, *odd = [_named(side, manager) for side in parted[key]]
        most, total = len(parted[key][0]), sum(map(len, parted[key]))
        if 2 * most > total:
            usual = f"the other {most} of {total}"
        odd = [ranks + word for ranks, word in zip(odd, words[1:], strict=True)]
        shown.append(f"\n  {key}: on {'; '.join(odd)} not as on {usual}{words[0]}")
    raise MismatchError(f"{describe_rank()}: {what}.{some(shown, '', chr(10) + '  ')}\n{advice}")


def _named(ranks: Sequence[int], manager: ProcessGroupManager) -> str:
    world = group_ranks(manager.world_group)
    return some([f"rank {world[r]} ({manager.grid.coordinates(world[r])})" for r in ranks])


def some(items: Sequence[str], between: str = ", ", last: str = " ") -> str:
    """Join the first few items, and add the number of the others."""
    more = len(items) - SHOWN
    return between.join(items[:SHOWN]) + (f"{last}and {more} more" if more > 0 else "")


def as_numbers(digests: Iterable[Tensor | int]) -> list[int]:
    """Return digests, or other tensors of one element, in one transfer from devices."""
    digests = list(digests)
    tensors = [each for each in digests if isinstance(each, Tensor)]
    device = tensors[0].device if tensors else None
    stacked = torch.stack([each.to(device) for each in tensors]).tolist() if tensors else []
    fetched = iter(stacked)
    return [next(fetched) if isinstance(each, Tensor) else each for each in digests]


def keyed_pieces(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager
) -> Iterator[tuple[str, Key, Tensor]]:
    """Yield name, key and view of every piece of a parameter or gradient that may have replicas."""
    names = {name: tie.names[0] for tie in getattr(model, "ties", ()) for name in tie.names}
    experts = dict.fromkeys(expert_names(model), (manager.ep_rank,))
    for name, pieces in split_by_owner(model, tensors).items():
        for number, (owner, piece) in enumerate(pieces):
            place = number, owner, *experts.get(name, ())
            yield name, Key("parameter", names.get(name, name), place), piece


def differing_sides(
    digests: Sequence[tuple[Key, Tensor | int]], manager: ProcessGroupManager
) -> dict[Key, Sides]:
    """Return the keys whose digests differ, each with ranks by digest; all ranks call it."""
    keys = {text_hash(repr(key)): key for key, _ in digests}
    own = dict(zip(keys, as_numbers([number for _, number in digests]), strict=True))
    told = all_gather_object(own, manager.world_group)
    found: dict[int, set[int]] = {}
    for theirs in told:
        for name, number in theirs.items():
            found.setdefault(name, set()).add(number)
    parted = [name for name, numbers in found.items() if len(numbers) > 1]
    if not parted:
        return {}
    everyone = all_gather_object(keys, manager.world_group)
    named = {name: key for each in everyone for name, key in each.items()}
    return {named[name]: _sides_of([theirs.get(name) for theirs in told]) for name in parted}


def _sides_of(numbers: Sequence[int | None]) -> Sides:
    """Group ranks by their number, leaving out ranks with None; the largest group comes first."""
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        if number is not None:
            ranks.setdefault(number, []).append(rank)
    return sorted(ranks.values(), key=len, reverse=True)


def text_hash(text: str) -> int:
    """Return a 64-bit signed hash of a text, the same in every process."""
    content = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)


def tensor_digests(
    model: nn.Module, manager: ProcessGroupManager
) -> Iterator[tuple[Key, Tensor | int]]:
    """Yield digests of this rank's parameters, gradients (sharded: None) and buffers."""
    values = {name: each.detach() for name, each in model.named_parameters()}
    gradients = {
        name: each.grad
        for name, each in model.named_parameters()
        if isinstance(each.grad, Tensor) and not isinstance(each.grad, ShardedGradient)
    }
    by_key = {key: piece for _, key, piece in keyed_pieces(model, gradients, manager)}
    for _, key, piece in keyed_pieces(model, values, manager):
        yield key, digest(piece)
        yield key._replace(kind="gradient"), digest(by_key[key]) if key in by_key else ABSENT
    place = manager.pp_rank, manager.tp_rank, manager.ep_rank
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            # Others are caches that may depend on this rank's batches.
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield Key("buffer", f"{prefix}.{name}", place), digest(buffer)


def _group_line(group: Mapping[str, Any]) -> str:
    """Return the hyperparameters of a parameter group as text."""
    shown = {key: _shown(value) for key, value in group.items() if key != "params"}
    return ", ".join(f"{key}={text}" for key, text in shown.items() if text)


def _shown(value: Any) -> str:
    """Return a number, a string, None or a list of these as text; "" for anything else."""
    if isinstance(value, tuple | list):
        shown = [_shown(each) for each in value]
        return f"({', '.join(shown)})" if all(shown) else ""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.tolist()
    return repr(value) if isinstance(value, int | float | str | None) else ""


def value_text(value: Any) -> str:
    """Return a value as text: tensors by shape, dtype and digest, other objects by their type."""
    found = map_tensors(lambda x: f"{tuple(x.shape)} {x.dtype} {digest_text(x)}", value)
    plain = isinstance(found, str | int | float | complex | Mapping | list | tuple | None)
    return repr(found) if plain else type(found).__name__
