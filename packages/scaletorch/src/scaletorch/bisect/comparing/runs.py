"""A recorded run: its tensors by key, and the tensors that each was computed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...dist.errors import InvalidArgumentError
from ..keys import (
    BACKWARD,
    DATA,
    FORWARD,
    GRADIENT,
    LOSS,
    NORM,
    SHARE,
    START,
    TERM,
    UNGRADED,
    WEIGHT,
    Key,
)
from ..recording.folder import Line, Recording, first_name, read
from .places import Held


@dataclass(slots=True)
class Run:
    """All ranks' recordings of all steps.

    Attributes:
        folder: Folder of the recordings.
        steps: The recordings of each step, in rank order.
        held: The ranks' shards of each tensor, in the order in which tensors were recorded.
        parents: The tensors that each was computed from, as far as autograd knows.
        children: The tensors computed from each, the reverse of `parents`.
        uses: The parameters that each was computed with.
        inside: The module whose code was running.
        first: For a tensor with several names, each other name -> the first one.
        uncounted: Modules whose number of calls differs between micro-batches -> the reason.
    """

    folder: Path
    steps: Mapping[int, Sequence[Recording]]
    held: dict[Key, list[Held]] = field(default_factory=dict)
    parents: dict[Key, dict[Key, None]] = field(default_factory=dict)
    children: dict[Key, dict[Key, None]] = field(default_factory=dict)
    uses: dict[Key, set[str]] = field(default_factory=dict)
    inside: dict[Key, str | None] = field(default_factory=dict)
    first: dict[Key, Key] = field(default_factory=dict)
    uncounted: dict[str, str] = field(default_factory=dict)

    def link(self, key: Key, parent: Key) -> None:
        """Note that a tensor was computed from another one."""
        self.parents.setdefault(key, {})[parent] = None
        self.children.setdefault(parent, {})[key] = None

    def used_by(self, key: Key, is_use: Callable[[Key], bool] = lambda _: False) -> Iterator[Key]:
        """Yield the tensors computed from a tensor under any of its names; these share a gradient.

        Args:
            key: The tensor.
            is_use: Returns whether another name of the tensor counts as a use, see `births`.
        """
        first = self.first.get(key, key)
        names = [first]
        for name in names:
            for child in self.children.get(name, ()):
                if self.first.get(child) != first or is_use(child):
                    yield child
                else:
                    names.append(child)


def load(folder: str | Path, steps: Mapping[int, Sequence[Recording]] | None = None) -> Run:
    """Load the run that was recorded into a folder.

    Args:
        folder: Folder of the recordings.
        steps: The result of `read`, if it was called already.

    Raises:
        InvalidArgumentError: As for `folder.read`.
    """
    run = Run(Path(folder), read(Path(folder)) if steps is None else steps)
    for step, recordings in run.steps.items():
        found = [each for recording in recordings for each in _keyed(run, step, recording)]
        for key, held in sorted(found, key=lambda each: _turn(*each)):
            run.held.setdefault(key, []).append(held)
    return run


def _turn(key: Key, held: Held) -> tuple[int, int, int]:
    """Return a sort key for the order of a step; backward runs from the last stage to the first."""
    turns = (DATA, START, FORWARD, LOSS, BACKWARD, SHARE, TERM, GRADIENT, NORM, WEIGHT)
    rank = held.recording.rank
    return turns.index(key.kind), -rank if key.kind == BACKWARD else rank, held.number


def _keyed(run: Run, step: int, recording: Recording) -> Iterator[tuple[Key, Held]]:
    """Yield a rank's tensors with their keys, also those that are other names of a tensor."""
    keys = _keys(run, step, recording)
    gradients: dict[int, int] = {}
    for number, (line, key) in enumerate(zip(recording.lines, keys, strict=True)):
        if line.kind == BACKWARD:
            gradients[line.parents[0]] = number
        elif key is not None:
            yield key[0], Held(recording, number, key[1])
            if line.kind in (FORWARD, LOSS):
                known = (keys[parent] for parent in line.parents)
                _note(run, key[0], [each[0] for each in known if each is not None], line)
    for number, (line, key) in enumerate(zip(recording.lines, keys, strict=True)):
        origin = first_name(recording.lines, number)
        if line.kind != FORWARD or key is None:
            continue
        if origin != number and (first := keys[origin]) is not None:
            run.first.setdefault(key[0], first[0])
        if origin in gradients:
            yield key[0]._replace(kind=BACKWARD), Held(recording, gradients[origin], key[1])


