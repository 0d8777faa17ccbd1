"""A stage passes on what the call of its last layer returns, hooks and own `__call__` included."""

import copy
import pickle
import types
import warnings
from contextlib import contextmanager, nullcontext

import one_process
import pytest
import torch
import torch.nn.functional as F
from one_process import accumulate, build, pair, split, trains_on, world
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import InvalidArgumentError, all_gather_object
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    StageError,
    interleaved_1f1b,
    train_step_pipeline,
)

WIDTH, ROWS, LENGTH, LAYERS = 6, 2, 3, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        return x + self.one(x).tanh() * scale


class Net(one_process.Net):
    layer, num_layers, width, vocabulary = Layer, LAYERS, WIDTH, 11

    def run(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def call(self, layer, x):
        return layer(x, scale=0.7)


class OwnCall(Layer):
    def __call__(self, x, scale):
        return super().__call__(x, scale=scale) * 1.1


class OwnForward(Layer):
    def __call__(self, x, scale):
        return self.forward(x, scale) * 1.1


class Checkpointed(Layer):
    """As transformers' layers: the recomputation is in the class's own call."""

    def __call__(self, x, **kwargs):
        call = super().__call__
        return checkpoint(lambda x: call(x, **kwargs), x, use_reentrant=self.reentrant)

    reentrant = False


class Reentrant(Checkpointed):
    reentrant = True


class Forwards(Net):
    def call(self, layer, x):
        return layer.forward(x, 0.7)


class BoundForwards(Net):
    def forward(self, input_ids):
        x = self.embed.forward(input_ids)
        for forward in [layer.forward for layer in self.layers]:
            x = checkpoint(forward, x, use_reentrant=False)
        return self.head.forward(x)


class BoundCalls(Net):
    def call(self, layer, x):
        return checkpoint(layer.__call__, x, use_reentrant=False)


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, field):
        return field @ self.weight


class Field(Net):
    """The model's input requires no gradient, and is no ids; its stem has parameters."""

    def make(self):
        self.embed = Stem()

    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


class PaddedField(Field):
    """The only module with parameters keeps the form of what it is given."""

    def make(self):
        self.embed = nn.LayerNorm(WIDTH)

    def forward(self, input_ids):
        return super().forward(F.pad(input_ids, (0, 2)))


def of(kind, **attributes):
    return type(kind.__name__, (Net,), {"layer": kind, **attributes})


def half(module, grad_input, grad_output):
    return tuple(None if grad is None else grad * 0.5 for grad in grad_input)


def double_of(module, grad_output):
    return tuple(grad * 2 for grad in grad_output)


def thrice(module, args, output):
    return output * 3


def thrice_of(module, args, kwargs, output):
    return output * (3 * kwargs["scale"])


def shifted(module, args):
    return (args[0] + 0.25, *args[1:])


def on_layers(hook):
    """Return a global hook that changes nothing but layers."""
    return lambda module, *given: hook(module, *given) if isinstance(module, Layer) else None


def backward_hooks(net):
    for each in [*net.layers, net.head]:
        if isinstance(each, nn.Module):
            each.register_full_backward_hook(half)


def backward_pre_hooks(net):
    for each in net.layers:
        each.register_full_backward_pre_hook(double_of)


def forward_hooks(net):
    for each in net.layers:
        each.register_forward_hook(thrice)
        each.register_forward_pre_hook(shifted, prepend=True)
        each.register_forward_hook(thrice_of, with_kwargs=True, always_call=True, prepend=True)


def hooks_around(net):
    net.embed.register_forward_hook(thrice)
    net.head.register_forward_pre_hook(shifted)


