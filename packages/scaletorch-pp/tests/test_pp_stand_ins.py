"""What stands for another stage's tensors gets nowhere: a step is as in one process, or refused."""

import types

import pytest
import torch
import torch.nn.functional as F
from one_process import build, forward_everywhere, require_same, split
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    Split,
    StageError,
    train_step_pipeline,
)

WIDTH, VOCAB, LENGTH = 8, 13, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, beside=None):
        y = self.one(x).tanh()
        return y if beside is None else y * (1 + self.two(beside))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.make()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def make(self):
        pass

    def forward(self, input_ids, entry=None, classes=None):
        x = self.begin(self.embed(input_ids))
        beside = self.beside(x, entry, classes)
        for layer in self.layers:
            x = layer(x, beside)
        return self.head(self.end(x))

    def begin(self, x):
        return x

    def beside(self, x, entry, classes):
        return None

    def end(self, x):
        return x


class Condition(Net):
    def make(self):
        self.condition = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))

    def beside(self, x, entry, classes):
        return self.condition(entry)


class Activated(Condition):
    def make(self):
        self.condition = nn.Tanh()


class Classes(Condition):
    def make(self):
        self.condition = nn.Embedding(3, WIDTH)

    def beside(self, x, entry, classes):
        return self.condition(classes)


class Same(Net):
    def beside(self, x, entry, classes):
        return x


class Scaled(Net):
    def beside(self, x, entry, classes):
        return x * 0.5


class Mean(Net):
    def beside(self, x, entry, classes):
        return x.detach().mean(1, keepdim=True)


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

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Reaching() for _ in range(4))

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        Reaching.kept = x * 2
        try:
            return plainly_from(self, x)
        finally:
            Reaching.kept = None


class Mask(Net):
    """Where hidden states, in one process embeddings, are positive."""

    def beside(self, x, entry, classes):
        return (x > 0).to(x.dtype)


class Skip(Net):
    def forward(self, input_ids, entry=None, classes=None):
        one, two, three, four = self.layers
        first = one(self.embed(input_ids))
        return self.head(four(three(two(first)), first))


class SkipByName(Net):
    def forward(self, input_ids, entry=None, classes=None):
        one, two, three, four = self.layers
        first = one(self.embed(input_ids))
        return self.head(four(x=three(two(first)), beside=first))


class SkipByAddition(Net):
    def forward(self, input_ids, entry=None, classes=None):
        one, two, three, four = self.layers
        first = one(self.embed(input_ids))
        return self.head(four(three(two(first)) + first))


class SkipScaled(Net):
    """The last layer of a stage is left out, and what comes before it is changed on the way."""

    def forward(self, input_ids, entry=None, classes=None):
        one, _, three, four = self.layers
        return self.head(four(three(one(self.embed(input_ids)) * 0.5)))


class SkipToHead(Net):
    def forward(self, input_ids, entry=None, classes=None):
        embedded = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + embedded)


class Returned(Net):
    """Beside the logits, something of the embeddings, as for a loss of one's own."""

    def forward(self, input_ids, entry=None, classes=None):
        embedded = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), embedded.detach()


class Reads(Net):
    def begin(self, x):
        self.largest = x.abs().max().item()
        return x


class Indexes(Net):
    """Works in one process, where a layer returns what it returns there."""

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            (x,) = (layer(x),) if type(layer) is Layer else layer(x)
        return self.head(x)


class Detached(Net):
    def begin(self, x):
        return x.detach()


class Shrunk(Net):
    def begin(self, x):
        return x * 0.5 + x.detach() * 0.5


class Hooked(Net):
    def begin(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x


class HookedAtEnd(Net):
    def end(self, x):
        x.register_hook(lambda gradient: gradient * 0.5)
        return x


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Reversed(Net):
    def begin(self, x):
        return Own.apply(x)


class Zeros(Net):
    def make(self):
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def begin(self, x):
        return x + self.offset


class Between(Net):
    """Changes hidden states between layers."""

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.between(layer(x))
        return self.head(x)

    def between(self, x):
        return 0.5 * x + x.detach() * 0.25


class HookedBetween(Between):
    def between(self, x):
        x.register_hook(lambda gradient: gradient * 0.5)
        return x


class RecomputedHooked(Net):
    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, entry, use_reentrant=True)
            x.register_hook(lambda gradient: None)
        return self.head(x)


class MaskedBetween(Between):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def between(self, x):
        x *= 0.5
        return x


class GainBetween(Between):
    def make(self):
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))

    def between(self, x):
        return (x * self.gain).tanh()


class Looked(Net):
    """Asks which embeddings are large."""

    def beside(self, x, entry, classes):
        return x.detach()[x.abs().amax(-1) > 0].mean(0)


class Aside(Net):
    """An auxiliary loss that is zero as yet, added to the output."""

    def forward(self, input_ids, entry=None, classes=None):
        x, aside = self.embed(input_ids), 0.0
        for layer in self.layers:
            x = layer(x)
            aside = aside + 0.0 * x.mean()
        return self.head(x) + aside


def plainly(self, input_ids, entry=None, classes=None):
    """The forward of a model before its code parts from it."""
    return plainly_from(self, self.embed(input_ids))


