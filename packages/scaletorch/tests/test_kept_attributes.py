"""State in attributes, and other paths of later steps: as in one process, or refused."""

import pytest
import torch
from sweeps import today
from torch import nn
from torch.nn import functional as F
from training import in_one_process, on_a_layout, require_alike, sgd

from scaletorch.dist.errors import RehearsalError
from scaletorch.dist.testing import RankPool

LAYOUTS = {
    "tp 4": {"tp_size": 4},
    "cp 4": {"cp_size": 4},
    "pp 4": {"pp_size": 4},
    "dp 4": {"dp_size": 4},
    "tp 2 x cp 2": {"tp_size": 2, "cp_size": 2},
    "tp 2 x pp 2": {"tp_size": 2, "pp_size": 2},
    "tp 2 x dp 2": {"tp_size": 2, "dp_size": 2},
    "cp 2 x pp 2": {"cp_size": 2, "pp_size": 2},
    "cp 2 x dp 2": {"cp_size": 2, "dp_size": 2},
    "pp 2 x dp 2": {"pp_size": 2, "dp_size": 2},
}
PLAN = {"layers.*.up": "column", "layers.*.down": "row"}


class Layer(nn.Module):
    """Attention and two products; `scale` changes what they add, and may keep something."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def scale(self, x):
        return 1.0

    def forward(self, x):
        heads = self.norm(x).unflatten(-1, (2, 8)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(
            1, 2
        ).flatten(2)
        return x + self.down(torch.tanh(self.up(x))) * self.scale(x)


class Rebound(Layer):
    """Bind another tensor in each call."""

    def __init__(self):
        super().__init__()
        self.factor = torch.ones((), dtype=torch.float64)

    def scale(self, x):
        factor = self.factor
        if self.training:
            self.factor = factor * 1.5
        return factor


class InPlace(Rebound):
    """Change a tensor in place."""

    def scale(self, x):
        factor = self.factor.clone()
        if self.training:
            self.factor *= 1.5
        return factor


class Grows(Layer):
    """Append to a list."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def scale(self, x):
        if self.training:
            self.calls.append(1)
        return 1.0 + len(self.calls)


class Counter:
    calls = 0


class Counts(Layer):
    """Count in an object."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def scale(self, x):
        self.counter.calls += self.training
        return 1.0 + self.counter.calls


class Remembers(Layer):
    """Scale by the mean of the last call's tokens, which differs between rows and positions."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros((), dtype=torch.float64)

    def scale(self, x):
        scale = 1.0 + self.last
        if self.training:
            self.last = torch.tanh(x.detach()).square().mean()
        return scale


class Shows(Layer):
    """Keep the last call's tokens for whoever looks at them."""

    def scale(self, x):
        self.shown = x.detach()
        return 1.0


class Model(nn.Module):
    """An embedding, four layers and a head; with `wide` adds the mean over rows and positions."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, input_ids, position_ids=None, wide=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        output = self.head(x)
        return output if wide is None else output + output.mean((0, 1), keepdim=True)


class Build:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self):
        torch.manual_seed(0)
        return Model(self.layer).double()


def batches(wide_from=3):
    for step in range(3):
        drawn = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
        yield {**batch, "wide": torch.ones(8)} if step >= wide_from else batch


@pytest.fixture(scope="module")
def ranks():
    with RankPool(4, timeout=120) as pool:
        yield pool


def trained(ranks, layer, layout, **options):
    options = {"plan": PLAN, **options} if LAYOUTS[layout].get("tp_size") else options
    how = {"options": options, "rehearse": True}
    expected = in_one_process(Build(layer)(), batches(), sgd)
    for found in ranks.run(on_a_layout, Build(layer), LAYOUTS[layout], [*batches()], sgd, **how):
        require_alike(found, expected)


def refused(layout):
    options = {"plan": PLAN} if LAYOUTS[layout].get("tp_size") else {}
    how = {"options": options, "rehearse": True}
    with pytest.raises(RehearsalError, match=r"in a second step: forward keeps last from call"):
        on_a_layout(Build(Remembers), LAYOUTS[layout], [*batches()], sgd, **how)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_that_every_rank_has_alike_is_that_of_one_process(ranks, layout):
    for layer in today([Rebound, InPlace, Grows, Counts, Shows], 5):
        trained(ranks, layer, layout)


@pytest.mark.parametrize("layout", today(list(LAYOUTS), 2))
def test_a_recomputed_layer_starts_from_the_state_of_its_first_run(ranks, layout):
    for layer in today([Rebound, Grows, Counts, Shows], 4):
        trained(ranks, layer, layout, recompute=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layer_remembers_of_its_rows_is_refused_where_ranks_have_others(ranks, layout):
    if not {"dp_size", "cp_size"} & LAYOUTS[layout].keys():
        return trained(ranks, Remembers, layout)
    ranks.run(refused, layout)


def switched(layout):
    """Return an error's text, or what was found."""
    options = {"plan": PLAN} if LAYOUTS[layout].get("tp_size") else {}
    how = {"options": options, "rehearse": True}
    build = Build(Layer)
    try:
        return on_a_layout(build, LAYOUTS[layout], [*batches(wide_from=1)], sgd, **how)
    except RehearsalError as error:
        return str(error)


@pytest.mark.parametrize("layout", today(list(LAYOUTS), 2))
def test_the_first_step_with_another_entry_is_rehearsed(ranks, layout):
    expected = in_one_process(Build(Layer)(), batches(wide_from=1), sgd)
    for found in ranks.run(switched, layout):
        if {"dp_size", "cp_size"} & LAYOUTS[layout].keys():
            assert "the loss is off" in found
        else:
            require_alike(found, expected)
