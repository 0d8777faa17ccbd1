"""The tensors that each tensor of a run is computed from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..keys import BACKWARD, DATA, FORWARD, GRADIENT, LOSS, NORM, START, WEIGHT, Key
from .places import Held
from .runs import Run


def ancestors(run: Run) -> dict[Key, list[Key]]:
    """Return the direct sources of each tensor of a run, in forward, backward and the update."""
    users: dict[tuple[int, str], list[Key]] = defaultdict(list)
    for key, names in run.uses.items():
        for name in names:
            users[key.step, name].append(key)
    _link(run)
    for key in run.held:  # if a parameter has no recorded use, its module's outputs count as uses
        if key.kind == FORWARD and key.item.startswith("out"):
            users[key.step, key.name].append(key)
    found = {key: list(dict.fromkeys(_sources(key, run, users))) for key in run.held}
    for source, results in _beside(run):
        for key in results:
            found[key].append(source)
    return found


def _link(run: Run) -> None:
    """Link tensors that leave a rank's autograd graph to the next stage's inputs, or the loss."""
    for key, held in run.held.items():
        if (
            key.kind not in (FORWARD, LOSS)
            or run.parents.get(key)
            or not getattr(torch, held[0].line.dtype).is_floating_point
        ):
            continue
        for last in _last(run, key):
            if key.kind == LOSS or _arrives(run.held[last], held):
                run.link(key, last)


def _last(run: Run, key: Key) -> list[Key]:
    """Return a step's module outputs from which nothing but a loss is known to be computed."""
    return [
        each
        for each in run.held
        if each[:2] == (key.step, FORWARD)
        and each.item.startswith("out")
        and each != key
        and not any(child.kind != LOSS for child in run.children.get(each, ()))
    ]


def _arrives(sent: Sequence[Held], come: Sequence[Held]) -> bool:
    """Return whether the received tensors are those that other ranks sent, by value."""
    apart = not {h.recording.rank for h in sent} & {h.recording.rank for h in come}
    first = next((h for h in sent if h.micro_batch == come[0].micro_batch), None)
    same = apart and first is not None and first.line.shape == come[0].line.shape
    return same and first is not None and torch.equal(first.tensor, come[0].tensor)


def _beside(run: Run) -> Iterator[tuple[Key, list[Key]]]:
    """Yield (source, results) for sources that may have no gradient, which autograd misses."""
    made: dict[tuple[int, str, int], list[Key]] = defaultdict(list)
    for key in run.held:
        if key.kind == FORWARD and key.item.startswith("out"):
            made[key.step, key.name, key.call].append(key)
    for key in run.held:
        if key.kind == DATA:
            yield key, [k for k in run.held if k.step == key.step and _sees(k.kind, key.name)]
        elif key.kind == FORWARD and key.item.startswith("in"):
            yield key, made[key.step, key.name, key.call]


def _sees(kind: str, entry: str) -> bool:
    """Return whether tensors of a kind may depend on an entry of the batch, by its name."""
    of_loss = entry == "labels" or entry.startswith("loss_")
    return kind == LOSS or (kind == FORWARD and not of_loss)


def _sources(key: Key, run: Run, users: Mapping[tuple[int, str], list[Key]]) -> Iterator[Key]:
    step = key.step
    if key.kind in (FORWARD, LOSS):
        yield from run.parents.get(key, ())
        for name in run.uses.get(key, ()):
            yield Key(step, START, name)
    elif key.kind == BACKWARD:
        yield from _passed_back(run.used_by(key._replace(kind=FORWARD)), run)
    elif key.kind == GRADIENT:
        name = run.steps[step][0].header["tied"].get(key.name, key.name)
        own = users.get((step, name)) or users.get((step, name.rpartition(".")[0]), [])
        yield from _passed_back(own, run)
    elif key.kind == NORM:
        yield from (k for k in run.held if k.step == step and k.kind == GRADIENT)
    elif key.kind == START:
        yield Key(step - 1, WEIGHT, key.name)
    elif key.kind == WEIGHT:
        yield Key(step, START, key.name)
        yield Key(step, GRADIENT, key.name)
        yield Key(step, NORM, "")


def _passed_back(results: Iterable[Key], run: Run) -> Iterator[Key]:
    """Yield the sources of a tensor's gradient, given the tensors computed from that tensor."""
    for result in results:
        yield result
        yield from run.parents.get(result, ())
        if result.kind == FORWARD:
            yield result._replace(kind=BACKWARD)
