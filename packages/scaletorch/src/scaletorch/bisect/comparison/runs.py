"""A recorded run: its tensors by key, and the tensors that each was computed from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...dist.errors import InvalidArgumentError
from ..keys import UNGRADED, Key, Kind
from ..recording.folder import Line, Recording, first_name, read
from .places import Held

_ORDER: Sequence[str] = tuple(Kind)


@dataclass(slots=True)
class Run:
    """All ranks' recordings of all steps."""

    folder: Path
    steps: Mapping[int, Sequence[Recording]]  # the recordings of each step, in rank order
    # the ranks' shards of each tensor, in the order in which tensors were recorded
    held: dict[Key, list[Held]] = field(default_factory=dict)
    # the tensors that each was computed from, as far as autograd knows
    parents: dict[Key, dict[Key, None]] = field(default_factory=dict)
    # the tensors computed from each, the reverse of `parents`
    children: dict[Key, dict[Key, None]] = field(default_factory=dict)
    # the parameters that each was computed with
    uses: dict[Key, set[str]] = field(default_factory=dict)
    inside: dict[Key, str | None] = field(default_factory=dict)  # the module whose code was running
    # for a tensor with several names, each other name -> the first one
    first: dict[Key, Key] = field(default_factory=dict)
    # modules whose number of calls differs between micro-batches -> the reason
    uncounted: dict[str, str] = field(default_factory=dict)

    def link(self, key: Key, parent: Key) -> None:
        """Note that a tensor was computed from another one."""
        if parent != key:
            self.parents.setdefault(key, {})[parent] = None
            self.children.setdefault(parent, {})[key] = None

    def tied(self, step: int) -> Mapping[str, str]:
        """Return other name -> first name, for parameters that have several names."""
        names: Mapping[str, str] = self.steps[step][0].header["tied"]
        return names

    def used_by(self, key: Key, is_use: Callable[[Key], bool] = lambda _: False) -> Iterator[Key]:
        """Yield the tensors computed from a tensor under any of its names; these share a gradient.

        `is_use` returns whether another name of the tensor counts as a use, see `births`.
        """
        first = self.first.get(key, key)
        names = [first]
        for name in names:
            for child in self.children.get(name, ()):
                if self.first.get(child) != first or is_use(child):
                    yield child
                else:
                    names.append(child)


def load(folder: str | Path) -> Run:
    """Load the run that was recorded into a folder."""
    run = Run(Path(folder), read(Path(folder)))
    for step, recordings in run.steps.items():
        found = [each for recording in recordings for each in _keyed(run, step, recording)]
        for key, held in sorted(found, key=lambda each: _turn(*each)):
            run.held.setdefault(key, []).append(held)
    return run


def _turn(key: Key, held: Held) -> tuple[int, int, int]:
    """Return a sort key for the order of a step; backward runs from the last stage to the first."""
    rank = held.recording.rank
    return _ORDER.index(key.kind), -rank if key.kind == Kind.BACKWARD else rank, held.number


def _keyed(run: Run, step: int, recording: Recording) -> Iterator[tuple[Key, Held]]:
    """Yield a rank's tensors with their keys, also those that are other names of a tensor."""
    keys = _keys(run, step, recording)
    gradients: dict[int, int] = {}
    for number, (line, key) in enumerate(zip(recording.lines, keys, strict=True)):
        if line.kind == Kind.BACKWARD:
            gradients[line.parents[0]] = number
        elif key is not None:
            yield key[0], Held(recording, number, key[1])
            if line.kind in (Kind.FORWARD, Kind.LOSS):
                for parent in filter(None, (keys[parent] for parent in line.parents)):
                    run.link(key[0], parent[0])
                run.uses.setdefault(key[0], set()).update(line.uses)
                run.inside.setdefault(key[0], line.inside)
    for number, (line, key) in enumerate(zip(recording.lines, keys, strict=True)):
        origin = first_name(recording.lines, number)
        if line.kind != Kind.FORWARD or key is None:
            continue
        if origin != number and (first := keys[origin]) is not None:
            run.first.setdefault(key[0], first[0])
        if origin in gradients:
            yield key[0]._replace(kind=Kind.BACKWARD), Held(recording, gradients[origin], key[1])


def _keys(run: Run, step: int, recording: Recording) -> list[tuple[Key, int] | None]:
    """Return the key and micro-batch of each line; None if they are unknown."""
    per = _calls(run, recording)
    found: list[tuple[Key, int] | None] = []
    for line in recording.lines:
        if line.kind in (Kind.FORWARD, Kind.BACKWARD):
            if calling(line) in run.uncounted:
                found.append(None)
                continue
            micro_batch, call = divmod(line.call, per[calling(line)])
            found.append((Key(step, line.kind, line.name, line.item, call), micro_batch))
            continue
        micro_batch = line.call if line.kind == Kind.DATA else line.call // (per.get("") or 1)
        found.append((Key(step, line.kind, line.name, line.item), micro_batch))
    return found


