"""Bytes on the ranks of a layout, in closed form from what a description says of each block.

A rank holds parameters, gradients and the optimizer's state, what autograd keeps of the
micro-batches that are alive, what the block that needs the most takes beside that while it runs,
gradient buckets on their way, and messages between stages. Real ranks are within 3 % of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import mul
from typing import NamedTuple

from .description import Behaviour, Description
from .estimate import Memory
from .known import Group, Known, Optimizer
from .layout import Layout
from .stages import SPLIT, Moment, Runs, alive

IN_FLIGHT = 8  # sends under way, as the pipeline's runtime has it, which needs torch
OPEN = 3  # buckets that a backward fills with ZeRO 2 before the first has left
GATHERED = 4  # layers that are whole with ZeRO 3: one that runs, the next, and gradients of two


class State(NamedTuple):
    """Bytes of a rank's parameters and of what goes with them.

    Attributes:
        parameters: Its shards.
        gradients: Where they are summed, from step to step.
        optimizer: The optimizer's state, and master weights.
        brought: Gradients or shards of them that the first backward makes.
        again: Shards that each later backward makes beside these.
        last: Shards that the last backward alone makes.
        start: What is whole of buckets or of parameters when a backward begins.
        inside: The same while its layers run.
        bucket: Of a bucket of these gradients.
        pair: Of the last two buckets, if they are no part of `gradients`.
        ending: Of what is received for the last two buckets.
        whole: Of all that come in buckets.
        opened: Of those with several tensors, which the first of their gradients opens.
        ties: Gradients of tied weights that other stages send when a step ends.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    brought: int = 0
    again: int = 0
    last: int = 0
    start: int = 0
    inside: int = 0
    bucket: int = 0
    whole: int = 0
    opened: int = 0
    pair: int = 0
    ending: int = 0
    ties: int = 0


def state(known: Known, layout: Layout, number: int) -> State:
    """Return what a rank keeps of parameters, gradients and the optimizer's state.

    Args:
        known: Of the description.
        layout: The layout.
        number: Of `known.numbers(layout)`.
    """
    grid, zero = layout.grid, layout.zero
    rounds = min(layout.micro_batches, 2) if zero == 2 else 0
    split = zero == 2 and layout.schedule in SPLIT
    key = "state", grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, number, zero, rounds, split

    def work_out() -> State:
        each = [
            _state(known, layout, group, grid.edp if group.axis == "edp" else grid.cp * grid.dp)
            for group in known.groups(layout, number)
        ]
        return State(*map(sum, zip(*each, strict=True)))

    return known.once(key, work_out)


