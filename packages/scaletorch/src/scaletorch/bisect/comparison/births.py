"""Births of faults: wrong tensors whose sources are all right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...compose.naming import listed
from ..keys import FINAL, Key, Kind
from .patterns import explain, numbered
from .places import ALIKE, GIVEN, WHOLE, Sharding, assemble, norm, pieces_of, shard_at
from .runs import Run, reach
from .verdicts import BAD, NEAR, UNSEEN, Judged, Pair, adds_up, meet

JUMP = 8.0  # largest factor by which a computation may amplify its sources' error
ABSORBED = 1e3  # an error this many times its users' errors does not reach these users
SYNCHRONISATION, UPDATE = "synchronisation", "update"
MOST = 0.5  # if more than this share of gradients is born wrong, no module is the cause


@dataclass(slots=True)
class Birth:
    """A wrong tensor whose sources are all right."""

    judged: Judged  # the verdict on it
    # 'data', 'start', 'forward', 'backward', SYNCHRONISATION of gradients, or UPDATE
    direction: str
    modules: list[str]  # the innermost modules whose code computed it
    inputs: list[Judged]  # the verdicts on the tensors that it was computed from
    # further tensors that were born wrong in the same way
    others: list[Judged] = field(default_factory=list)


def find_births(
    judged: Mapping[Key, Judged], run: Run, reference: Run, ancestry: Mapping[Key, list[Key]]
) -> list[Birth]:
    """Return the tensors at which faults begin, in the first step that has any, in its order.

    Intended differences, such as terms before ranks sum them, are not births: there are none if all
    results of the training are right. See also `_find_absorbed`.
    """
    sources = _compared_sources(ancestry, judged)
    wrong = {key for key, each in judged.items() if each.state == BAD}
    absorbed = _find_absorbed(wrong, sources, judged)
    gradients = wrong & {key._replace(kind=Kind.BACKWARD) for key in absorbed}
    wrong -= absorbed
    wrong -= {k for k in gradients if adds_up(k, run, reference)}
    results = [key for key in sources if key in wrong and key.kind in FINAL]
    causes = set(reach(results, lambda key: wrong.intersection(sources[key])))
    born = [key for key in judged if key in causes and not wrong.intersection(sources[key])]
    born = born or [key for key in judged if key in causes][:1]  # sources form a cycle
    worst = {key: max((judged[each].error for each in sources[key]), default=0.0) for key in born}
    clear = [key for key in born if judged[key].error > JUMP * worst[key]] or born
    first = [key for key in clear if key.step == min(each.step for each in clear)]
    births = []
    for key in first:
        right = [judged[each] for each in sources[key] if judged[each].state != BAD]
        births.append(Birth(judged[key], *_blame(key, run, reference), right))
    return _merge(births, judged)


def _compared_sources(
    sources: Mapping[Key, list[Key]], judged: Mapping[Key, Judged]
) -> dict[Key, list[Key]]:
    """Return each tensor's sources; those that were not compared are replaced by their sources."""
    compared = {key for key, each in judged.items() if each.state != UNSEEN}

    def skip(source: Key) -> Sequence[Key]:
        return () if source in compared else sources.get(source, ())

    nearest = {key: reach(sources.get(key, ()), skip) for key in judged}
    return {key: [s for s in found if s in compared and s != key] for key, found in nearest.items()}


def _find_absorbed(
    wrong: set[Key], sources: Mapping[Key, list[Key]], judged: Mapping[Key, Judged]
) -> set[Key]:
    """Return the wrong tensors of a forward whose users are all right, such as masked scores.

    The users' error must be much smaller (`ABSORBED`): a residual only dilutes an error.
    """
    users: dict[Key, list[Key]] = {}
    for key, own in sources.items():
        for source in own if key.kind in (Kind.FORWARD, Kind.LOSS) else ():
            users.setdefault(source, []).append(key)
    found: set[Key] = set()
    for key in reversed(list(sources)):  # from the loss back
        used = users.get(key, []) if key.kind == Kind.FORWARD and key in wrong else []
        left = [user for user in used if user not in found]
        most = max((judged[user].error for user in left), default=0.0)
        if used and not wrong.intersection(left) and most < judged[key].error / ABSORBED:
            found.add(key)
    return found


def _blame(key: Key, run: Run, reference: Run) -> tuple[str, list[str]]:
    """Return the direction and the modules whose code computed a tensor."""
    if key.kind in (Kind.NORM, Kind.WEIGHT):
        return UPDATE, [Kind.NORM if key.kind == Kind.NORM else "weights"]
    if key.kind == Kind.START:
        return Kind.START, [key.name.rpartition(".")[0]]
    if key.kind == Kind.DATA:
        return Kind.DATA, [key.name]
    if key.kind == Kind.LOSS:
        return Kind.FORWARD, [Kind.LOSS]
    if key.is_output:
        return Kind.FORWARD, [key.name]
    if key.kind == Kind.FORWARD:
        inside = reference.inside.get(key)
        return (Kind.DATA, [key.item]) if inside is None else (Kind.FORWARD, [inside])
    if key.kind == Kind.GRADIENT:
        return _blame_gradient(key, run, reference)
    forward = key._replace(kind=Kind.FORWARD)
    users = [
        child.name
        if child.is_output or _is_received(child, run, reference)
        else reference.inside.get(child) or ""
        for child in reference.used_by(forward, lambda name: _is_received(name, run, reference))
        if child.kind == Kind.FORWARD
    ]
    return Kind.BACKWARD, _innermost(users) or [Kind.LOSS]


