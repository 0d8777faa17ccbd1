"""Layers that run in a loop stay on one stage, and lists that are visited in step are cut alike."""

import copy
import textwrap

import pytest
import torch
from one_process import build, serial
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    StageError,
    infer_split,
    layers_of,
    measure_costs,
    pipeline_forward,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.splitting.call_order import loop_around
from scaletorch.parallel.pipeline_parallel.splitting.loops import units_of
from scaletorch.parallel.pipeline_parallel.splitting.split import place
from scaletorch.parallel.pipeline_parallel.stages.visits import visits_of

WIDTH, VOCAB, LENGTH = 8, 13, 6


class Net(nn.Module):
    def __init__(self, count=5):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)
        )
        self.head = nn.Linear(WIDTH, VOCAB)
        self.forwards = [0]

    def forward(self, input_ids):
        return self.head(self.run(self.embed(input_ids)))


class Looped(Net):
    """Its second and third layer run three times, each on what the first has returned too."""

    def run(self, x):
        self.forwards[0] += 1
        first = x = self.layers[0](x)
        for _ in range(self.times(x)):
            x = 0.5 * x + first
            for layer in self.layers[1:3]:
                x = layer(x)
        for layer in self.layers[3:]:
            x = layer(x)
        return x

    def times(self, x):
        return 3


class OfLength(Looped):
    """How often its layers run differs by micro-batch."""

    def times(self, x):
        return 1 + x.shape[1] % 3


class AllLooped(Net):
    def run(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class Nested(nn.Module):
    """A module that runs several times, with a list of layers inside."""

    def __init__(self):
        super().__init__()
        self.inner = AllLooped(2)

    def forward(self, ids):
        for _ in range(2):
            x = self.inner(ids)
        return x


class InStep(Net):
    """Attentions, MLPs and their norms in lists of their own, registered in another order."""

    def __init__(self, count=4):
        super().__init__(count)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.begin, self.end = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def run(self, x):
        x = self.begin(x)
        for i in range(len(self.layers)):
            x = x + self.mixers[i](x)
            x = x + self.layers[i](x)
            x = self.norms[i](x)
            x *= 0.9
        return self.end(x)


class Patched(Net):
    """What a frozen module says of the ids decides what all stages do."""

    def __init__(self):
        super().__init__(4)
        self.patcher = nn.Embedding(VOCAB, 1).requires_grad_(False)
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, input_ids):
        patches = 1 + int(self.patcher(input_ids).detach().sum().abs()) % 3
        x = self.embed(input_ids) * patches
        for layer in (*self.layers, *self.others):
            x = layer(x) + patches
        return self.head(x)


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        ctx.given = [x]
        for layer in layers:
            ctx.given.append(layer(ctx.given[-1]))
        ctx.layers = layers
        return ctx.given[-1].clone()

    @staticmethod
    def backward(ctx, gradient):
        for layer, x in reversed([*zip(ctx.layers, ctx.given[:-1], strict=True)]):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                layer(x).backward(gradient)
            gradient = x.grad
        return gradient, None


class OfReversible(Net):
    def run(self, x):
        return Reversible.apply(x, self.layers)


def make_batches():
    generator = torch.Generator().manual_seed(1)
    batches = []
    for extra in range(4):
        tokens = torch.randint(VOCAB, (2, LENGTH + 1 + extra % 3), generator=generator)
        batches.append({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    return batches


def as_one_process(kind, schedule="1f1b", split=None):
    """Two steps: the first one's forwards are examined, the second one's are not."""
    plain, group = build(kind), torch.distributed.group.WORLD
    stage = PipelineParallel(copy.deepcopy(plain), split, group=group, schedule=schedule)
    for _ in range(2):
        expected = serial(plain, make_batches())
        train_step_pipeline(stage, make_batches())
        found = {n: p.grad for n, p in stage.named_parameters() if p.requires_grad}
        assert any("layers" in name for name in found)
        for name, gradient in found.items():
            assert gradient.count_nonzero(), name
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)
    with torch.no_grad():
        outputs = [plain(batch["input_ids"]) for batch in make_batches()]
    for output, found in zip(
        outputs, pipeline_forward(stage, make_batches(), everywhere=True), strict=True
    ):
        torch.testing.assert_close(found, output, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [Looped, OfLength])
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "1f1b"), (2, "zb_v")])
def test_layers_in_a_loop_are_on_one_stage(kind, ranks, schedule):
    run_ranks(as_one_process, ranks, kind, schedule)


@pytest.mark.parametrize("points", [("layers.3",), ("layers.1",), ("layers.1", "layers.3")])
def test_a_stage_may_begin_behind_a_loop_and_before_it(points):
    run_ranks(as_one_process, len(points) + 1, Looped, "1f1b", Split(points=points))


@pytest.mark.parametrize(
    ("num_stages", "costs", "sizes"),
    [(2, None, (3, 2)), (3, None, (1, 2, 2)), (4, None, (1, 2, 1, 1)),
     (2, (0, 9, 1, 1, 1, 1, 0), (1, 4)), (2, (0, 1, 1, 1, 1, 9, 0), (4, 1))],
)  # fmt: skip
def test_loops_count_as_one_in_a_split(num_stages, costs, sizes):
    model = Looped()
    stages = place(model, Split(costs=costs), num_stages, visits_of).stages
    layers = [[name for name in stage if name.startswith("layers")] for stage in stages]
    assert tuple(len({name.split(".")[1] for name in each}) for each in layers) == sizes
    assert model.forwards == [0]  # a twin has run