def _calls(run: Run, recording: Recording) -> dict[str, int]:
    """Return each module's calls per micro-batch; note modules whose number of calls varies."""
    calls: Counter[str] = Counter()
    for line in recording.lines:
        if line.kind == Kind.FORWARD:
            calls[calling(line)] = max(calls[calling(line)], line.call + 1)
    several = int(recording.header["micro_batches"])
    for name, count in calls.items():
        if count % several:
            reason = f"rank {recording.rank} called it {count} times in {several} micro-batches"
            run.uncounted[name] = reason
    return {name: count // several for name, count in calls.items()}


def calling(line: Line | Key) -> str:
    """Return a module's name, with a suffix under no_grad, whose calls are counted separately."""
    return line.name + UNGRADED * (UNGRADED in line.item)


def require_comparable(ours: Run, theirs: Run) -> None:
    """Refuse two runs of different models, or without a common step."""
    if not set(ours.steps) & set(theirs.steps):
        raise InvalidArgumentError(
            f"{ours.folder} has steps {list(ours.steps)} and {theirs.folder} has "
            f"{list(theirs.steps)}: record the same step of both"
        )
    named = [{k.name for k in run.held if k.kind == Kind.GRADIENT} for run in (ours, theirs)]
    if named[0] != named[1]:
        only = [sorted(a - b)[:3] for a, b in (named, named[::-1])]
        if not named[0] & named[1] or all(only):
            raise InvalidArgumentError(
                f"these runs are of different models: {ours.folder} alone has gradients of "
                f"{only[0]}, {theirs.folder} alone of {only[1]}"
            )


def unite_terms(run: Run, reference: Run) -> None:
    """Give the terms of tied parameters one name, which only the reference knows.

    A stage of a pipeline may hold a tied parameter under another of its names.
    """
    for key in [k for k in run.held if k.kind == Kind.TERM and k.step in reference.steps]:
        if first := reference.tied(key.step).get(key.name):
            run.held.setdefault(key._replace(name=first), []).extend(run.held.pop(key))


def reach(start: Iterable[Key], neighbours: Callable[[Key], Iterable[Key]]) -> list[Key]:
    """Return some keys and all keys that can be reached from them, nearest first."""
    found = dict.fromkeys(start)
    waiting = list(found)
    for key in waiting:  # grows during the loop
        waiting += (new := [each for each in neighbours(key) if each not in found])
        found |= dict.fromkeys(new)
    return list(found)


def ancestors(run: Run) -> dict[Key, list[Key]]:
    """Return the direct sources of each tensor of a run, in forward, backward and the update."""
    users: dict[tuple[int, str], list[Key]] = defaultdict(list)
    for key, names in run.uses.items():
        for name in names:
            users[key.step, name].append(key)
    for loss in [key for key in run.held if key.kind == Kind.LOSS and not run.parents.get(key)]:
        _link_loss(run, loss)
    for key in run.held:  # if a parameter has no recorded use, its module's outputs count as uses
        if key.is_output:
            users[key.step, key.name].append(key)
    found = {key: list(dict.fromkeys(_sources(key, run, users))) for key in run.held}
    for source, results in _without_gradients(run):
        for key in results:
            found[key].append(source)
    return found


def _link_loss(run: Run, loss: Key) -> None:
    """Link a loss without sources to the outputs that have no known users."""
    for key in run.held:
        users = run.children.get(key, ())
        if key.is_output and key.step == loss.step and all(k.kind == Kind.LOSS for k in users):
            run.link(loss, key)


def _without_gradients(run: Run) -> Iterator[tuple[Key, list[Key]]]:
    """Yield (source, results) for sources that may have no gradient, which autograd misses."""
    outputs: dict[tuple[int, str, int], list[Key]] = defaultdict(list)
    for key in run.held:
        if key.is_output:
            outputs[key.step, key.name, key.call].append(key)
    for key in run.held:
        if key.kind == Kind.DATA:
            of_loss = key.name == "labels" or key.name.startswith("loss_")
            kinds = (Kind.LOSS,) if of_loss else (Kind.LOSS, Kind.FORWARD)
            yield key, [k for k in run.held if k.step == key.step and k.kind in kinds]
        elif key.kind == Kind.FORWARD and not key.is_output:
            yield key, outputs[key.step, key.name, key.call]


def _sources(key: Key, run: Run, users: Mapping[tuple[int, str], list[Key]]) -> Iterator[Key]:
    step = key.step
    if key.kind in (Kind.FORWARD, Kind.LOSS):
        yield from run.parents.get(key, ())
        for name in run.uses.get(key, ()):
            yield Key(step, Kind.START, name)
    elif key.kind == Kind.BACKWARD:
        yield from _passed_back(run.used_by(key._replace(kind=Kind.FORWARD)), run)
    elif key.kind == Kind.GRADIENT:
        name = run.tied(step).get(key.name, key.name)
        own = users.get((step, name)) or users.get((step, name.rpartition(".")[0]), [])
        yield from _passed_back(own, run)
    elif key.kind == Kind.NORM:
        yield from (k for k in run.held if k.step == step and k.kind == Kind.GRADIENT)
    elif key.kind == Kind.START:
        yield Key(step - 1, Kind.WEIGHT, key.name)
    elif key.kind == Kind.WEIGHT:
        yield Key(step, Kind.START, key.name)
        yield Key(step, Kind.GRADIENT, key.name)
        yield Key(step, Kind.NORM, "")


def _passed_back(results: Iterable[Key], run: Run) -> Iterator[Key]:
    """Yield the sources of a tensor's gradient, given the tensors computed from that tensor."""
    for result in results:
        yield result
        yield from run.parents.get(result, ())
        if result.kind == Kind.FORWARD:
            yield result._replace(kind=Kind.BACKWARD)
