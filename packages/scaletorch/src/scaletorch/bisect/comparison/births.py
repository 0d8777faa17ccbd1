"""Births of faults: wrong tensors whose sources are all right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...compose.naming import listed
from ..keys import (
    BACKWARD,
    DATA,
    FINAL,
    FORWARD,
    GRADIENT,
    LOSS,
    NORM,
    SHARE,
    START,
    TERM,
    WEIGHT,
    Key,
)
from .judge import BAD, NEAR, UNSEEN, Judged, Met, adds_up, meet
from .patterns import explain
from .places import ALIKE, GIVEN, WHOLE, Sharding, assemble, part_of, pieces_of
from .runs import Run
from .wrong_shards import numbered

JUMP = 8.0  # largest factor by which a computation may amplify its sources' error
ABSORBED = 1e3  # an error this many times its users' errors does not reach these users
SYNCHRONISATION, UPDATE = "synchronisation", "update"
MOST = 0.5  # if more than this share of gradients is born wrong, no module is the cause


@dataclass(slots=True)
class Birth:
    """A wrong tensor whose sources are all right."""

    judged: Judged  # the verdict on it
    direction: str  # START, FORWARD, BACKWARD, SYNCHRONISATION of gradients, UPDATE or DATA
    modules: list[str]  # the innermost modules whose code computed it
    inputs: list[Judged]  # the verdicts on the tensors that it was computed from
    # further tensors that were born wrong in the same way
    others: list[Judged] = field(default_factory=list)


def find_births(
    judged: Mapping[Key, Judged], run: Run, reference: Run, ancestry: Mapping[Key, list[Key]]
) -> list[Birth]:
    """Return the tensors at which faults begin, in the first step that has any, in its order.

    Intended differences, such as terms before ranks sum them, are not births: there are none if all
    results of the training are right. See also `_absorbed`.
    """
    sources = _seen_sources(ancestry, judged)
    wrong = {key for key, each in judged.items() if each.state == BAD}
    intended = _absorbed(wrong, sources, judged)
    for key in [k for each in intended if (k := each._replace(kind=BACKWARD)) in wrong]:
        if adds_up(run.held[key], reference.held[key], NEAR):
            intended.add(key)
    wrong -= intended
    mattering = _mattering(sources, wrong)
    born = [key for key in judged if key in mattering and not wrong.intersection(sources[key])]
    born = born or [key for key in judged if key in mattering][:1]  # sources form a cycle
    worst = {key: max((judged[each].error for each in sources[key]), default=0.0) for key in born}
    clear = [key for key in born if judged[key].error > JUMP * worst[key]] or born
    first = [key for key in clear if key.step == min(each.step for each in clear)]
    births = []
    for key in first:
        agreeing = [judged[each] for each in sources[key] if judged[each].state != BAD]
        births.append(Birth(judged[key], *_blame(key, run, reference), agreeing))
    return _gathered(births, judged)


def _seen_sources(
    sources: Mapping[Key, list[Key]], judged: Mapping[Key, Judged]
) -> dict[Key, list[Key]]:
    """Return each tensor's sources; those that were not compared are replaced by their sources."""
    found: dict[Key, list[Key]] = {}
    for key in judged:
        waiting, visited, found[key] = list(sources.get(key, ())), {key}, []
        for source in waiting:  # grows during the loop
            if source in visited:
                continue
            visited.add(source)
            if source in judged and judged[source].state != UNSEEN:
                found[key].append(source)
            else:
                waiting += sources.get(source, ())
    return found


def _absorbed(
    wrong: set[Key], sources: Mapping[Key, list[Key]], judged: Mapping[Key, Judged]
) -> set[Key]:
    """Return the wrong tensors of a forward whose users are all right, such as masked scores.

    The users' error must be much smaller (`ABSORBED`): a residual only dilutes an error.
    """
    users: dict[Key, list[Key]] = {}
    for key, own in sources.items():
        for source in own if key.kind in (FORWARD, LOSS) else ():
            users.setdefault(source, []).append(key)
    found: set[Key] = set()
    for key in reversed(list(sources)):  # from the loss back
        used = users.get(key, []) if key.kind == FORWARD and key in wrong else []
        left = [user for user in used if user not in found]
        most = max((judged[user].error for user in left), default=0.0)
        if used and not wrong.intersection(left) and most < judged[key].error / ABSORBED:
            found.add(key)
    return found