def _state(known: Known, layout: Layout, group: Group, ranks: int) -> State:
    """Return what there is of parameters that are summed over so many ranks."""
    optimizer, item, zero = known.optimizer, group.item, layout.zero
    sums, whole = optimizer.sum_item or item, group.elements
    early = known.description.early
    if not zero or group.others:
        # Sums of another dtype are kept beside the gradients that the optimizer takes.
        gradients = whole * (item if sums == item else item + sums)
        gradients += whole * item * (group.others > 0 and sums == item and ranks > 1)
        states = whole * optimizer.moments * (optimizer.item or item)
        states += optimizer.per_tensor * group.tensors
        summed = layout.grid.cp * layout.grid.dp > 1 or ranks > 1
        stays = summed or bool(optimizer.sum_item) or not early
        return State(
            whole * item, gradients * stays, states, gradients * (not stays),
            ties=whole * item * group.others,
        )  # fmt: skip
    own = -(-whole // ranks)
    master = item if zero == 3 else max(item, 4)
    states = own * optimizer.moments * (optimizer.item or master)
    states += own * master * (master != item)
    states += optimizer.per_tensor * (group.tensors if zero == 3 else -(-group.tensors // ranks))
    if zero == 3:
        layer, rest = group.layer * item, group.rest * item
        return State(
            own * item, own * item * (not early), states, own * item * early,
            start=rest + layer, inside=rest + GATHERED * layer,
        )  # fmt: skip
    bucket, pair, coming, ending = group.bucket * sums, 0, 0, 0
    if ranks > 1:  # received into memory of a shard, or of a bucket where sums are made here
        part = 1 if not optimizer.native or sums == 2 else ranks
        pair = group.in_a_row(2) * sums
        coming, ending = bucket // part, pair // part
    if zero == 1 and not early:  # other programs have shards from the start
        return State(whole * item, whole * sums + own * master, states)
    if zero == 1:
        return State(whole * item, whole * sums, states, last=own * master, inside=coming,
                     bucket=bucket, ending=ending, whole=whole * sums)  # fmt: skip
    shards = own * master * (2 if layout.schedule in SPLIT and ranks > 1 else 1)
    return State(
        whole * item, 0, states, shards, own * master,
        inside=group.in_a_row(OPEN) * sums + coming,
        bucket=bucket, pair=pair, ending=ending, whole=whole * sums,
        opened=whole * sums if group.largest <= group.usual else 0,
    )  # fmt: skip


class Chunk(NamedTuple):
    """Bytes of a chunk of blocks for a micro-batch.

    Attributes:
        kept: What autograd keeps until backward.
        left: What the first half of a backward leaves for the second.
        working: By the kind of an action, what the block that needs the most takes while it runs,
            above what is kept.
        inside: The same of layers alone, backward.
        tail: What the first layer needs in backward, when nothing else is kept.
        ahead: Share of the rank's parameters whose gradients have not come by then.
    """

    kept: int
    left: int
    working: dict[str, int]
    inside: int
    tail: int
    ahead: float


def memory(
    description: Description,
    layout: Layout,
    optimizer: Optimizer | None = None,
    *,
    known: Known | None = None,
) -> tuple[Memory, ...]:
    """Return the bytes of the fullest rank at each place of the pipeline.

    Args:
        description: The model.
        layout: The layout; with `zero` 3 as `fully_shard` of torch has it, a block at a time.
        optimizer: What is kept for each parameter.
        known: Of the same description and optimizer, to work out nothing twice.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    own = known or Known(description, optimizer)
    return tuple(
        _fullest(own, layout, number, rank) for rank, number in enumerate(own.numbers(layout))
    )


def peak(known: Known, layout: Layout, room: int | None = None) -> int:
    """Return the largest total of `memory`; of one above `room` something above it, sooner."""
    found = 0
    for number, rank in known.ends(layout):
        own = state(known, layout, number)
        still = own.parameters + own.gradients + own.optimizer
        if room is not None and still > room:
            return still
        for parts in _parts(known, layout, number, rank):
            found = max(found, still + sum(parts))
            if room is not None and found > room:
                return found
    return found


def before(known: Known, layout: Layout) -> int:
    """Return the most that a rank holds before a step begins."""
    each = (state(known, layout, number) for number in {*known.numbers(layout)})
    return max(own.parameters + own.gradients + own.optimizer for own in each)


def _fullest(known: Known, layout: Layout, number: int, rank: int) -> Memory:
    """Return what a rank holds at the moment at which that is the most."""
    own = state(known, layout, number)
    gradients, *rest = max(_parts(known, layout, number, rank), key=sum)
    return Memory(own.parameters, own.gradients + gradients, own.optimizer, *rest)


def _parts(
    known: Known, layout: Layout, number: int, rank: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield gradients, activations, working memory and buffers when they may be the most.

    In a backward activations go as fast as gradients come: the most is there when it begins, when
    as many buckets are open as it fills at a time, or when it ends. On 22 layouts of ranks with
    ZeRO each of these moments, `ahead` and `filled` made 2 to 7 % of some peak.
    """
    own, chunks = state(known, layout, number), chunks_of(known, layout, number)
    kept, left = [chunk.kept for chunk in chunks], [chunk.left for chunk in chunks]
    # A bucket leaves when it is full, and by then as large a share of activations has gone.
    share = own.bucket / own.whole if own.whole else 0.0
    open_ = min(1.0, share * (1 if own.last else OPEN - 1))
    # A layer that runs again fills a bucket as what it takes goes.
    filled = own.bucket if layout.recompute == "full" else 0
    for moment in alive(layout, rank):
        chunk, count = chunks[moment.chunk], len(chunks)
        activations = sum(map(mul, moment.whole, kept)) + sum(map(mul, moment.halves, left))
        messages = _messages(known, layout, number, moment)
        brought = own.brought * moment.begun // count
        yield brought, activations, chunk.working[moment.kind], messages + own.start
        if moment.kind == "I" and own.opened:
            # Gradients of norms have come, so that all buckets wait for those of linear layers.
            rest = activations - chunk.kept + chunk.left
            yield brought, rest, 0, messages + own.opened // count + own.ending
            continue
        if own.last and count > 1:  # what the other chunks had is sent when the step ends
            continue
        if own.last:  # of the last backward, when no other micro-batch is alive
            activations, coming = chunk.kept, own.last
        elif own.inside or own.brought:
            coming = (own.again if moment.begun else own.brought) // count
        else:
            continue
        before = own.brought * min(moment.begun + 1, count) // count if moment.begun else 0
        for gone, works, base, late in (
            (open_, chunk.inside, brought, open_),
            (1.0, chunk.tail, before, share + chunk.ahead),
        ):
            come = round(coming * max(0.0, gone - late))
            rest = max(0, activations - round(chunk.kept * gone) + min(0, works))
            opened = max(0, own.inside - min(filled, max(0, works)))
            yield base + come, rest, max(0, works), messages + opened
    # The last two buckets come while the shards of all before them are there.
    before, coming = (own.brought, own.again) if layout.micro_batches > 1 else (0, own.brought)
    if own.ending and (own.last or layout.schedule not in SPLIT):
        yield before + round((coming + own.last) * (1 - share)), 0, 0, own.pair + own.ending
    yield own.brought + own.last, 0, 0, own.ties


def _messages(known: Known, layout: Layout, number: int, moment: Moment) -> int:
    """Return the bytes of messages between stages.

    What was sent on stays until its backward, in this library's runtime beside the latest
    `IN_FLIGHT` messages and the one that has come; in another program there is one that has come,
    and one on its way.
    """
    if layout.grid.pp == 1:
        return 0
    content = known.content(number)
    ways = (content.sent > 0) + (content.received > 0)
    if not ways:
        return 0
    size, alive_ = known.handed(layout), sum(moment.whole)
    passed = round(alive_ * content.sent / len(content.chunks))
    if layout.recompute == "offload":  # what has come is kept here, too
        passed += round(alive_ * content.received / len(content.chunks))
    if not known.description.early:
        return (passed + ways) * size
    done = layout.micro_batches * len(content.chunks) - alive_
    back = min(IN_FLIGHT // ways, done) if content.received else 0
    forward = max(0, min(IN_FLIGHT // ways, done + passed) - passed) if content.sent else 0
    return (passed + back + forward + 1) * size


def chunks_of(known: Known, layout: Layout, number: int) -> list[Chunk]:
    """Return what the chunks of a rank keep of a micro-batch and need to run."""
    split = layout.schedule in SPLIT
    way = layout.cut, layout.recompute, layout.micro_rows, split

    def work_out() -> list[Chunk]:
        content, behaviours = known.content(number), known.description.behaviours(layout.cut)
        all_ = sum(_elements(behaviours[kind]) * n for kind, n in content.kinds.items()) or 1
        found = [
            known.once(("chunk", *way, runs), partial(_chunk, known, layout, runs, split=split))
            for runs in content.chunks
        ]
        return [own._replace(ahead=own.ahead / all_) for own in found]

    return known.once(("chunks", *way, number), work_out)


def _chunk(known: Known, layout: Layout, runs: Runs, *, split: bool) -> Chunk:
    """Return a chunk's bytes.

    While a block runs, those behind it keep nothing yet, or no more, but for what the first half of
    a backward leaves, and the gradient of its output.
    """
    rows = layout.micro_rows
    behaviours = known.description.behaviours(layout.cut)
    shared = left = under = 0.0
    forwards: list[float] = []
    backwards: list[tuple[float, float, bool]] = []  # bytes, what is left behind, of a layer
    gradients = [behaviours[kind].entered.at(rows) for kind, _ in runs[1:]] + [0.0]
    for (kind, times), gradient in zip(runs, gradients, strict=True):
        own, layer = behaviours[kind], kind in known.layers
        entered, again, keeps = own.entered.at(rows), 0.0, own.kept.at(rows)
        if layer and layout.recompute == "full":
            keeps, again = entered, max(0.0, keeps - entered)
        elif layer and layout.recompute == "offload":
            keeps = 0.0
        if layout.recompute != "offload":
            shared = max(shared, own.shared.at(rows))
        leaves, needs = own.left.at(rows) * split, own.backward_peak.at(rows) + again
        # Of equal blocks the last has the most before it, and the first the most behind it.
        first = under + keeps + needs + (entered if times > 1 else gradient)
        under += keeps * times
        forwards.append(under + own.forward_peak.at(rows))
        backwards.append((first, left + leaves, layer))
        backwards.append((under + needs + gradient, left + leaves * times, layer))
        left += leaves * times
    plain = [needs for needs, _, _ in backwards]
    inside = [needs for needs, _, layer in backwards if layer] or plain
    most = {
        "F": max(forwards), "B": max(plain),
        "I": max(needs + left - here for needs, here, _ in backwards),
    }  # fmt: skip
    most["FB"] = max(most["F"], most["B"])
    working = {kind: max(0, round(needs - under)) for kind, needs in most.items()}
    first = next((at for at, (kind, _) in enumerate(runs) if kind in known.layers), 0)
    early = [*runs[:first], (runs[first][0], 1)]
    ahead = sum(_elements(behaviours[kind]) * times for kind, times in early)
    return Chunk(
        round(under + shared), round(left), working, round(max(inside) - under), round(inside[0]),
        ahead,
    )  # fmt: skip


def _elements(behaviour: Behaviour) -> int:
    return sum(each.local for each in behaviour.parameters)