def _keys(run: Run, step: int, recording: Recording) -> list[tuple[Key, int] | None]:
    """Return the key and micro-batch of each line; None if they are unknown."""
    per, cut = _calls(run, recording), _cut(run.steps[step])
    found: list[tuple[Key, int] | None] = []
    for line in recording.lines:
        if line.kind in (FORWARD, BACKWARD, SHARE):
            if calling(line) in run.uncounted or _is_between(line, cut):
                found.append(None)
                continue
            micro_batch, call = divmod(line.call, per[calling(line)])
            found.append((Key(step, line.kind, line.name, line.item, call), micro_batch))
            continue
        first = recording.header["tied"].get(line.name, line.name)
        name = first if line.kind == TERM else line.name
        micro_batch = line.call if line.kind == DATA else line.call // (per.get("") or 1)
        found.append((Key(step, line.kind, name, line.item), micro_batch))
    return found


def _cut(recordings: Sequence[Recording]) -> dict[str, set[int]]:
    """Return the pipeline stages of each module that runs in several of them."""
    found: dict[str, set[int]] = {}
    for recording in recordings:
        for line in recording.lines if "pipeline" in recording.header else ():
            if line.kind == FORWARD:
                found.setdefault(line.name, set()).add(line.stage)
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def _is_between(line: Line, cut: Mapping[str, set[int]]) -> bool:
    """Return whether a tensor is sent between stages within a module that spans several."""
    stages = cut.get(line.name, {line.stage})
    return line.stage != (min if line.item.startswith("in") else max)(stages)


def _calls(run: Run, recording: Recording) -> dict[str, int]:
    """Return each module's calls per micro-batch; note modules whose number of calls varies."""
    calls: Counter[str] = Counter()
    for line in recording.lines:
        if line.kind == FORWARD:
            calls[calling(line)] = max(calls[calling(line)], line.call + 1)
    several = int(recording.header["micro_batches"])
    for name, made in calls.items():
        if made % several:
            reason = f"rank {recording.rank} called it {made} times in {several} micro-batches"
            run.uncounted[name] = reason
    return {name: made // several for name, made in calls.items()}


def calling(line: Line | Key) -> str:
    """Return a module's name, with a suffix for calls under no_grad, which are counted apart."""
    return line.name + UNGRADED * (UNGRADED in line.item)


def _note(run: Run, key: Key, parents: Sequence[Key], line: Line) -> None:
    run.parents.setdefault(key, {})
    for parent in parents:
        if parent != key:
            run.link(key, parent)
    run.uses.setdefault(key, set()).update(line.uses)
    run.inside.setdefault(key, line.inside)


def require_comparable(ours: Run, theirs: Run) -> None:
    """Refuse two runs of different models.

    Raises:
        InvalidArgumentError: They have no step in common, or different names or shapes of
            parameters.
    """
    if not set(ours.steps) & set(theirs.steps):
        raise InvalidArgumentError(
            f"{ours.folder} has steps {list(ours.steps)} and {theirs.folder} has "
            f"{list(theirs.steps)}: record the same step of both"
        )
    for key in ours.held if _alone(ours) and _alone(theirs) else ():
        shapes = [run.held[key][0].line.shape for run in (ours, theirs) if key in run.held]
        if key.kind == GRADIENT and shapes[0] != shapes[-1]:
            raise InvalidArgumentError(
                f"these are runs of unlike models: {key.name} has shape {shapes[0]} in "
                f"{ours.folder} and {shapes[-1]} in {theirs.folder}"
            )
    _require_names_of_stages(ours, theirs)
    named = [{k.name for k in run.held if k.kind == GRADIENT} for run in (ours, theirs)]
    if named[0] != named[1]:
        only = [sorted(a - b)[:3] for a, b in (named, named[::-1])]
        if not named[0] & named[1] or all(only):
            raise InvalidArgumentError(
                f"these are runs of unlike models: {ours.folder} alone has gradients of {only[0]}, "
                f"{theirs.folder} alone of {only[1]}"
            )


def _require_names_of_stages(ours: Run, theirs: Run) -> None:
    known = {key.name for key in theirs.held}
    lacking = sorted({k.name for k in ours.held if k.kind == GRADIENT} - known)
    if lacking and any("pipeline" in each[0].header for each in theirs.steps.values()):
        raise InvalidArgumentError(
            f"no stage in {theirs.folder} has {lacking[:3]}, which the model in {ours.folder} has; "
            f"they have {sorted(k.name for k in theirs.held if k.kind == GRADIENT)[:3]}: a stage "
            "has the whole model's names if it is that model without the layers of other stages"
        )


def _alone(run: Run) -> bool:
    return all(len(recordings) == 1 for recordings in run.steps.values())
