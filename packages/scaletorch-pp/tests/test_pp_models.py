"""Models that pipelines often train wrong in silence: here they are right, or refused."""

import one_process
import pytest
import torch
from one_process import build, forward_everywhere, pair, same_steps, split, token_batches
from torch import nn

from scaletorch.dist import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    StageError,
    train_step_pipeline,
)

HIDDEN, VOCAB, LENGTH = 8, 16, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Net(one_process.Net):
    layer, num_layers, width, vocabulary = Layer, 4, HIDDEN, VOCAB


class Position(nn.Module):
    """Its parameter's gradient is a view of the output's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.position = nn.Parameter(torch.randn(LENGTH, HIDDEN))

    def forward(self, x):
        y = x.squeeze(0) + self.position.view(LENGTH, HIDDEN)
        return self.linear(y).unsqueeze(0) + self.position.unsqueeze(0)


class Force(Layer):
    def forward(self, x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.requires_grad_()
            energy = self.linear(y).tanh().sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x + force


class InPlace(Layer):
    def forward(self, x):
        return x + torch.relu_(self.linear(x))


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.ones(2, HIDDEN, dtype=torch.float64))

    def forward(self, x):
        return self.base(x) + (x @ self.down.T).sum(-1, keepdim=True)


class ChangesAround(Net):
    """In place: what is embedded, as CTRL does, and what the layers have made of it."""

    def run(self, x):
        x *= 0.5
        x = super().run(x)
        x *= 0.5
        return x


class ScalesLogits(Net):
    """As Cohere and OLMo do, and Gemma with its soft caps."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, input_ids):
        logits = self.head(self.run(self.embed(input_ids)) * 0.5)
        return (logits * 0.25 * self.scale).tanh()


class OfSizes(Net):
    """As nanoGPT, whose own code takes ids for what they are."""

    def make(self):
        super().make()
        self.positions = nn.Embedding(LENGTH, HIDDEN)  # of the first stage

    def forward(self, idx):
        b, t = idx.size()
        assert t <= LENGTH
        self.seen = b, t, int(idx.max()) < VOCAB
        x = self.run(self.embed(idx) + self.positions(torch.arange(t)))
        return self.head(x) * (idx > 0)[..., None]


class Pair(Layer):
    """Returns two tensors."""

    def forward(self, x):
        return super().forward(x), x.mean()


class ScalesPairs(Net):
    """The first of what its layers return goes on, changed, as in Bloom and Falcon."""

    layer = Pair

    def run(self, x):
        for layer in self.layers:
            x = layer(x)[0] * 0.5
        return x * 0.5


class WithState(Layer):
    """Returns, as RWKV does, tensors, lists of them and nothing beside its hidden states."""

    def forward(self, x, state):
        length, others = state
        return super().forward(x) * others[0], [length, [t + 1 for t in others]], None, {"of": 2.5}


class States(Net):
    layer = WithState

    def run(self, x):
        state = [x.shape[1], [torch.ones((), dtype=x.dtype)]]
        for layer in self.layers:
            x, state, nothing, facts = layer(x, state)
            assert nothing is None
            x = x * facts["of"] / (state[0] + state[1][0])
        return x


class Embeddings(nn.Module):
    """Of a class of its own: positions by padding, a projection, a dropout that drops nothing."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, 4), nn.Embedding(LENGTH + 1, 4)
        self.up, self.drop = nn.Linear(4, HIDDEN), nn.Dropout(0.0)

    def forward(self, input_ids=None, position_ids=None):
        assert input_ids.shape == position_ids.shape
        return self.drop(self.up(self.words(input_ids) + self.positions(position_ids)))


class OfPadding(Net):
    """As BERT and its kin: positions and a mask come of ids, and the head's own weight is asked."""

    def make(self):
        self.embed = Embeddings()

    def layer(self):
        return Masked()

    def forward(self, input_ids):
        mask = input_ids != 0
        x = self.embed(input_ids=input_ids, position_ids=mask.cumsum(1) * mask)
        rows, length, width = x.shape
        assert (rows, length, width) == (*input_ids.shape, HIDDEN)
        for layer in self.layers:
            x = layer(x, mask=mask[..., None].to(x.dtype))
        return self.head(x.to(self.head.weight.dtype).view(rows, length, width))