def plainly_from(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.head(x)


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
            stage = split(build(kind), schedule)
            if late:
                stage.module.forward = types.MethodType(plainly, stage.module)
                train_step_pipeline(stage, make_batches())
                del stage.module.forward
            errors = InvalidArgumentError, StageError
            with pytest.raises(errors, match=f"(?s)rank.*{text}"):
                train_step_pipeline(stage, make_batches())


TRAVELS = [Condition, Activated, Classes, Same, Scaled, Mean, Mask, Skip, SkipByName, SkipScaled]
GRADIENTS = [Detached, Shrunk, Hooked, Reversed, Zeros]
REFUSED = [
    ([SkipByAddition, SkipToHead], "by another way than what the last of them returns"),
    ([Returned], r"the model returns a tensor that the model's forward makes from hidden states"),
    ([Reads], "the model's forward reads a number out of hidden states"),
    ([Written], "the model's forward writes to a tensor what it makes of hidden states"),
    ([Kept], r"layers\.\d computes with a tensor that the model's forward makes from hidden"),
    ([Aside], r"returns a tensor with a gradient, of shape .* by another way than what the last"),
    ([Looked], "the model's forward reads a number out of hidden states"),
    (
        [RecomputedHooked],
        "changes, in place or by a hook .* the hidden states after the last layer",
    ),
]


EXPLAINED = [
    (
        [Indexes],
        r"it raised ValueError \(too many values to unpack .*\)\. If it runs in one process",
    )
]
LATE = [
    *REFUSED,
    (TRAVELS, r"layers\.\d is given, as argument (0|1|beside), a tensor that the model"),
]


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
    stage = split(build(Same))
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
    for kind in (Condition, Skip, Scaled, Mask, MaskedBetween):
        plain = build(kind)
        stage = split(plain)
        given = [{n: v for n, v in b.items() if n != "labels"} for b in make_batches()]
        with torch.no_grad():
            expected = [plain(**batch) for batch in given]
        for _ in range(2):
            found = forward_everywhere(stage, make_batches())
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


class OfEntries(Net):
    """What is made of entries, and of shapes, is on every stage what it is in one process."""

    def beside(self, x, entry, classes):
        at = torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1]
        mask = torch.zeros_like(x).masked_fill(classes[..., None] > 0, 1.0)
        if classes.max() > 5 or bool((mask > 7).any()):
            raise ValueError("no such class")
        return x.new_ones(1) + at.type_as(x) + entry.expand_as(x) + mask + x.new_tensor(2.0)


class Positions(Net):
    """Embedded positions are added on the first stage, and nothing on the others."""

    def make(self):
        self.positions = nn.Embedding(3, WIDTH)
        self.late = nn.Dropout(0.0)

    def begin(self, x):
        return x

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids) + self.positions(classes)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LateDropout(Net):
    """Registered after the layers, as in Phi, and it drops nothing."""

    def __init__(self):
        super().__init__()
        self.late = nn.Dropout(0.0)

    def begin(self, x):
        return self.late(x)


class Embeddings(nn.Embedding):
    def forward(self, ids=None, classes=None, embedded=None):
        return super().forward(ids) if embedded is None else embedded


class GivenByName(Net):
    """As models of transformers call their embeddings, whether they are given ids or not."""

    def make(self):
        self.embed = Embeddings(VOCAB, WIDTH)

    def forward(self, input_ids=None, inputs_embeds=None, entry=None, classes=None):
        x = self.embed(ids=input_ids, classes=classes, embedded=inputs_embeds)
        for layer in self.layers:
            x = layer(x=x, beside=entry)
        return self.head(x)


class WritesInput(Net):
    def make(self):
        self.layers = nn.ModuleList()

    def __init__(self):
        super().__init__()
        one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(one, nn.LeakyReLU(0.5, inplace=True), two, nn.Tanh())

    def forward(self, input_ids, entry=None, classes=None):
        return self.head(self.layers(self.embed(input_ids)))


class Gain(Net):
    def make(self):
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def end(self, x):
        return x * self.gain


class ReadsAtEnd(Net):
    """For a log: what comes after a stage's last layer is the last stage's to compute."""

    def end(self, x):
        self.largest = x.detach().abs().max().item()
        return x


class Recomputed(Net):
    reentrant = False

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, entry, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    reentrant = True


class RecomputedBeside(Condition):
    """What has travelled is there again where layers are recomputed."""

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        beside = x * self.condition(entry)
        for layer in self.layers:
            x = checkpoint(layer, x, beside, use_reentrant=False)
        return self.head(x)


class Frozen(Net):
    """The first layer and what is before it run without gradients, not under its own flag."""

    def forward(self, input_ids, entry=None, classes=None):
        with torch.no_grad():
            x = self.layers[0](self.embed(input_ids))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x)


class Skipped(Net):
    """The last layer of a stage is left out, as in a model of fewer layers than it holds."""

    def forward(self, input_ids, entry=None, classes=None):
        x = self.embed(input_ids)
        for place in (0, 2, 3):
            x = self.layers[place](x)
        return self.head(x)


RIGHT = [OfEntries, Positions, LateDropout, GivenByName, Gain, Recomputed, RecomputedReentrant]
RIGHT += [Frozen, Skipped, ReadsAtEnd, *GRADIENTS, HookedAtEnd, Between, GainBetween]
RIGHT += [HookedBetween, MaskedBetween]


def serial(plain, batches):
    count = sum(batch["labels"].numel() for batch in batches)
    for batch in batches:
        logits = plain(**{n: v for n, v in batch.items() if n != "labels"}).flatten(0, 1)
        (F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count).backward()


def same_bits(kinds, schedule, points=None):
    """Two steps: the first one's forwards are examined, the second one's are not."""
    for kind in kinds:
        plain = build(kind)
        stage = split(plain, schedule, points)
        for _ in range(2):
            serial(plain, make_batches())
            train_step_pipeline(stage, make_batches())
            require_same(stage, plain, exact=True, summed=stage.tied_parameters, atol=1e-15)


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
    plain = build(HookedBetween)
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
