"""What a model's code asks of modules of other stages beside their forward: twins answer."""

import gc
import weakref

import one_process
import pytest
import torch
import torch.nn.functional as F
from one_process import build, pair, same_steps, split, token_batches
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import PassThrough, StageError, train_step_pipeline
from scaletorch.parallel.pipeline_parallel.stages.passage import Findings, Passage

WIDTH, VOCAB, LENGTH = 8, 13, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x, bias=None):
        y = self.adapters["one"](self.inner(x).tanh())
        return y if bias is None else y + bias


class Net(one_process.Net):
    layer, num_layers, width, vocabulary = Layer, 4, WIDTH, VOCAB

    def run(self, x, *beside):
        for layer in self.layers:
            x = layer(x, *beside)
        return x


class AsksForParts(Net):
    """Which adapters there are, as X-MOD does."""

    def forward(self, input_ids):
        counts = (len(each.adapters.keys()) * each.inner.out_features for each in self.layers)
        return super().forward(input_ids) * sum(counts)


class Positions(nn.Embedding):
    """Embeds positions of a shape, and others by a method of its own, as ProphetNet does."""

    def forward(self, shape, device):
        positions = torch.arange(shape[1], device=device).expand(shape)
        return super().forward(positions), positions

    def others(self, positions):
        return super().forward(positions)


class EmbedsPositions(Net):
    def make(self):
        super().make()
        self.positions = Positions(LENGTH + 1, WIDTH)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        embedded, positions = self.positions(x.shape[:2], x.device)
        following = self.positions.others(positions + 1)
        return self.head(self.run(x + embedded, following))


class Bias(nn.Module):
    """Makes a tensor of more dims than the integers that it is given, as CPM-Ant does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))

    def forward(self, positions):
        between = positions[:, :, None] - positions[:, None] + LENGTH
        return F.embedding(between, self.table)


class Biased(Net):
    """With prompts in front, so that hidden states are longer than ids."""

    def make(self):
        super().make()
        self.bias = Bias()

    def forward(self, input_ids):
        ids = torch.cat([torch.ones_like(input_ids[:, :2]), input_ids], 1)
        x = self.embed(ids)
        positions = torch.arange(x.shape[1]).expand(x.shape[:2]) % LENGTH
        bias = self.bias(positions)[:, :, 0, :]
        return self.head(self.run(x, bias)[:, 2:])


class Longer(EmbedsPositions):
    """Two streams after one another; masks are made for the length of the embedded ids."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        length = x.shape[1]
        following = self.positions.others(torch.arange(length) + 1)
        scale = torch.linspace(0.5, 1, length, dtype=torch.float64).repeat(2)[:, None]
        x = self.run(torch.cat([x, x + following], 1), scale)
        return self.head(x[:, :length] + x[:, length:])


class Kinds(Layer):
    """Is of a kind that a method sets, with modules made anew, as BigBird's."""

    kind = "narrow"

    def __init__(self, config):
        super().__init__()
        self.config = config

    def set_kind(self, kind):
        self.kind = kind
        inner = nn.Linear(self.config.width, self.config.width, dtype=self.inner.weight.dtype)
        inner.weight, inner.bias = self.inner.weight, self.inner.bias
        self.inner = inner

    def forward(self, x):
        return super().forward(x) * (2 if self.kind == "wide" else 1)


class Config:
    width = WIDTH


class SetsKinds(Net):
    def make(self):
        super().make()
        self.config = Config()

    def layer(self):
        return Kinds(self.config)

    def forward(self, input_ids):
        for layer in self.layers:
            if layer.kind == "narrow":
                layer.set_kind("wide")
        return super().forward(input_ids) * len({layer.kind for layer in self.layers})


class Counted(nn.Embedding):
    """Returns a tuple; with a hook it returns something else."""

    def forward(self, ids, scale):
        return super().forward(ids) * scale, ids


class ReturnsTwo(Net):
    """Where rows are two, a tensor in the place of the pair would come apart in silence."""

    def make(self):
        self.embed = Counted(VOCAB, WIDTH)

    def forward(self, input_ids):
        x, ids = self.embed(scale=2.0, ids=input_ids)
        return self.head(self.run(x, (ids > 3)[..., None]))


class ReadsMethod(EmbedsPositions):
    def forward(self, input_ids):
        total = float(self.positions.others(torch.arange(LENGTH)).detach().sum())
        return self.head(self.run(self.embed(input_ids), total))


class AsksForMore(Net):
    """Of what is changed by a forward that runs elsewhere."""

    def layer(self):
        layer = Layer()
        layer.missing = [1]
        return layer

    def forward(self, input_ids):
        return super().forward(input_ids) * len(self.layers[0].missing)


def make_batches():
    return token_batches(3, length=LENGTH, vocabulary=VOCAB)


def as_one_process(kinds, schedule):
    for kind in kinds:
        plain, stage = pair(kind, schedule=schedule)
        same_steps(plain, stage, make_batches(), atol=1e-15)
        assert all(p.grad.count_nonzero() for p in stage.parameters()), kind


RIGHT = [AsksForParts, EmbedsPositions, Biased, Longer, SetsKinds, ReturnsTwo]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_asked_of_modules_of_other_stages(ranks):
    run_ranks(as_one_process, ranks, RIGHT, "1f1b")


def test_what_is_asked_of_modules_of_other_stages_of_one_rank():
    as_one_process(RIGHT, "zb_v")


@distributed_test(world_size=2)
def test_what_a_twin_does_not_have_is_refused():
    for kind, text in (
        (ReadsMethod, "reads values of hidden states, or of outputs of another stage's modules"),
        (AsksForMore, r"layers\.0 is on stage 0 .* attribute 'missing' is not available here"),
    ):
        stage = split(build(kind))
        with pytest.raises((InvalidArgumentError, StageError), match=text):
            train_step_pipeline(stage, make_batches())


def passing(module):
    """Return what stands for a module, in a forward that runs."""
    through = PassThrough(module, "embed is on stage 0 of the pipeline")
    hidden = torch.ones(2, LENGTH, WIDTH)
    passage = Passage(1, hidden, Findings(), "layers", {}, (), examines=False)
    through._passages.running = passage
    passage.first = torch.ones(2, LENGTH, dtype=torch.long)
    return through


def test_what_a_module_makes_of_ids_has_its_form_and_not_if_it_is_hooked():
    ids, plain, hooked = torch.ones(2, 3, dtype=torch.long), Bias(), Bias()
    hooked.register_forward_hook(lambda *_: None)
    assert passing(plain)(ids).shape == (2, 3, 3, WIDTH)
    assert passing(hooked)(ids).shape == (2, 3)  # a guess: as what it is given
    embedded, positions = passing(Positions(9, WIDTH))((2, 3), "cpu")
    assert (embedded.shape, positions.shape) == ((2, 3, WIDTH), (2, 3))


def test_a_twin_keeps_no_tensor_alive_and_runs_no_hook():
    layer = Kinds(Config())
    layer.cache, layer.names = torch.ones(3), ["a"]
    layer.own = lambda layer=layer: layer
    layer.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    kept = weakref.ref(layer.inner.weight)
    through = passing(layer)
    assert list(through.adapters) == ["one"]
    for name in ("cache", "names", "own", "config"):
        with pytest.raises(AttributeError, match=f"{name!r} is not available here"):
            getattr(through, name)
    del layer
    gc.collect()
    assert kept() is None
    assert through.inner.weight.shape == (WIDTH, WIDTH)
