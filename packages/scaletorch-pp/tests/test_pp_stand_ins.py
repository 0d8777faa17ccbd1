"""What stands for another stage's tensors gets nowhere: a step is as in one process, or refused."""

import types

import one_process
import pytest
import torch
from one_process import build, forward_everywhere, require_same, same_steps, serial, split
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import Split, StageError, train_step_pipeline

WIDTH, VOCAB, LENGTH = 8, 13, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, beside=None):
        y = self.one(x).tanh()
        return y if beside is None else y * (1 + self.two(beside))


class Net(one_process.Net):
    layer, num_layers, width, vocabulary = Layer, 4, WIDTH, VOCAB

    def forward(self, input_ids, entry=None, classes=None):
        x = self.begin(self.embed(input_ids))
        return self.head(self.end(self.run(x, self.beside(x, entry, classes))))

    def begin(self, x):
        return x

    def beside(self, x, entry, classes):
        return None

    def run(self, x, beside=None):
        for layer in self.layers:
            x = self.between(layer(x, beside))
        return x

    def between(self, x):
        return x

    def end(self, x):
        return x


# --- what travels: tensors that later layers are given beside hidden states


class Condition(Net):
    def make(self):
        super().make()
        self.condition = self.made_of()

    def made_of(self):
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))

    def beside(self, x, entry, classes):
        return self.condition(entry)


class Activated(Condition):
    made_of = nn.Tanh


class Classes(Condition):
    def made_of(self):
        return nn.Embedding(3, WIDTH)

    def beside(self, x, entry, classes):
        return self.condition(classes)


class Skip(Net):
    def run(self, x, beside=None):
        one, two, three, four = self.layers
        first = one(x)
        return four(three(two(first)), first)


class SkipByName(Net):
    def run(self, x, beside=None):
        one, two, three, four = self.layers
        first = one(x)
        return four(x=three(two(first)), beside=first)


class SkipScaled(Net):
    """The last layer of a stage is left out, and what comes before it is changed on the way."""

    def run(self, x, beside=None):
        one, _, three, four = self.layers
        return four(three(one(x) * 0.5))


class RecomputedBeside(Condition):
    """What has travelled is there again where layers are recomputed."""

    def beside(self, x, entry, classes):
        return x * self.condition(entry)

    def run(self, x, beside=None):
        for layer in self.layers:
            x = checkpoint(layer, x, beside, use_reentrant=False)
        return x


# --- what is refused


class SkipByAddition(Net):
    def run(self, x, beside=None):
        one, two, three, four = self.layers
        first = one(x)
        return four(three(two(first)) + first)


class Aside(Net):
    """An auxiliary loss that is zero as yet, added to the output."""

    def forward(self, input_ids, entry=None, classes=None):
        x, aside = self.embed(input_ids), 0.0
        for layer in self.layers:
            x = layer(x)
            aside = aside + 0.0 * x.mean()
        return self.head(x) + aside


class Returned(Net):
    """Beside the logits, something of the embeddings, as for a loss of one's own."""

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        return self.head(self.run(x)), x.detach()


class Written(Net):
    def beside(self, x, entry, classes):
        beside = torch.zeros_like(x)
        beside[:, 0] = x.detach()[:, 0]
        return beside


class Reaching(Layer):
    """Takes a tensor from where the model has left it."""

    kept = None

    def forward(self, x, beside=None):
        return super().forward(x, type(self).kept)


class Kept(Net):
    """Hands a tensor to its layers beside their arguments."""

    layer = Reaching

    def run(self, x, beside=None):
        Reaching.kept = x * 2
        try:
            return super().run(x)
        finally:
            Reaching.kept = None


class RecomputedHooked(Net):
    def run(self, x, beside=None):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
            x.register_hook(lambda gradient: None)
        return x


class Indexes(Net):
    """Works in one process, where a layer returns what it returns there."""

    def run(self, x, beside=None):
        for layer in self.layers:
            (x,) = (layer(x),) if type(layer) is Layer else layer(x)
        return x


# --- what is as in one process


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class MaskedBetween(Net):
    def layer(self):
        return nn.LayerNorm(WIDTH)

    def run(self, x, beside=None):
        for layer in self.layers:
            x = layer(x)
            x *= 0.5
        return x


class GainBetween(Net):
    """A parameter of the model itself."""

    def make(self):
        super().make()
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))

    def between(self, x):
        return (x * self.gain).tanh()