def _mattering(sources: Mapping[Key, list[Key]], wrong: set[Key]) -> set[Key]:
    """Return the wrong tensors that make a result of the training wrong."""
    waiting = [key for key in sources if key in wrong and key.kind in FINAL]
    found = set(waiting)
    while waiting:
        for source in sources[waiting.pop()]:
            if source in wrong and source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _blame(key: Key, run: Run, reference: Run) -> tuple[str, list[str]]:
    """Return the direction and the modules whose code computed a tensor."""
    if key.kind in (NORM, WEIGHT):
        return UPDATE, [NORM if key.kind == NORM else "weights"]
    if key.kind == START:
        return START, [key.name.rpartition(".")[0]]
    if key.kind == DATA:
        return DATA, [key.name]
    if key.kind == LOSS:
        return FORWARD, [LOSS]
    if key.kind == FORWARD:
        if key.item.startswith("out"):
            return FORWARD, [key.name]
        inside = reference.inside.get(key)
        return (DATA, [key.item]) if inside is None else (FORWARD, [inside])
    if key.kind == GRADIENT:
        return _blame_gradient(key, run, reference)
    forward = key._replace(kind=FORWARD)
    if wrong := _wrong_shares(reference.first.get(forward, forward), run, reference):
        return BACKWARD, _innermost(wrong)
    users = [
        child.name
        if child.item.startswith("out") or _travels(child, run, reference)
        else reference.inside.get(child) or ""
        for child in reference.used_by(forward, lambda name: _travels(name, run, reference))
        if child.kind == FORWARD
    ]
    return BACKWARD, _innermost(users) or [LOSS]


def _blame_gradient(key: Key, run: Run, reference: Run) -> tuple[str, list[str]]:
    """Return the modules that add wrong terms to a gradient; none if its summation is wrong."""
    tied = reference.steps[key.step][0].header["tied"]
    name = tied.get(key.name, key.name)
    terms = [k for k in reference.held if k[:3] == (key.step, TERM, name)]
    unknown = [term.item for term in terms if term not in run.held]
    wrong = [
        term.item
        for term in terms
        if term in run.held and not adds_up(run.held[term], reference.held[term], NEAR)
    ]
    if terms and not wrong and (not unknown or _untied(key, run, reference)):
        return SYNCHRONISATION, []
    return BACKWARD, wrong or unknown or [name.rpartition(".")[0]]


def _untied(key: Key, run: Run, reference: Run) -> list[str]:
    """Return the names of a tied weight if its separate gradients add up to the right one."""
    tied = reference.steps[key.step][0].header["tied"]
    first = tied.get(key.name, key.name)
    names = [first, *(other for other, same in tied.items() if same == first)]
    held = [run.held.get(key._replace(name=name), []) for name in names]
    if len(names) < 2 or not all(held):
        return []
    met = [meet(each, reference.held[key]) for each in held]
    if any(each is None for each in met):
        return []
    total = torch.stack([assemble(each.pieces, each.dims) for each in met if each]).sum(0)
    whole = met[0].whole if met[0] else total
    off = float(torch.linalg.vector_norm(total - whole))
    return names if off <= NEAR * float(torch.linalg.vector_norm(whole)) else []


def _travels(key: Key, run: Run, reference: Run) -> bool:
    """Return whether a key is a second name of a tensor in the reference, and received in `run`."""
    return all(h.recording.lines[h.number].same >= 0 for h in reference.held[key]) and any(
        held.recording.lines[held.number].same < 0 for held in run.held.get(key, ())
    )


