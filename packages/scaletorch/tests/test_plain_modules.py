"""Plain modules at the edge of what a layout can do: as in one process, or refused on all ranks."""

import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

VOCAB, HIDDEN = 32, 16


class Base(nn.Module):
    """Attention, a nonlinear layer and a head; what is mixed before them is the subclasses'."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def top(self, x, turn=None):
        heads = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k, v = heads
        q, k = (q, k) if turn is None else (turn(q), turn(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(torch.tanh(self.mix(x + y.transpose(1, 2).flatten(2))))


class IdsOnly(Base):
    def forward(self, input_ids):
        return self.top(self.embed(input_ids))


class AnyName(Base):
    def forward(self, idx):
        return self.top(self.embed(idx))


class OwnPositions(Base):
    def __init__(self):
        super().__init__()
        self.pos = nn.Embedding(64, HIDDEN)

    def forward(self, input_ids):
        return self.top(self.embed(input_ids) + self.pos(torch.arange(input_ids.shape[1])))


class Begun(OwnPositions):
    """Positions that begin as zero, so that nothing of them shows in the first output."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.pos.weight)


class OwnAngles(Base):
    """Rotary positions of its own count, which turn queries and keys alone."""

    def forward(self, input_ids, position_ids=None):
        angles = torch.arange(input_ids.shape[1])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        cos, sin = angles.cos(), angles.sin()

        def turn(x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return self.top(self.embed(input_ids), turn)


class Offset(Base):
    """Positions begin at 2, as RoBERTa's do, unless they are given."""

    def __init__(self):
        super().__init__()
        self.pos = nn.Embedding(64, HIDDEN)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(2, input_ids.shape[1] + 2)
        return self.top(self.embed(input_ids) + self.pos(position_ids))


class Conv(Base):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)

    def mixed(self, x, before=2):
        return self.conv(F.pad(x.transpose(1, 2), (before, 2 - before))).transpose(1, 2)

    def forward(self, input_ids, position_ids=None):
        return self.top(self.mixed(self.embed(input_ids)))


class LateConv(Conv):
    def forward(self, input_ids):
        return self.top(self.mixed(self.embed(input_ids), 0))


class ScaledConv(Conv):
    """A branch of layer scale 1e-6."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 1e-6))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.top(x + self.scale * self.mixed(x))


class ZeroConv(Conv):
    """A branch whose projection begins as zero."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.top(x + self.out(self.mixed(x)))


class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, input_ids):
        return self.top(self.rnn(self.embed(input_ids))[0])


