"""Gradients after backward calls of every kind: nested, repeated, failed, partial."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from in_turn import assert_same_gradients, for_each, in_turn
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import MismatchError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, DataParallelNaive

KINDS = [
    (DataParallelNaive, {}),
    (DataParallelBucket, {"bucket_size": 1}),
    (DataParallelBucket, {}),
]


def wrap(module, kind=DataParallelBucket, options=None):
    return kind(module, group=c10d.group.WORLD, **(options or {}))


def inputs(rank, rows=3):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def both(build, run, kind=DataParallelBucket, options=None):
    """Return a wrapped module after `run` on this rank, and a plain one after it on all."""
    torch.manual_seed(5)
    plain = build().double()
    model = wrap(copy.deepcopy(plain), kind, options)
    for rank in range(c10d.get_world_size()):
        run(plain, rank)
    run(model, c10d.get_rank())
    return model, plain


class Net(nn.Module):
    """A block used twice in checkpoints and once outside, and blocks that only some ranks use."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.sides = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x, side=None):
        x = self.first(x)
        for _ in range(2):
            x = self.block(x)
        x = self.last(self.shared(x))
        return x if side is None else self.sides[side](x)

    def block(self, x):
        if self.reentrant is None:
            return torch.tanh(self.shared(x))
        return checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=self.reentrant)


def check_checkpoint(reentrant, kind, options):
    def run(module, rank):
        module(inputs(rank).requires_grad_()).square().sum().backward()

    model, plain = both(lambda: Net(reentrant), run, kind, options)
    assert_same_gradients(model, plain)
    assert model._sync.completed == 1
    with model.no_sync():
        run(model, c10d.get_rank())
    run(model, c10d.get_rank())
    for rank in [*range(c10d.get_world_size())] * 2:
        run(plain, rank)
    assert_same_gradients(model, plain)
    assert model._sync.completed == 2


def test_checkpoints_synchronise_once():
    early = KINDS[1]  # its first sum begins before the reentrant checkpoints
    cases = ((r, *kind) for r in (True, False) for kind in KINDS if not (r and kind is early))
    run_ranks(in_turn, 2, for_each(check_checkpoint, cases))