def test_more_stages_than_places_to_cut_at():
    text = r"5 layers cannot be spread over 5 stages: .* runs layers\.1 to layers\.2 in a loop, .*4"
    with pytest.raises(InvalidArgumentError, match=text):
        place(Looped(), None, 5, visits_of)
    with pytest.raises(
        InvalidArgumentError, match=r"layers\.0 to layers\.4 in a loop, .* at most 1"
    ):
        place(AllLooped(), None, 2, visits_of)


def refused(kind, text, split=None):
    stage = PipelineParallel(build(kind), split, group=torch.distributed.group.WORLD)
    with pytest.raises((InvalidArgumentError, StageError), match=text):
        train_step_pipeline(stage, make_batches())


@pytest.mark.parametrize(
    ("kind", "text", "split"),
    [
        (Looped, "comes back to it after modules of stage 1: .* or use no pipe", "layers.2"),
        (OfReversible, "in an autograd function that computes their gradients itself", "layers.2"),
    ],
)
def test_what_no_stage_can_do_alone_is_refused(kind, text, split):
    run_ranks(refused, 2, kind, text, Split(points=(split,)))


@pytest.mark.parametrize(
    ("visits", "units"),
    [
        ("0123", [1, 1, 1, 1]),
        ("011233", [1, 1, 1, 1]),
        ("012123", [1, 2, 1]),
        ("0123012", [4]),
        ("0213", [1, 2, 1]),
        ("", [1, 1, 1, 1]),
        ("02", [1, 1, 1, 1]),
        ("0102123", [3, 1]),
    ],
)
def test_a_model_is_cut_where_it_does_not_come_back(visits, units):
    found = units_of([(each,) for each in "0123"], visits)
    assert [len(unit) for unit in found] == units
    assert [index for unit in found for index in unit] == [0, 1, 2, 3]


SOURCES = [
    ("for layer in self.layers: x = layer(x)", False),
    ("for i in range(3): x = self.layers[i](x)", False),
    ("for _ in range(2):\n    for layer in self.layers[1:]: x = layer(x)", True),
    ("for _ in range(2):\n    for i, layer in enumerate(self.layers): x = layer(x)", True),
    ("while x.any():\n    for i in range(2): x = self.layers[i](x)", True),
    ("for layer in self.layers: x = layer(x)\nfor layer in self.layers: x = layer(x)", True),
    ("names = [layer for _ in range(2) for layer in self.layers]", False),
]


@pytest.mark.parametrize(("body", "loops"), SOURCES)
def test_the_source_tells_where_a_dry_run_is_worth_it(body, loops, tmp_path):
    text = f"class Made(Base):\n    def forward(self, x):\n{textwrap.indent(body, ' ' * 8)}\n"
    file = tmp_path / "made.py"
    file.write_text(text)
    space = {"Base": Net}
    exec(compile(text, file, "exec"), space)  # where the source is found
    assert loop_around(space["Made"](), "layers") == ("layers" if loops else None)


def test_modules_around_a_list_may_be_in_the_loop():
    assert loop_around(Nested(), "inner.layers") == "inner"


def test_a_dry_run_sees_calls_and_changes_nothing():
    model = Looped()
    state = copy.deepcopy(model.state_dict())
    seen = visits_of(model, [f"layers.{index}" for index in range(5)])
    assert [int(name[-1]) for name in seen] == [0, 1, 2, 1, 2, 1, 2, 3, 4]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.times = None  # fails: what was seen until then
    assert visits_of(model, ["layers.0"]) == ["layers.0"]


IN_STEP = Split(
    first=("embed", "begin"), layers=("mixers", "layers", "norms"), last=("end", "head")
)


def test_lists_that_are_called_by_one_index_are_inferred():
    assert infer_split(InStep()) == Split(
        first=("embed", "begin"), layers=("mixers", "layers", "norms"), last=("head", "end")
    )
    names = ("mixers.0", "layers.0", "norms.0", "mixers.1", "layers.1", "norms.1")
    assert layers_of(InStep(2)) == names


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (4, "1f1b"), (2, "zb_v")])
@pytest.mark.parametrize("split", [None, IN_STEP])
def test_lists_that_are_called_by_one_index_are_cut_alike(ranks, schedule, split):
    run_ranks(as_one_process, ranks, InStep, schedule, split)


def test_lists_in_a_wrong_order_are_refused():
    wrong = Split(first=("embed", "begin"), layers=("layers", "norms", "mixers"),
                  last=("end", "head"))  # fmt: skip
    run_ranks(refused, 2, InStep, "given, as argument 0|more than once|comes back", wrong)


def test_lists_of_two_lengths_are_no_layers():
    model = InStep()
    model.norms.append(nn.LayerNorm(WIDTH))
    with pytest.raises(InvalidArgumentError, match="these lists have 4 in mixers, 4 in layers, 5"):
        PipelineParallel(model, IN_STEP)
    with pytest.raises(InvalidArgumentError, match="cannot tell which modules are the layers"):
        infer_split(model)


def test_layers_of_several_modules_are_measured_as_one():
    batch = make_batches()[0]
    costs = measure_costs(InStep(3).double(), batch, repeats=1)
    assert len(costs) == 5
    assert all(cost >= 0 for cost in costs)


def test_what_is_frozen_and_named_nowhere_stays_on_every_stage():
    """And so its values are there, for code that reads them."""
    split = Split(first="embed", layers="layers", last=("others", "head"))
    run_ranks(as_one_process, 2, Patched, "1f1b", split)
    trained = Patched()
    trained.patcher.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match="that Split does not name: patcher"):
        PipelineParallel(trained, split)