def _blame_gradient(key: Key, run: Run, reference: Run) -> tuple[str, list[str]]:
    """Return the modules that add wrong terms to a gradient; none if its summation is wrong."""
    name = reference.tied(key.step).get(key.name, key.name)
    terms = [k for k in reference.held if k[:3] == (key.step, Kind.TERM, name)]
    unknown = [term.item for term in terms if term not in run.held]
    wrong = [k.item for k in terms if k in run.held and not adds_up(k, run, reference)]
    if terms and not wrong and not unknown:
        return SYNCHRONISATION, []
    return Kind.BACKWARD, wrong or unknown or [name.rpartition(".")[0]]


def _unsummed_names(key: Key, run: Run, reference: Run) -> list[str]:
    """Return the names of a tied weight if its separate gradients add up to the right one."""
    tied = reference.tied(key.step)
    first = tied.get(key.name, key.name)
    names = [first, *(other for other, same in tied.items() if same == first)]
    found = [meet(key._replace(name=name), run, reference) for name in names]
    met = [each for each in found if each is not None]
    if len(names) < 2 or len(met) < len(names):
        return []
    total = torch.stack([assemble(each.pieces, each.dims) for each in met]).sum(0)
    right = norm(total - met[0].whole) <= NEAR * norm(met[0].whole)
    return names if right else []


def _is_received(key: Key, run: Run, reference: Run) -> bool:
    """Return whether a key is a second name of a tensor in the reference, and received in `run`."""
    second = all(held.is_second_name for held in reference.held[key])
    return second and not all(held.is_second_name for held in run.held.get(key, ()))


def _innermost(names: Sequence[str]) -> list[str]:
    """Return the names of the modules that contain no other module of the list."""
    return [
        name
        for name in dict.fromkeys(names)
        if not any(other != name and (not name or other.startswith(f"{name}.")) for other in names)
    ]


def _merge(births: list[Birth], judged: Mapping[Key, Judged]) -> list[Birth]:
    """Merge births that have one cause; births in backward of several modules come last.

    Equal errors are names of one tensor. If most gradients of parameters are born wrong, although
    those of activations are right, the cause is their summation.
    """
    gradients = [birth for birth in births if birth.judged.key.kind == Kind.GRADIENT]
    every = {birth.judged.key.step for birth in gradients}
    count = sum(key.kind == Kind.GRADIENT and key.step in every for key in judged)
    if len(gradients) > max(1, MOST * count):
        for birth in gradients:
            birth.direction, birth.modules = SYNCHRONISATION, []
    found: dict[tuple[str, str, float | None], Birth] = {}
    births.sort(key=lambda b: len(b.modules) if b.direction == Kind.BACKWARD else 0)
    for birth in births:
        together = birth.direction in (Kind.START, SYNCHRONISATION, UPDATE)
        cause = birth.direction, birth.judged.key.kind, None if together else birth.judged.error
        known = found.setdefault(cause, birth)
        if known is not birth:
            known.modules = list(dict.fromkeys(known.modules + birth.modules))
            known.others.append(birth.judged)
    return list(found.values())


def explain_birth(birth: Birth, run: Run, reference: Run) -> list[str]:
    """Return sentences that describe the error of a tensor, surest first."""
    key, bound = birth.judged.key, birth.judged.bound
    met = meet(key, run, reference)
    if met is None:
        return []
    if key.kind == Kind.GRADIENT and (names := _unsummed_names(key, run, reference)):
        held = {name: run.held[key._replace(name=name)] for name in names}
        ranks = {name: {each.recording.rank for each in held[name]} for name in names}
        copies = [f"{name} on {numbered('rank', ranks[name])}" for name in names]
        return [
            f"{listed(copies)} have partial sums: the gradients of a tied weight are not summed"
        ]
    if key.kind == Kind.WEIGHT and (start := reference.held.get(key._replace(kind=Kind.START))):
        before = assemble(pieces_of(start, met.dims), met.dims)
        steps = [replace(p, tensor=p.tensor - shard_at(before, p)) for p in met.pieces]
        change = replace(met, pieces=steps, whole=met.whole - before)
        stale = ": does the optimizer hold other tensors than those that are trained?"
        return [
            f"of its change in the step {text}" + stale * (" all zeros" in text)
            for text in _explain(key, change, bound, run, norm(met.whole))
        ]
    sentences = _explain(key, met, bound, run)
    for parent in reference.parents.get(key, ()) if key.kind == Kind.LOSS else ():
        gradient, limit = parent._replace(kind=Kind.BACKWARD), max(bound, NEAR)
        back = meet(gradient, run, reference)
        if back is not None and back.error > limit:
            found = _explain(gradient, back, limit, run)
            sentences += [f"of the {gradient}, {text}" for text in found]
    return sentences


def _explain(key: Key, met: Pair, bound: float, run: Run, scale: float | None = None) -> list[str]:
    groups = run.held[key][0].recording.header["groups"].items()
    return explain(
        met.pieces,
        met.whole,
        bound,
        axes=[_plural_of(sharding) for sharding in met.dims],
        groups={name: [tuple(ranks) for ranks in found] for name, found in groups},
        scale=scale,
    )


def _plural_of(sharding: Sharding) -> str:
    """Return the plural name of a dim's indices for a sentence, such as rows; '' for no name."""
    if sharding.name in (ALIKE, GIVEN, WHOLE):
        return ""
    if " x " in sharding.name:
        return "tokens"
    return {"shares": "positions"}.get(sharding.name, sharding.name.partition(" ")[0])
