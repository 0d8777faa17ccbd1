"""State in attributes, and other paths of later steps: as in one process, or refused."""

from functools import partial

import pytest
import torch
from refusals import models
from refusals.rows import batch
from sweeps import today
from training import FOUR, grid, in_one_process, on_a_layout, require_alike

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import RehearsalError


class Layer(models.Layer):
    """`scale` changes its input, and may keep something."""

    def scale(self, x):
        return 1.0

    def forward(self, x):
        return super().forward(x * self.scale(x))


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


class Number(Rebound):
    """Keep a number in place of a tensor."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0


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


class Model(models.Plain):
    """With `wide` adds the mean over rows and positions."""

    def __init__(self, layer):
        self.layer = layer
        super().__init__(4)

    def forward(self, input_ids, wide=None):
        output = super().forward(input_ids)
        return output if wide is None else output + output.mean((0, 1), keepdim=True)


def built(layer, compiled=""):
    torch.manual_seed(0)
    model = Model(layer).double()
    for module in {"": [], "layers": model.layers, "model": [model]}[compiled]:
        module.compile(backend="aot_eager")
    return model


def batches(wide_from=3):
    wide = {"wide": torch.ones(8)}
    return [batch(step) | (wide if step >= wide_from else {}) for step in range(3)]


def outcome(layer, layout, wide_from=3, compiled="", **options):
    """Return the figures of three steps, or the text of an error."""
    build = partial(built, layer, compiled)
    how = {"options": options | ({"plan": models.PLAN} if "tp" in layout else {}), "rehearse": True}
    try:
        return on_a_layout(build, FOUR[layout], batches(wide_from), **how)
    except RehearsalError as error:
        return str(error)


def check(four, layer, layout, words=None, wide_from=3, **options):
    """Train as in one process, or refuse in `words` where rows or positions are divided."""
    divided = words and ("dp" in layout or "cp" in layout)
    expected = in_one_process(built(layer), batches(wide_from))
    for found in four.run(outcome, layer, layout, wide_from, **options):
        if divided:
            assert words in found
        else:
            require_alike(found, expected)


@pytest.mark.parametrize("layout", FOUR)
def test_state_that_every_rank_has_alike_is_that_of_one_process(four, layout):
    for layer in today([Rebound, Number, InPlace, Grows, Counts, Shows], 6):
        check(four, layer, layout)


def forwards(layer, layout):
    """Return the number of forwards in the first step, of the layout and of the plain model."""
    calls = []
    with grid(FOUR[layout]) as manager:
        plain = built(layer)
        plain.register_forward_pre_hook(lambda *_: calls.append(1))
        model = parallelize(plain, manager, plan=models.PLAN)
        train_step(model, shard_global_batch(batch(0), 1, model=model))
        return len(calls)


@pytest.mark.parametrize("layout", FOUR)
def test_only_a_model_that_keeps_state_pays_for_a_second_rehearsed_step(four, layout):
    """A rehearsed step is one forward of the layout and one of the plain model."""
    assert four.run(forwards, Layer, layout) == [2 + 1] * 4
    assert four.run(forwards, Rebound, layout) == [2 + 2 * 2 + 1] * 4


@pytest.mark.parametrize("layout", today([*FOUR], 2))
def test_a_recomputed_layer_starts_from_the_state_of_its_first_run(four, layout):
    for layer in today([Rebound, Grows, Counts, Shows], 4):
        check(four, layer, layout, recompute=True)


@pytest.mark.parametrize("layout", ["dp 4", "tp 4"])
@pytest.mark.parametrize("compiled", ["layers", "model"])
def test_compiled_code_keeps_the_same_state(four, layout, compiled):
    """Of a tensor changed in place, aot_eager computes other gradients in one process too."""
    for layer in today([Number, Rebound], 2):
        check(four, layer, layout, compiled=compiled)


@pytest.mark.parametrize("layout", FOUR)
def test_what_a_layer_remembers_of_its_rows_is_refused_where_ranks_have_others(four, layout):
    check(four, Remembers, layout, "in a second step: forward keeps last from call")


@pytest.mark.parametrize("layout", today([*FOUR], 2))
def test_the_first_step_with_another_entry_is_rehearsed(four, layout):
    check(four, Layer, layout, "the loss is off", wide_from=1)