class OfEntries(Net):
    """What is made of entries, and of shapes, is on every stage what it is in one process."""

    def beside(self, x, entry, classes):
        at = torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1]
        mask = torch.zeros_like(x).masked_fill(classes[..., None] > 0, 1.0)
        if classes.max() > 5 or bool((mask > 7).any()):
            raise ValueError("no such class")
        return x.new_ones(1) + at.type_as(x) + entry.expand_as(x) + mask + x.new_tensor(2.0)


class LateDropout(Net):
    """Registered after the layers, as in Phi, and it drops nothing."""

    def __init__(self):
        super().__init__()
        self.late = nn.Dropout(0.0)

    def begin(self, x):
        return self.late(x)


class WritesInput(Net):
    def __init__(self):
        super().__init__()
        one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(one, nn.LeakyReLU(0.5, inplace=True), two, nn.Tanh())

    def run(self, x, beside=None):
        return self.layers(x)


class Frozen(Net):
    """The first layer and what is before it run without gradients, not under its own flag."""

    def forward(self, input_ids, entry=None, classes=None):
        with torch.no_grad():
            x = self.layers[0](self.embed(input_ids))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x)


def halved(self, x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def noted(self, x):
    self.largest = x.detach().abs().max().item()
    return x


# Models that differ in a method.
METHODS = {
    "same": {"beside": lambda self, x, *_: x},
    "scaled": {"beside": lambda self, x, *_: x * 0.5},
    "mean": {"beside": lambda self, x, *_: x.detach().mean(1, keepdim=True)},
    "mask": {"beside": lambda self, x, *_: (x > 0).to(x.dtype)},
    "skip to head": {"run": lambda self, x, _: Net.run(self, x) + x},
    "reads": {"begin": noted},
    "looks": {"beside": lambda self, x, *_: x.detach()[x.abs().amax(-1) > 0].mean(0)},
    "detached": {"begin": lambda self, x: x.detach()},
    "shrunk": {"begin": lambda self, x: x * 0.5 + x.detach() * 0.5},
    "hooked": {"begin": halved},
    "hooked at end": {"end": halved},
    "reversed": {"begin": lambda self, x: Own.apply(x)},
    "between": {"between": lambda self, x: 0.5 * x + x.detach() * 0.25},
    "hooked between": {"between": halved},
    # For a log: what comes after a stage's last layer is the last stage's to compute.
    "reads at end": {"end": noted},
}


def made(kind):
    return build(kind if isinstance(kind, type) else type(kind, (Net,), METHODS[kind]))


def plainly(self, input_ids, entry=None, classes=None):
    """The forward of a model before its code parts from it."""
    return self.head(one_process.Net.run(self, self.embed(input_ids)))


def make_batches(count=3):
    generator = torch.Generator().manual_seed(1)
    batches = []
    for extra in range(count):
        tokens = torch.randint(VOCAB, (2, LENGTH + 1 + extra % 2), generator=generator)
        labels = tokens[:, 1:]
        entry = torch.randn(2, 1, WIDTH, generator=generator, dtype=torch.float64)
        classes = torch.randint(3, (2, 1), generator=generator)
        batch = {"input_ids": tokens[:, :-1], "labels": labels, "entry": entry, "classes": classes}
        batches.append(batch)
    return batches


def refused(cases, schedule, late=False):
    """If late, the first step has seen nothing of it; shapes and arguments are the same."""
    for kinds, text in cases:
        for kind in kinds:
            stage = split(made(kind), schedule)
            if late:
                stage.module.forward = types.MethodType(plainly, stage.module)
                train_step_pipeline(stage, make_batches())
                del stage.module.forward
            errors = InvalidArgumentError, StageError
            with pytest.raises(errors, match=f"(?s)rank.*{text}"):
                train_step_pipeline(stage, make_batches())


TRAVELS = [Condition, Activated, Classes, Skip, SkipByName, SkipScaled]
TRAVELS += ["same", "scaled", "mean", "mask"]
REFUSED = [
    ([SkipByAddition, "skip to head", Aside], "a tensor of shape .* not through the output"),
    ([Returned], r"the model returns a tensor that the model's forward makes from hidden states"),
    (["reads", "looks"], "the model's forward reads values of hidden states"),
    ([Written], "the model's forward copies values of .* into another tensor"),
    ([Kept], r"layers\.\d computes with a tensor that the model's forward makes from hidden"),
    ([RecomputedHooked], "changes the hidden states after the last layer .* by a hook"),
]
EXPLAINED = [([Indexes], r"raised ValueError \(too many values .*\)\. .* If the code runs in one")]
LATE = [*REFUSED, (TRAVELS, r"layers\.\d is given, as argument (0|1|beside), a tensor that")]


@pytest.mark.parametrize(("cases", "late"), [(REFUSED + EXPLAINED, False), (LATE, True)])
def test_what_is_another_tensor_here_is_refused(cases, late):
    run_ranks(refused, 2, cases, "1f1b", late)


def test_what_is_another_tensor_here_is_refused_on_one_rank_too():
    refused(REFUSED, "zb_v")


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


@distributed_test(world_size=2)
def test_layers_that_are_replaced_later_are_looked_at():
    stage = split(made("same"))
    stage.module.forward = types.MethodType(plainly, stage.module)
    train_step_pipeline(stage, make_batches())
    for place, layer in enumerate(stage.module.layers):
        if isinstance(layer, Layer):
            stage.module.layers[place] = Around(layer)
    train_step_pipeline(stage, make_batches())
    del stage.module.forward
    with pytest.raises((InvalidArgumentError, StageError), match="is given, as argument 1"):
        train_step_pipeline(stage, make_batches())


@distributed_test(world_size=2)
def test_forwards_without_gradients_are_examined_too():
    for kind in (Condition, Skip, "scaled", "mask", MaskedBetween):
        plain = made(kind)
        stage = split(plain)
        given = [{n: v for n, v in b.items() if n != "labels"} for b in make_batches()]
        with torch.no_grad():
            expected = [plain(**batch) for batch in given]
        for _ in range(2):
            found = forward_everywhere(stage, make_batches())
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


RIGHT = [
    OfEntries, LateDropout, GainBetween, MaskedBetween, Frozen, "detached", "shrunk", "hooked",
    "hooked at end", "reversed", "between", "hooked between", "reads at end",
]  # fmt: skip


def same_bits(kinds, schedule, points=None):
    for kind in kinds:
        plain = made(kind)
        stage = split(plain, schedule, points)
        tied = stage.tied_parameters
        same_steps(plain, stage, make_batches(), exact=True, summed=tied, atol=1e-15)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "zb_v"), (4, "1f1b")])