def _wrong_shares(first: Key, run: Run, reference: Run) -> list[str]:
    """Return the modules that add a wrong share to the gradient of a tensor with several users."""
    names = {k[2:] for k in (first, *(k for k, f in reference.first.items() if f == first))}
    shares = [
        key
        for key in reference.held
        if key[:2] == (first.step, SHARE)
        and (key.name, key.item.partition(" ")[0], key.call) in names
    ]
    if len(shares) < 2 or not all(key in run.held for key in shares):
        return []
    return [
        key.item.partition(" ")[2]
        for key in shares
        if not adds_up(run.held[key], reference.held[key], NEAR)
    ]


def _innermost(names: Sequence[str]) -> list[str]:
    """Return the names of the modules that contain no other module of the list."""
    return [
        name
        for name in dict.fromkeys(names)
        if not any(other != name and (not name or other.startswith(f"{name}.")) for other in names)
    ]


def _gathered(births: list[Birth], judged: Mapping[Key, Judged]) -> list[Birth]:
    """Merge births that have one cause; births in backward of several modules come last.

    Equal errors are names of one tensor. If most gradients of parameters are born wrong, although
    those of activations are right, the cause is their summation.
    """
    step = births[0].judged.key.step if births else 0
    every = sum(key.kind == GRADIENT and key.step == step for key in judged)
    if sum(b.judged.key.kind == GRADIENT for b in births) > max(1, MOST * every):
        for birth in births:
            if birth.judged.key.kind == GRADIENT:
                birth.direction, birth.modules = SYNCHRONISATION, []
    found: dict[tuple[str, str, float | None], Birth] = {}
    for birth in sorted(births, key=lambda b: len(b.modules) if b.direction == BACKWARD else 0):
        kind = birth.judged.key.kind
        together = birth.direction in (START, SYNCHRONISATION, UPDATE)
        known = found.setdefault(
            (birth.direction, kind, None if together else birth.judged.error), birth
        )
        if known is not birth:
            known.modules = list(dict.fromkeys(known.modules + birth.modules))
            known.others.append(birth.judged)
    return list(found.values())


# Explanations


def explain_birth(birth: Birth, run: Run, reference: Run) -> list[str]:
    """Return sentences that describe the error of a tensor, surest first."""
    key, bound = birth.judged.key, birth.judged.bound
    met = _meet_key(key, run, reference)
    if met is None:
        return []
    if key.kind == GRADIENT and (names := _untied(key, run, reference)):
        held = {name: run.held[key._replace(name=name)] for name in names}
        ranks = {name: {each.recording.rank for each in held[name]} for name in names}
        copies = [f"{name} on {numbered('rank', ranks[name])}" for name in names]
        return [
            f"{listed(copies)} have partial sums: the gradients of a tied weight are not summed"
        ]
    if key.kind == WEIGHT and (start := reference.held.get(key._replace(kind=START))):
        before = assemble(pieces_of(start, met.dims), met.dims)
        steps = [replace(p, tensor=p.tensor - part_of(before, p)) for p in met.pieces]
        size = float(torch.linalg.vector_norm(met.whole))
        change = replace(met, pieces=steps, whole=met.whole - before)
        sentences = _explain(key, change, bound, run, size)
        stale = ": does the optimizer hold other tensors than those that are trained?"
        return [
            f"of its change in the step {text}" + stale * (" all zeros" in text)
            for text in sentences
        ]
    sentences = _explain(key, met, bound, run)
    for parent in reference.parents.get(key, ()) if key.kind == LOSS else ():
        gradient, limit = parent._replace(kind=BACKWARD), max(bound, NEAR)
        back = _meet_key(gradient, run, reference)
        if back is not None and back.error > limit:
            found = _explain(gradient, back, limit, run)
            sentences += [f"of the {gradient}, {text}" for text in found]
    return sentences


def _meet_key(key: Key, run: Run, reference: Run) -> Met | None:
    ours, theirs = run.held.get(key), reference.held.get(key)
    return meet(ours, theirs, weighed=key.kind == BACKWARD) if ours and theirs else None


def _explain(key: Key, met: Met, bound: float, run: Run, scale: float | None = None) -> list[str]:
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