class Structured(nn.Module):
    """Ends in checkpoints, so that only its outputs' hooks see the outer backward begin."""

    def __init__(self, outer):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.outer = outer

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.outer(x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


CONTAINERS = {
    "tensor": (lambda x: x, lambda y: y),
    "nested": (lambda x: {"out": ([None, 3, x],)}, lambda y: y["out"][0][2]),
    "dataclass": (Output, lambda y: y.logits),
}


def check_structured(container):
    outer, inner = CONTAINERS[container]

    def run(module, rank):
        inner(module(inputs(rank).requires_grad_())).square().sum().backward()

    model, plain = both(lambda: Structured(outer), run, options={"bucket_size": 1})
    assert_same_gradients(model, plain)
    assert model._sync.completed == 1


class Repeated(nn.Module):
    """A layer that runs several times in reentrant checkpoints, between two others."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, times=3):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.last(x)


def repeat(module, rank, times=1):
    x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
    module(x, times).square().mean().backward()


def check_used_again():
    """One rank's gradient comes when its sum has begun; sums of both groups are ended on all."""
    torch.manual_seed(0)
    plain, second, rank = Repeated(), c10d.new_group([0, 1]), c10d.get_rank()
    groups = {"last.weight": second, "last.bias": second}
    model = wrap(copy.deepcopy(plain), options={"bucket_size": 1, "groups": groups})
    with pytest.raises(StateError, match=r"shared.weight, shared.bias got another .*reentrant"):
        repeat(model, rank, times=1 if rank else 3)
    assert model.first.weight.grad is model.shared.weight.grad is None
    model.zero_grad()
    repeat(model, rank)
    for each in range(2):
        repeat(plain, each)
    assert_same_gradients(model, plain, None)


def check_other_wrappers():
    """The ranks disagree about the first wrapper; the second one is summed all the same."""
    models = [wrap(nn.Linear(4, 1)) for _ in range(2)]
    x = torch.ones(1, 4)
    sum(model(x).sum() for model in models).backward()
    if c10d.get_rank():
        models[0].zero_grad()
    with pytest.raises(MismatchError, match="a different number of times"):
        sum(model(x).sum() for model in models).backward()
    assert models[0].weight.grad is None
    torch.testing.assert_close(models[1].weight.grad, torch.full((1, 4), 4.0))


@pytest.mark.parametrize("options", [{"check_finite": True}, {"grad_type": torch.float32}], ids=str)
def test_one_process_runs_a_layer_several_times_as_plain_torch(options):
    torch.manual_seed(0)
    plain = Repeated().bfloat16()
    model = DataParallelBucket(copy.deepcopy(plain), bucket_size=1, **options)
    for module in (plain, model):
        x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
        module(x).square().mean().backward()
    # Sums in float32 are rounded once.
    assert_same_gradients(model, plain, 0.02 if "grad_type" in options else 0)


def check_retain_graph():
    def run(module, rank):
        loss = module(inputs(rank)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    model, plain = both(Net, run)
    assert_same_gradients(model, plain)
    assert model._sync.completed == 2


def check_many_forwards():
    """Several forwards, then one backward, and forwards between backwards as a pipeline has."""

    def run(module, rank):
        outs = [module(inputs(rank + 10 * at)).square().sum() for at in range(3)]
        (outs[0] + outs[1]).backward()
        later = module(inputs(rank + 50)).sum()
        outs[2].backward()
        later.backward()

    assert_same_gradients(*both(Net, run))


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise ArithmeticError("boom")
        return grad, None


class Bomb(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, armed=False):
        return self.last(Explode.apply(self.first(x), armed))


def check_failure(recover):
    model, plain = both(
        Bomb, lambda m, rank: m(inputs(rank)).sum().backward(), options={"bucket_size": 1}
    )
    model.zero_grad()
    again = model(inputs(c10d.get_rank())).sum() if recover == "no forward" else None
    with pytest.raises(ArithmeticError, match="boom"):
        model(inputs(c10d.get_rank()), armed=True).sum().backward()
    if recover == "reset":
        model.reset()
        assert all(p.grad is None for p in model.parameters())
    if recover == "zero_grad":
        model.zero_grad()
    if again is not None:
        with pytest.raises(StateError, match="an earlier backward raised"):
            again.backward()
    for _ in range(2):
        model.zero_grad()
        model(inputs(c10d.get_rank())).sum().backward()
        assert_same_gradients(model, plain)


def test_a_backward_that_raised_spoils_nothing_later():
    run_ranks(
        in_turn,
        2,
        for_each(check_failure, [("reset",), ("zero_grad",), ("forward alone",), ("no forward",)]),
    )


def check_create_graph():
    model = wrap(Net().double())
    with pytest.raises(StateError, match=r"create_graph=True"):
        torch.autograd.backward(model(inputs(0)).square().sum(), create_graph=True)
    model.reset()


def check_sparse():
    model = wrap(nn.Embedding(5, 4, sparse=True))
    with pytest.raises(StateError, match=r"gradient of weight has layout torch.sparse_coo"):
        model(torch.tensor([1])).sum().backward()


def check_two_wrappers(same_backward):
    """Two wrapped models whose gradients come mixed, each with a side that one rank uses."""
    rank = c10d.get_rank()
    torch.manual_seed(1)
    plain = [Net().double(), Net().double()]
    models = [wrap(copy.deepcopy(each), options={"bucket_size": 8}) for each in plain]
    for _ in range(2):
        for each in range(2):
            a, b = plain
            (
                b(a(inputs(each), side=each)).sum() + a(b(inputs(each), side=1 - each)).sum()
            ).backward()
        a, b = models
        first = b(a(inputs(rank), side=rank)).sum()
        second = a(b(inputs(rank), side=1 - rank)).sum()
        if same_backward:
            (first + second).backward()
        else:
            first.backward()
            second.backward()
    for model, reference in zip(models, plain, strict=True):
        assert_same_gradients(model, reference)


def check_double_wrap():
    net = Net()
    model = wrap(net)
    with pytest.raises(StateError, match=r"rank .: 0.weight, 0.bias would be synchronised twice"):
        wrap(nn.Sequential(net.first))
    del model
    wrap(net)


def check_main_grad():
    net = Net()
    weight = net.first.weight
    weight.main_grad = torch.zeros_like(weight)
    expected = r"rank .: the gradient of first.weight goes to its main_grad"
    with pytest.raises(StateError, match=expected):
        wrap(net)


def check_memory():
    net = Net().double()
    model = wrap(net)
    model(inputs(0)).sum().backward()
    assert net.first.weight._backward_hooks
    gc.disable()  # no cycle may be needed to get rid of them
    try:
        sync, wrapper = weakref.ref(model._sync), weakref.ref(model)
        del model
        assert sync() is None
        assert wrapper() is None
        assert not net.first.weight._backward_hooks
        assert not net.first.weight._post_accumulate_grad_hooks
        net(inputs(0)).sum().backward()  # on one rank or all: nothing is synchronised
        module, parameter = weakref.ref(net), weakref.ref(net.first.weight)
        model = wrap(net)
        del model, net
        assert module() is None
        assert parameter() is None
    finally:
        gc.enable()


def test_hooks_keep_nothing_alive():
    run_ranks(in_turn, 2, [check_memory, check_late_output])


def check_late_output():
    """A graph that outlives its wrapper is a plain one."""
    net = Net().double()
    out = wrap(net)(inputs(0))
    out.sum().backward()
    assert net.first.weight.grad is not None


class Stage(nn.Module):
    """A pipeline stage that may have nothing to do on a rank."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def backward(self, input_tensor, output_tensor, output_tensor_grad):
        if output_tensor_grad is None:
            return None
        torch.autograd.backward(output_tensor, output_tensor_grad)
        return input_tensor.grad


def check_stage_backward():
    rank = c10d.get_rank()
    torch.manual_seed(5)
    plain, model = Stage().double(), None
    model = wrap(copy.deepcopy(plain))
    grad = torch.ones(3, 4, dtype=torch.float64)
    plain(inputs(0)).backward(grad)
    x = inputs(rank).requires_grad_()
    result = model.backward(x, model(x), grad if rank == 0 else None)
    assert (result is x.grad) if rank == 0 else (result is None)
    assert_same_gradients(model, plain)
    with model.no_sync():
        assert model.backward(x, model(x), None) is None
    assert model._sync.completed == 1


def test_backward_needs_a_stage():
    with pytest.raises(StateError, match=r"Linear has no backward\(input_tensor"):
        DataParallelBucket(nn.Linear(1, 1)).backward(None, None, None)


@pytest.mark.parametrize("kind", [DataParallelBucket, DataParallelNaive])
def test_copies_have_their_own_weights_and_do_not_train(kind):
    model = kind(nn.Linear(1, 1))
    twin = copy.deepcopy(model)
    assert type(twin) is kind
    assert twin.module.weight is not model.module.weight
    assert torch.equal(twin.module.weight, model.module.weight)
    with pytest.raises(StateError, match="is a deep copy of a wrapped model"):
        twin(torch.ones(1, 1))
    with torch.no_grad():
        assert torch.equal(twin(torch.ones(1, 1)), model(torch.ones(1, 1)))
    model(torch.ones(1, 1)).sum().backward()  # as before
    with pytest.raises(StateError, match=r"cannot be pickled.* save its state_dict"):
        pickle.dumps(model)


def check_late_hooks():
    """Each hook that comes after the wrapper sees this rank's own gradient."""
    rank = c10d.get_rank()
    model = wrap(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), options={"bucket_size": 1})
    seen = {}

    def note(name, parameter):
        seen[name] = None if parameter.grad is None else parameter.grad.clone()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name))
    for _ in range(2):  # the second time in the order that the first has found
        model.reset()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert seen["1.bias"].item() == 1
        assert all(each is not None for each in seen.values()), seen
        assert model.module[1].bias.grad.item() == 2


def check_updates_in_backward(first):
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in module.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    options = {"bucket_size": 1}  # so that some leave before backward ends
    if not first:
        model = wrap(module, options=options)
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    if first:
        model = wrap(module, options=options)
    with pytest.raises(StateError, match=r"was updated within backward .*step\(\) after backward"):
        model(torch.ones(1, 2)).sum().backward()


BACKWARDS = [
    *(partial(check_structured, container) for container in CONTAINERS),
    check_retain_graph,
    check_many_forwards,
    *(partial(check_two_wrappers, same_backward) for same_backward in (True, False)),
    check_stage_backward,
    check_late_hooks,
    check_other_wrappers,
]


def test_gradients_of_backwards_of_every_kind_are_one_process_s():
    run_ranks(in_turn, 2, BACKWARDS, timeout=200)


REFUSED = [
    check_used_again,
    check_sparse,
    check_double_wrap,
    check_main_grad,
    *(partial(check_updates_in_backward, first) for first in (False, True)),
    check_create_graph,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_cannot_be_summed_is_refused():
    run_ranks(in_turn, 2, REFUSED)