@contextmanager
def everywhere():
    """Register global hooks, which look at all modules and change layers."""
    handles = [
        hooks.register_module_forward_hook(on_layers(thrice)),
        hooks.register_module_forward_pre_hook(on_layers(shifted)),
        hooks.register_module_full_backward_hook(on_layers(half)),
        hooks.register_module_full_backward_pre_hook(on_layers(double_of)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def squares(output, batch):
    return (output - batch["labels"]).square().sum()


def batches_of(kind, count):
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        ids = torch.randint(11, (ROWS, LENGTH), generator=generator)
        field = torch.randn(ROWS, LENGTH, 4, generator=generator, dtype=torch.float64)
        wanted = torch.randn(ROWS, LENGTH, 11, generator=generator, dtype=torch.float64)
        found.append({"input_ids": field if issubclass(kind, Field) else ids, "labels": wanted})
    return found


# Name -> model, function that registers hooks, context of the steps.
CASES = {
    **{kind.__name__: (of(kind), None, nullcontext)
       for kind in (OwnCall, OwnForward, Checkpointed, Reentrant)},
    **{kind.__name__: (kind, None, nullcontext)
       for kind in (Forwards, BoundForwards, BoundCalls, Field, PaddedField)},
    **{register.__name__: (Net, register, nullcontext)
       for register in (backward_hooks, backward_pre_hooks, forward_hooks, hooks_around)},
    "global hooks": (Net, None, everywhere),
}  # fmt: skip


def compare(case, schedule, count):
    """Compare two steps with one process."""
    warnings.simplefilter("ignore")  # torch's, of reentrant checkpoints without gradients
    kind, register, within = CASES[case]
    plain, stage = pair(kind, schedule=schedule)
    if register is not None:
        register(plain)
        own = nn.Module()
        own.layers = [layer for layer in stage.module.layers if isinstance(layer, Layer)]
        own.embed, own.head = stage.module.embed, stage.module.head
        register(own)
    batches = batches_of(kind, count)
    with within():
        for _ in range(2):
            trains_on(stage, plain, batches, squares, exact=False, atol=1e-11)


def of_four(num_ranks, num_micro_batches):
    return interleaved_1f1b(num_ranks, num_micro_batches, 4)


@pytest.mark.parametrize("case", CASES)
def test_layers_are_called_as_in_one_process(case):
    """On two ranks, and with all stages on one rank, which calls no less."""
    run_ranks(compare, 2, case, "1f1b", 2)
    compare(case, "zb_v", 2)
    compare(case, of_four, 4)


class Detached(Net):
    """Of two layers one computes apart from autograd what it is given."""

    def call(self, layer, x):
        return layer(x.detach() if layer is self.layers[2] else x)


class WithoutGradients(torch.autograd.Function):
    """As a function of the user's own that runs layers, and knows no gradient of its input."""

    @staticmethod
    def forward(ctx, x, run):
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        return None, None


class Lost(Layer):
    def forward(self, x, scale=1.0):
        return super().forward(WithoutGradients.apply(x, torch.clone), scale)


class Several(Layer):
    """Passes on what later layers use, and floats and integers that nothing uses."""

    def forward(self, state, scale=1.0):
        x, unused, counts = state
        return super().forward(x, scale), unused * 2, counts + 1


class Tuples(Net):
    layer = Several

    def forward(self, input_ids):
        x = self.embed(input_ids)
        state = one_process.Net.run(self, (x, x.square(), input_ids))
        return self.head(state[0])


class ZeroHead(Net):
    """All gradients before the head are zeros in the first step, in one process too."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(("layers.3", "head")))


def ids_of(count):
    return [{"input_ids": torch.arange(6)[None] + at} for at in range(count)]


def squared(output, batch):
    return output.square().sum()


def refused(stage, text, loss_fn=squared):
    with pytest.raises((InvalidArgumentError, StageError), match=text):
        train_step_pipeline(stage, ids_of(3), loss_fn=loss_fn)


@distributed_test(world_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_gradients_that_a_later_stage_does_not_give_back_are_missed(schedule):
    """And zeros, or none where none is needed, are not."""
    for kind in (Tuples, ZeroHead, Frozen):
        plain, stage = pair(kind, schedule=schedule)
        trains_on(stage, plain, ids_of(3), squared, exact=False)

    def some(out, batch):  # whose first micro-batch has no token that counts
        first = not int(batch["input_ids"][0, 0])
        return torch.zeros((), requires_grad=True) if first else out.square().sum()

    train_step_pipeline(split(build(Net), schedule), ids_of(3), loss_fn=some)
    text = r"(?s)stage \d gives no gradient back to stage \d, whose.*requires_grad_\(False\)"
    for kind in (of(Lost), Detached):
        refused(split(build(kind), schedule), text)


@distributed_test(world_size=2)
def test_copies_of_layers_are_plain():
    stage = split(build(of(OwnCall)))
    names = [name for name, _ in stage.named_parameters()]
    train_step_pipeline(stage, ids_of(1), loss_fn=squared)
    assert [*stage.state_dict()] == names == [name for name, _ in stage.named_parameters()]
    for name in stage.placement.stages[stage.stages[0]]:
        layer = stage.module.get_submodule(name)
        x = torch.ones(2, 3, dtype=torch.long)
        x = x if isinstance(layer, nn.Embedding) else torch.ones(2, WIDTH, dtype=torch.float64)
        given = (x, 0.5) if isinstance(layer, OwnCall) else (x,)
        own = next(k for k in (nn.Embedding, OwnCall, nn.Linear) if isinstance(layer, k))
        for made in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(made) is own
            assert "_pipeline_calls" in vars(layer).keys() - vars(made).keys()
            assert torch.equal(made(*given), layer(*given))
        assert type(layer).__name__ == own.__name__
        assert type(layer).forward is own.forward
        layer.forward = lambda *given: 3
        assert layer.forward() == 3
        del layer.forward
        assert layer.forward.__func__ is own.forward


class Sealed(Layer):
    def __init_subclass__(cls):
        raise TypeError("no subclasses")


def scripted():
    return torch.jit.script(nn.Linear(WIDTH, WIDTH))


class Answers(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        return types.SimpleNamespace(logits=self.head(self.run(x)), beside=x.square().sum())


class Late(Net):
    """Calls none of the first half of its layers."""

    def forward(self, input_ids):
        x = input_ids[..., None].expand(-1, -1, WIDTH).double()
        for layer in self.layers[LAYERS // 2 :]:
            x = layer(x)
        return self.head(x)


@distributed_test(world_size=2)
def test_what_cannot_be_followed_is_refused():
    for kind in (of(Sealed), type("Net", (Net,), {"layer": staticmethod(scripted)})):
        stage = PipelineParallel(build(kind), group=world())
        for _ in range(2):
            refused(stage, r"put an nn\.Module around it")
    beside = split(build(Answers))
    refused(beside, "the model returns a tensor that", lambda o, b: o.logits.sum() + o.beside)
    refused(split(build(Late)), "has called no module of the first stage")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    forward = one_process.Net.run


class Nested(Net):
    def __init__(self):
        super().__init__()
        self.layers = Inner()

    def run(self, x):
        return self.layers(x)


def watched(net):
    """Return the gradients that hooks around all layers see, by where they are."""
    seen = {"body": [], "before": [], "behind": []}

    def before(module, args):
        args[0].register_hook(seen["before"].append)

    def behind(module, args, output):
        output.register_hook(seen["behind"].append)

    net.layers.register_full_backward_pre_hook(lambda module, out: seen["body"].append(out[0]))
    net.layers.register_forward_pre_hook(before)
    net.layers.register_forward_hook(behind)
    return seen


@distributed_test(world_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_hooks_of_a_module_on_several_stages_see_all_once_or_are_refused(schedule):
    warnings.simplefilter("ignore")  # torch's, of full backward hooks whose input has no gradient
    plain, stage = pair(Nested, schedule=schedule)
    expected, seen = watched(plain), watched(stage.module)
    for _ in range(2):
        train_step_pipeline(stage, ids_of(3), loss_fn=squared)
        accumulate(plain, ids_of(3), squared)
    ranks = all_gather_object(seen)
    for where, gradients in expected.items():
        found = [gradient for rank in ranks for gradient in rank[where]]
        assert all(not rank[where] or len(rank[where]) == len(found) for rank in ranks), where
        torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-14)
    for module, text in ((stage.module, "the model"), (stage.module.layers, "layers")):
        handle = module.register_full_backward_hook(lambda module, into, out: None)
        refused(stage, rf"{text} \(\w+\) has a full backward hook")
        handle.remove()
    train_step_pipeline(stage, ids_of(3), loss_fn=squared)