class Backwards(Base):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(HIDDEN, HIDDEN // 2, batch_first=True, bidirectional=True)

    def forward(self, input_ids):
        return self.top(self.rnn(self.embed(input_ids))[0])


def functional(mix):
    """Return a model that mixes positions by a function."""

    class Functional(Base):
        def forward(self, input_ids):
            return self.top(mix(self.embed(input_ids)))

    return Functional


class Gated(Base):
    """What is kept of each position is decided by the largest of all."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.top(x * x.amax(1, keepdim=True).sigmoid())


class Norm(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, input_ids):
        return self.top(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))


class FrozenNorm(Norm):
    def __init__(self):
        super().__init__()
        self.norm.eval()


class Averages(Base):
    """Follows the mean of what it sees, as running statistics do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.top(x - self.mean)


class Counter(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids):
        if self.training:
            self.calls += 1
        return self.top(self.embed(input_ids)) / self.calls.clamp(min=1)


class Cache(Base):
    """Makes a table anew when it is short: the same one on every rank, however often."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, input_ids):
        if len(self.table) < 40:
            self.register_buffer("table", torch.ones(40), persistent=False)
        return self.top(self.embed(input_ids)) * self.table[0]


class Noisy(Base):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.top(x + 1e-2 * torch.randn_like(x))


class Tuple(Base):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.top(x), x.square().mean()


def global_batch(**others):
    tokens = torch.randint(VOCAB, (8, 17), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[:2, 5:] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels, **others}


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def reference(kind, batch):
    model = build(kind)
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}
    logits = model(inputs.pop("input_ids"), **inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    return (
        loss.item(),
        {n: p.grad for n, p in model.named_parameters()},
        dict(model.named_buffers()),
    )


def worst_error(found, expected):
    """Return the largest difference; a model without buffers has none there."""
    errors = [relative_error(found[name], tensor) for name, tensor in expected.items()]
    return worst(errors) if errors else 0.0


def step(kind, batch, sizes, micro_batches, options):
    """Return how far loss, gradients and buffers of one step are from one process's."""
    manager = setup_process_group_manager(**sizes)
    try:
        model = parallelize(build(kind), manager, **options)
        loss = train_step(model, shard_global_batch(batch, micro_batches, manager), manager)
        expected, gradients, buffers = reference(kind, batch)
        errors = (
            abs(loss.item() - expected) / expected,
            worst_error(full_gradients(model, manager), gradients),
            worst_error(dict(model.named_buffers()), buffers),
        )
        return worst(errors)
    except ScaletorchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_process_group_manager()


def steps(cases):
    found = []
    for kind, sizes, micro_batches, *rest in cases:
        others, options = (*rest, {}, {})[:2]
        found.append(step(KINDS[kind], global_batch(**others), sizes, micro_batches, options))
    return found


KINDS = {
    "flip": functional(lambda x: x + x.flip(1)),
    "cumsum": functional(lambda x: x.cumsum(1)),
    "roll": functional(lambda x: x + x.roll(1, 1)),
    "mean": functional(lambda x: x + x.mean(1, keepdim=True)),
    "blocks": functional(lambda x: x + x.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)),
}
KINDS |= {
    kind.__name__: kind
    for kind in (IdsOnly, AnyName, OwnPositions, Begun, OwnAngles, Offset, Conv, LateConv,
                 ScaledConv, ZeroConv, Recurrent, Backwards, Gated, Norm, FrozenNorm, Averages,
                 Counter, Cache, Noisy, Tuple)
}  # fmt: skip

ONE, DP, CP = {}, {"dp_size": 2}, {"cp_size": 2}
RIGHT = [
    *[(kind, DP, 2) for kind in ("IdsOnly", "AnyName", "OwnPositions", "Offset", "Conv", "cumsum")],
    ("IdsOnly", CP, 2),
    ("blocks", CP, 1),  # whose borders are also those of the ranks' shares
    ("flip", CP, 1),  # each share is another's, or its own, turned around
    ("AnyName", CP, 1),
    ("FrozenNorm", CP, 2),
    ("Cache", CP, 2),
    ("Cache", DP, 2),
    ("Norm", DP, 1),
    ("Offset", CP, 1, {"position_ids": torch.arange(2, 18).expand(8, 16)}),
]
MIXING = "Conv LateConv ScaledConv ZeroConv Recurrent Backwards Gated cumsum roll mean"
FOUND = "computes something else on .* than in one process: .* is off by .*"
REFUSED = [
    *[((kind, CP, 1), FOUND + "computes a position from others") for kind in MIXING.split()],
    *[
        ((kind, CP, 1), FOUND + "cp divides positions: .* read the forward's argument position_ids")
        for kind in ("OwnPositions", "Begun", "OwnAngles")
    ],
    (("Conv", CP, 1), r"module conv \(Conv1d\) computes a position from others"),
    (("Recurrent", CP, 1), r"module rnn \(GRU\) computes"),
    (("cumsum", CP, 1), r"what module qkv \(Linear\) is given computes"),
    (("Offset", CP, 1), FOUND + "do not begin at 0 have to be in the batch as position_ids"),
    (("Norm", DP, 2), r"module norm \(BatchNorm1d\) takes statistics of all rows .* one micro-b"),
    (("Norm", CP, 1), r"module norm \(BatchNorm1d\) .* cp_size=2 divides"),
    (("Norm", DP, 1, {}, {"recompute": True}), "module norm .* recompute=True runs"),
    (("Averages", DP, 1), "forward changes buffer mean by what it sees, and ranks of other rows"),
    (("Averages", CP, 1), "forward changes buffer mean by what it sees"),
    (("Counter", DP, 2), "changes buffer calls each time that it runs, and 2 micro-batches run"),
    (("IdsOnly", DP, 1, {"position_ids": torch.arange(16).expand(8, 16)}), "IdsOnly takes no arg"),
    (("IdsOnly", DP, 1, {"weights": torch.ones(8, 16)}), "has weights, and the forward of IdsOnly"),
    (("Tuple", DP, 1), r"returned a tuple of a tensor \[\d, 16, 32\], a tensor \[\]"),
]