class Masked(Layer):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Streams(Net):
    """Layers see several copies of what is embedded, as hyper-connections do."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x.unsqueeze(2).expand(-1, -1, 3, -1).contiguous()
        return self.head(self.run(x).mean(2))


class Sequence(nn.Sequential):
    def __init__(self):
        layers = [module for _ in range(4) for module in (Layer(), nn.Tanh())]
        last = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)
        super().__init__(nn.Embedding(VOCAB, HIDDEN), *layers, *last)

    def forward(self, input_ids):
        return super().forward(input_ids)


def make_batches():
    return token_batches(4, rows=1, length=LENGTH, vocabulary=VOCAB)


# By what their gradients share memory with, by code before the layers that takes ids for what they
# are, between the layers and after the last, which happens once.
KINDS = [
    *(type(kind.__name__, (Net,), {"layer": kind}) for kind in (Position, Force, InPlace)),
    OfSizes, ScalesLogits, ChangesAround, ScalesPairs, States, OfPadding, Streams, Sequence,
]  # fmt: skip


def all_train(schedule):
    for kind in KINDS:
        same_steps(*pair(kind, schedule=schedule), make_batches())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_forward_that_does_more_than_a_list_of_layers(schedule):
    run_ranks(all_train, 2, schedule)


@pytest.mark.parametrize("schedule", ["zb_h1", "looped_bfs"])
def test_a_forward_that_does_more_on_one_rank(schedule):
    all_train(schedule)


@distributed_test(world_size=2)
def test_adapters_that_replace_modules_after_wrapping():
    for schedule in ("1f1b", "zb_v"):
        plain, stage = pair(Net, schedule=schedule)
        for model in (plain, stage.module):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("head"))
        train_step_pipeline(stage, make_batches())
        stage.zero_grad()
        for model in (plain, stage.module):
            for layer in model.layers:
                if isinstance(layer, Layer):
                    layer.linear = Adapted(layer.linear)
            if model is plain or stage.is_last_stage:
                model.head = Adapted(model.head)
        same_steps(plain, stage, make_batches())
        assert ("head.down" in dict(stage.named_parameters())) == stage.is_last_stage


@distributed_test(world_size=3)
def test_tied_parameters_that_are_no_longer_tied():
    _, stage = pair(Net, tied=True)
    train_step_pipeline(stage, make_batches())
    if stage.is_first_stage:
        stage.module.embed.weight.requires_grad_(False)
    with pytest.raises(StateError, match=r"ranks \[0\] of the pipeline have frozen embed.weight"):
        train_step_pipeline(stage, make_batches())  # also where nothing of it is held
    if stage.rank != 1:
        with pytest.raises(StateError, match=r"have frozen embed.weight, which ranks \[0, 2\]"):
            stage.sync_tied_gradients()
    plain, stage = pair(Net, tied=True)
    state = {name: t for name, t in plain.state_dict().items() if name in stage.state_dict()}
    stage.load_state_dict(state, assign=True)
    with pytest.raises((StateError, MismatchError), match="has been replaced by another parameter"):
        train_step_pipeline(stage, make_batches())


class Looped(Net):
    """Its second and third layer run three times, each on what the first has returned too."""

    num_layers = 5

    def run(self, x):
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


class Patched(Net):
    """What a frozen module says of the ids decides what all stages do."""

    def __init__(self):
        super().__init__(4)
        self.patcher = nn.Embedding(VOCAB, 1).requires_grad_(False)
        self.others = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, input_ids):
        patches = 1 + int(self.patcher(input_ids).detach().sum().abs()) % 3
        x = self.embed(input_ids) * patches
        for layer in (*self.layers, *self.others):
            x = layer(x) + patches
        return self.head(x)


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        for layer in layers:
            x = layer(x)
        ctx.layers = layers
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class OfReversible(Net):
    def run(self, x):
        return Reversible.apply(x, self.layers)


def of_lengths():
    return [token_batches(1, length=4 + index % 3, vocabulary=VOCAB)[0] for index in range(4)]


def as_one_process(cases):
    for kind, points in cases:
        plain, stage = pair(kind, points=points)
        same_steps(plain, stage, of_lengths())
        assert all(p.grad.count_nonzero() for p in stage.parameters() if p.requires_grad)
        with torch.no_grad():
            outputs = [plain(batch["input_ids"]) for batch in of_lengths()]
        found = forward_everywhere(stage, of_lengths())
        torch.testing.assert_close(found, outputs, rtol=1e-12, atol=1e-14)


def test_a_stage_may_begin_before_a_loop_and_have_a_layer_behind_it():
    cases = [(kind, Split(points=(point,)))
             for kind in (Looped, OfLength) for point in ("layers.1", "layers.4")]  # fmt: skip
    run_ranks(as_one_process, 2, cases)


@distributed_test(world_size=2)
def test_what_no_stage_can_do_alone_is_refused():
    for kind, point, text in (
        (Looped, "layers.2", "comes back to it after modules of stage 1: .* or use no pipe"),
        (Looped, "layers.3", "calls it more than once; .* let the stage end after the loop"),
        (OfReversible, "layers.2", "not through the output of the last one .* reversible layers"),
    ):
        stage = split(build(kind), points=Split(points=(point,)))
        with pytest.raises((InvalidArgumentError, StageError), match=text):
            train_step_pipeline(stage, of_lengths())


def test_what_is_frozen_and_named_nowhere_stays_on_every_stage():
    """And so its values are there, for code that reads them."""
    described = Split(first="embed", layers="layers", last=("others", "head"))
    run_ranks(as_one_process, 2, [(Patched, described)])
    trained = Patched()
    trained.patcher.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match=r"Split does not name .*: patcher"):
        PipelineParallel(trained, described)