def test_what_later_layers_are_given_beside_hidden_states_travels(ranks, schedule):
    """On four ranks it passes through stages that do not use it."""
    run_ranks(same_bits, ranks, [*TRAVELS, RecomputedBeside], schedule)


def test_what_is_the_same_here_stays_bit_equal():
    run_ranks(same_bits, 2, RIGHT, "1f1b")


def test_what_is_the_same_here_stays_bit_equal_on_one_rank():
    """But for a parameter of the model itself, whose terms are added in another order."""
    same_bits([kind for kind in RIGHT if kind is not GainBetween], "interleaved_1f1b")


@distributed_test(world_size=2)
def test_a_hook_that_comes_in_a_later_step_runs_once():
    plain = made("hooked between")
    stage = split(plain)
    for late in (False, True):
        for model in (plain, stage.module):
            model.forward = types.MethodType(type(model).forward if late else plainly, model)
        serial(plain, make_batches())
        train_step_pipeline(stage, make_batches())
        require_same(stage, plain, exact=True, atol=1e-15)


def test_a_first_layer_may_write_to_what_it_is_given():
    run_ranks(same_bits, 2, [WritesInput], "1f1b", Split(points=("layers.1",)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@distributed_test(world_size=2)
def test_compiled_layers_are_compiled_later():
    """What is examined runs as it is written; the compiler takes over from the next one on."""
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    stage = split(build(Net))
    for layer in stage.module.layers:
        if isinstance(layer, Layer):
            layer.compile(backend=backend)
    batches = [{n: v for n, v in batch.items() if n != "entry"} for batch in make_batches(1)]
    train_step_pipeline(stage, batches)
    assert not compiled
    train_step_pipeline(stage, batches)
    assert compiled
    stage.module.begin = lambda x: x * 1  # equal, so it goes on
    train_step_pipeline(stage, batches)
    stage.module.beside = lambda x, entry, classes: x
    with pytest.raises((InvalidArgumentError, StageError), match=r"layers\.\d is given, as argum"):
        train_step_pipeline(stage, batches)


@distributed_test(world_size=2)
def test_a_model_compiled_as_a_whole_is_refused():
    stage = split(build(Net))
    train_step_pipeline(stage, make_batches())
    stage.module.compile(backend="eager")
    with pytest.raises((InvalidArgumentError, StageError), match="the model is compiled as a who"):
        train_step_pipeline(stage, make_batches())