def test_what_no_layout_changes_trains_as_one_process():
    for found in run_ranks(steps, 2, RIGHT, timeout=200):
        for case, error in zip(RIGHT, found, strict=True):
            assert not isinstance(error, str), (case, error)
            assert error < 1e-12, (case, error)


def test_several_micro_batches_of_one_process_are_one_batch():
    cases = [("IdsOnly", ONE, 2), ("Offset", ONE, 2), ("OwnPositions", ONE, 2), ("Norm", ONE, 1)]
    assert all(isinstance(error, float) and error < 1e-12 for error in steps(cases))
    (refused,) = steps([("Norm", ONE, 2)])
    assert "2 micro-batches would each have their own" in refused


def test_what_a_layout_would_change_is_refused_on_every_rank():
    results = run_ranks(steps, 2, [case for case, _ in REFUSED], timeout=200)
    for rank, found in enumerate(results):
        for (case, match), said in zip(REFUSED, found, strict=True):
            assert isinstance(said, str), (rank, case, said)
            assert re.search(match, said, re.DOTALL), (rank, case, said)


class Layer(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1) if conv else None

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + (y if self.conv is None else self.conv(y.mT).mT)


class Deep(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(conv and index == 1) for index in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixed_layouts():
    return [
        step(partial(Deep, conv), global_batch(), sizes, 2, {})
        for sizes in ({"pp_size": 2, "cp_size": 2}, {"dp_size": 2, "cp_size": 2})
        for conv in (False, True)
    ]


def test_a_stage_that_mixes_is_refused_on_all_stages_and_rows():
    for right, wrong, also_right, also_wrong in run_ranks(mixed_layouts, 4, timeout=200):
        assert right < 1e-12
        assert also_right < 1e-12
        assert re.search(r"output of layers\.1 is off by .*cp divides positions", wrong)
        assert "module layers.1.conv (Conv1d) computes a position from others" in also_wrong


class Dropping(IdsOnly):
    """Draws in training alone, and is nearly zero in one place and zero in another."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.mix.bias)
        with torch.no_grad():
            self.head.bias.mul_(1e-5)
        self.register_buffer("table", torch.ones(3))
        self.mix.eval()

    def forward(self, input_ids):
        return super().forward(input_ids) * (1 if self.training else self.table.mul_(2)[0])


def leave_alone():
    """Compare all that looking at a model might leave behind."""
    manager = setup_process_group_manager(cp_size=2)
    torch.manual_seed(0)
    model = parallelize(Dropping(), manager)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    train_step(model, shard_global_batch(global_batch(), 1, manager), manager)
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [m.training for m in model.modules()]
    for name, x in model.state_dict().items():
        assert torch.equal(before[name], x), name
    destroy_process_group_manager()


def test_looking_at_a_model_leaves_it_as_it_was():
    run_ranks(leave_alone, 2)


def within_blocks(size):
    """Return a model that mixes within blocks of so many positions alone, the last one padded."""

    def mix(x):
        blocks = F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
        return x + blocks.mean(2).repeat_interleave(size, 1)[:, : x.shape[1]]

    return functional(mix)


FITTING = [(2, 8), (2, 16), (3, 12)]  # within the ranks' shares
BLOCKS = [*FITTING, (3, 40), (5, 22), (9, 40)]  # of so many positions, and length


def blocks():
    found = []
    for size, length in BLOCKS:
        batch = {name: entry.repeat(1, 3)[:, :length] for name, entry in global_batch().items()}
        found.append(step(within_blocks(size), batch, CP, 1, {}))
    return found


def test_what_mixes_within_blocks_is_refused_if_blocks_are_divided():
    for found in run_ranks(blocks, 2, timeout=200):
        for case, said in zip(BLOCKS, found, strict=True):
            if case in FITTING:
                assert said < 1e-12, (case, said)
            else:
                assert re.search(FOUND, str(said)), (case, said)
