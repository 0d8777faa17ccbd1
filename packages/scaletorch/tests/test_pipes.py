"""Hooks, calls and dtypes of layers in pipelines beside other axes are as in one process."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from small_models import Stack
from sweeps import today
from torch import nn
from torch.nn.modules import module as hooks
from training import grid, tokens

from scaletorch.compose import (
    clip_grad_norm_,
    full_gradients,
    global_grad_norm,
    nonfinite_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import run_ranks, worst

VOCAB, WIDTH = 16, 8
PLAN = {"layers.*.up": "column", "layers.*.down": "row"}
BATCH = tokens(rows=8, length=6, words=VOCAB)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Doubled(Layer):
    def __call__(self, x):
        return super().__call__(x) * 2


class Net(Stack):
    layer = Layer

    def __init__(self):
        super().__init__((self.layer() for _ in range(4)), WIDTH, VOCAB)


class Forwards(Net):
    def run(self, layer, x):
        return layer.forward(x)


class OwnCalls(Net):
    layer = Doubled


def half(module, grad_input, grad_output):
    return tuple(None if grad is None else grad * 0.5 for grad in grad_input)


def on_layers(model):
    for layer in model.layers:
        if isinstance(layer, Layer):
            layer.register_full_backward_hook(half)
            layer.register_forward_hook(lambda module, args, output: output * 2)


def on_the_model(model):
    model.register_forward_hook(lambda module, args, output: output * 3)
    model.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % VOCAB,))
    model.register_full_backward_pre_hook(lambda module, grads: tuple(g * 2 for g in grads))


def everywhere(model):
    return [
        hooks.register_module_forward_hook(lambda module, args, output: output * 1.1),
        hooks.register_module_full_backward_pre_hook(lambda _, grads: tuple(g * 2 for g in grads)),
    ]


def nowhere(model):
    return None


CASES = {
    "forward": (Forwards, nowhere),
    "own calls": (OwnCalls, nowhere),
    "on layers": (Net, on_layers),
    "on the model": (Net, on_the_model),
    "everywhere": (Net, everywhere),
}


def plain(kind, register):
    torch.manual_seed(0)
    model = kind().double()
    handles = register(model)
    loss = F.cross_entropy(model(BATCH["input_ids"]).flatten(0, 1), BATCH["labels"].flatten())
    loss.backward()
    for handle in handles or ():
        handle.remove()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compared(sizes, options, micro_batches):
    """Compare each case with one process; hooks come after `parallelize`."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # in one process too
    with grid(sizes) as manager:
        plan = {"plan": PLAN} if manager.tp_size > 1 else {}
        for name, (kind, register) in CASES.items():
            expected, gradients = plain(kind, register)
            torch.manual_seed(0)
            model = parallelize(kind().double(), manager, **plan, **options, rehearse=False)
            handles = register(model)
            loss = train_step(model, shard_global_batch(BATCH, micro_batches, model=model))
            for handle in handles or ():
                handle.remove()
            own = full_gradients(model)
            errors = [((own[k] - g).norm() / g.norm()).item() for k, g in gradients.items()]
            assert worst([abs(loss.item() / expected - 1), *errors]) < 1e-12, name


def mixed(sizes):
    """Stages of different dtypes, gradients of an embedding that are sparse, and calls by name."""
    with grid(sizes) as manager:
        for dtype in (torch.float64, torch.complex64, torch.float32):
            dense = dtype != torch.float32 or manager.dp_size > 1
            for wide in (False, True):
                torch.manual_seed(0)
                net = Net()
                net.embed = Cast(nn.Embedding(VOCAB, WIDTH, sparse=not dense), dtype)
                model = parallelize(net, manager, rehearse=False)
                pieces = shard_global_batch(BATCH, 2, model=model)
                loss = train_step(model, pieces, loss_fn=wide_loss if wide else None)
                assert loss.dtype == (torch.float64 if wide else torch.float32)
                norm = clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
                torch.testing.assert_close(global_grad_norm(model).item(), 0.1, rtol=1e-3, atol=0)
                assert norm > 0.1
                assert not nonfinite_gradients(model)
        text = "called as the whole model. Call on every rank train_step"
        with pytest.raises(InvalidArgumentError, match=text):
            model(input_ids=pieces[0]["input_ids"])


class Cast(nn.Module):
    """Computes in another dtype than the layers behind it."""

    def __init__(self, embed, dtype):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=dtype))
        self.embed = embed

    def forward(self, input_ids):
        turned = self.embed(input_ids) * self.turn
        return turned.real.float() if turned.is_complex() else turned.float()


def wide_loss(output, batch):
    logits, labels = output.double().flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()


BESIDE = [
    ({"pp_size": 2, "dp_size": 2}, {}),
    ({"pp_size": 2, "dp_size": 2}, {"schedule": "zb_v"}),
    ({"pp_size": 2, "tp_size": 2}, {"recompute": True}),
    ({"pp_size": 4}, {"schedule": "zb_h1", "recompute": True}),
]


@pytest.mark.parametrize(("sizes", "options"), today(BESIDE, 4))
def test_pipelines_beside_other_axes(sizes, options):
    run_ranks(compared, 4, sizes, options, 2, timeout=200)


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"pp_size": 2}])
def test_two_ranks(sizes):
    run_ranks(compared, 2, sizes, {"recompute": True}, 4, timeout=200)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_stages_of_several_dtypes(dp_size):
    run_ranks(mixed, 2 * dp_size, {"pp_size": 2, "dp_size": dp_size})
